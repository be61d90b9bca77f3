"""The kernel of ``python -m mpicomm.p2p``."""

from __future__ import annotations

import numpy as np

from mpicomm.p2p.gpu import COPY, Copying
from tests.kernels.build import Builds
from tests.kernels.machine import Machine


def test_bytes_are_copied_into_memory_of_another_rank(builds: Builds) -> None:
    machine, rng = Machine(builds, 2), np.random.default_rng(1)
    kernel = builds.kernel(COPY.source, COPY.entry)
    arrived = []
    for nbytes, offset in ((1, 0), (16, 0), (100_003, 0), (100_003, 5), (4096, 16)):
        content = rng.integers(0, 256, nbytes, np.uint8)
        source = machine.place(0, content, offset=offset)
        target = machine.allocate(1, nbytes)
        copying = Copying(machine.address(1, target, 0), source.address, nbytes)
        machine.launch(0, kernel, [copying], blocks=3, threads=96)
        arrived.append((target, content))
    machine.run()
    assert all((target.bytes == content).all() for target, content in arrived)
