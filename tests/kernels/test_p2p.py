"""The kernels of ``python -m mpicomm.p2p``."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.p2p.gpu import COPY, GATE, POINTER_CHASE, Copying, Gate, PointerChase
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


@pytest.mark.parametrize("released", [True, False])
def test_a_held_stream_goes_on_when_it_is_released_or_time_is_up(builds: Builds, released: bool) -> None:
    machine = Machine(builds, 1)
    word = machine.place(0, np.array([released], np.uint32))
    kernel = builds.kernel(GATE.source, GATE.entry)
    machine.launch(0, kernel, [Gate(word.address, 300_000_000)], blocks=1, threads=1)
    machine.run()
    assert machine.elapsed_s < 0.01 if released else 0.3 <= machine.elapsed_s < 0.4


def test_loads_that_follow_each_other(builds: Builds) -> None:
    machine = Machine(builds, 2)
    word, result = machine.allocate(1, 8), machine.allocate(0, 16)
    kernel = builds.kernel(POINTER_CHASE.source, POINTER_CHASE.entry)
    machine.launch(0, kernel, [PointerChase(machine.address(1, word, 0), result.address, 500)], blocks=1, threads=1)
    machine.run()
    elapsed_ns, loads = result.view(np.uint64)
    assert elapsed_ns > 0 and loads == 500
