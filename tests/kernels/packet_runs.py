"""Runs of packets of one protocol, for several tests: every size, and hundreds of launches from a given one on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, carried_nbytes
from tests.kernels.build import Builds, Change
from tests.kernels.kernel_calls import Calls, random_counts, sizes_around
from tests.kernels.machine import Machine
from tests.kernels.packet_rig import INBOX_NBYTES, SMALL, PacketRig

_STEP_NBYTES = SMALL.threads * 16
STARTS = {"2^30": 2**30 - 1, "2^32": 2**32 - 100}
"""Launches after which numbers begin again."""


def run_every_size(builds: Builds, protocol: Protocol, size: int) -> None:
    """Collectives at every size at which something changes."""
    rig = PacketRig(Machine(builds, size), protocol)
    calls = Calls(rig, np.random.default_rng(size), nap_us=2000)
    room = carried_nbytes(INBOX_NBYTES, protocol)
    most = room - 4 if protocol == "flagged" else INBOX_NBYTES * 4
    limits = [nbytes for nbytes in (8, 16, _STEP_NBYTES // 2, _STEP_NBYTES, INBOX_NBYTES, most) if nbytes <= most]
    checks = []
    for count in sizes_around(*limits, itemsize=4):
        if 0 < count * 4 <= most:
            checks += [calls.allreduce("float32", "sum", count, two_shot=two_shot) for two_shot in (False, True)]
            checks.append(calls.reduce("float32", "sum", count, "two_shot", in_place=False))
            checks.append(calls.scan("float32", "sum", count))
            checks += [calls.allgather(4 * count), calls.bcast(4 * count - 1, "two_shot")]
    rig.machine.run(checks, seed=size, jitter_us=300)


def run_movements(builds: Builds, protocol: Protocol, nbytes: int) -> None:
    """Collectives that only move data."""
    rig = PacketRig(Machine(builds, 4), protocol)
    calls = Calls(rig, np.random.default_rng(nbytes))
    checks = [call(nbytes) for call in (calls.bcast, partial(calls.bcast, algorithm="two_shot"), calls.allgather)]
    rig.machine.run(checks, jitter_us=100)


def run_uneven(
    builds: Builds, size: int, *, laps: int = 6, seed: int = 0, changes: Sequence[Change] = (), timeout_s: float = 20
) -> None:
    """Calls that use inboxes again, between two ranks; one of them sends more than the other, or only it sends."""
    machine, inbox_nbytes = Machine(builds, size), laps * _STEP_NBYTES
    rig = PacketRig(machine, inbox_nbytes=inbox_nbytes, changes=changes, timeout_s=timeout_s)
    rng = np.random.default_rng((size, seed))
    calls = Calls(rig, rng, nap_us=1000)
    lengths = (0, 5, _STEP_NBYTES - 1, inbox_nbytes, inbox_nbytes + 1, 2 * inbox_nbytes + 100, 5 * inbox_nbytes - 7)
    checks = []
    for turn in range(3):
        checks += [calls.alltoallv(random_counts(rng, size, lengths)) for _ in range(3)]
        checks += [calls.bcast(20_000 + turn), calls.scan("float32", "sum", 5000 + turn)]
        checks.append(calls.reduce_scatter("int32", "sum", [int(length) // 4 for length in rng.choice(lengths, size)]))
    machine.run(checks, seed=seed, jitter_us=300, limit_s=30)


def run_long(
    builds: Builds,
    protocol: Protocol,
    *,
    start: int,
    batches: int = 2,
    changes: Sequence[Change] = (),
    timeout_s: float = 20,
) -> None:
    """Hundreds of small reductions between three ranks, from launch ``start`` on.

    If all send to all, packets keep the ranks in step; in scans the first rank takes none.
    """
    rng = np.random.default_rng(start)
    machine = Machine(builds, 3)
    rig = PacketRig(machine, protocol, changes=changes, timeout_s=timeout_s)
    rig.start_at(start)
    if protocol == "flagged" and start > 0:  # the round of numbers ends soon, and inboxes are wiped
        rig.fill_with_old_flags(rng)
    calls = Calls(rig, rng, nap_us=1000)
    for batch in range(batches):
        machine.clear()
        checks = [calls.allreduce("float32", "sum", int(count)) for count in rng.integers(1, 600, 150)]
        checks += [calls.scan("float32", "sum", int(count)) for count in rng.integers(1, 600, 50)]
        if protocol != "flagged":  # several times the size of the inboxes
            checks += [calls.allreduce("float32", "sum", 5000, two_shot=two_shot) for two_shot in (False, True)]
            checks += [calls.allgather(12000), calls.bcast(20000, "two_shot"), calls.allgather(12000)]
        machine.run(checks, seed=batch, jitter_us=(300, 0)[batch % 2], limit_s=30)
