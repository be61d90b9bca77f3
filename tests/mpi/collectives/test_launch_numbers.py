"""Packets on GPUs: numbers of launches that begin again, and messages of many lengths at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.inputs import launch_numbers
from tests.helpers.rigs.communicators import to_host

LENGTHS = (5, 3_000_001, 5_000_003, 9_000_007, 13_000_001)  # also longer than the inboxes


@pytest.fixture(autouse=True)
def on_gpus(comm: mpicomm.Communicator) -> None:
    if comm.device == "cpu" or comm.size == 1:
        pytest.skip("packets between GPUs")


def begin_after_with_old_flags(comm: Any, xp: Any, launch: int) -> None:
    """Let it be the last launch, and let the inboxes of packets with flags hold the flags of earlier launches."""
    comm.Barrier(stream=0)
    comm.check()
    arena = comm._collectives.engines.gpu.engine._arena
    layout = arena.layout
    memory = xp.cuda.UnownedMemory(arena.pointers[comm.rank], layout.nbytes, arena)
    head_and_flags = xp.ndarray((layout.sentinels,), np.uint8, xp.cuda.MemoryPointer(memory, 0))
    content = head_and_flags.get()
    launch_numbers.begin_after(launch, content, comm.size)
    flagged = content[layout.flagged :]
    flagged[:] = launch_numbers.old_flags(flagged.nbytes, np.random.default_rng(launch)).view(np.uint8)
    head_and_flags.set(content)
    xp.cuda.runtime.deviceSynchronize()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("barriers", [0, 4])
@pytest.mark.parametrize("launch", [2**30 - 2, 2**32 - 2])
def test_old_flags_are_not_taken_for_new_when_numbers_of_launches_come_again(
    comm: mpicomm.Communicator, xp: Any, launch: int, barriers: int
) -> None:
    begin_after_with_old_flags(comm, xp, launch)
    for _ in range(barriers):
        comm.Barrier(stream=0)
    for number in range(110):
        send = xp.arange(1 + 7 * number, dtype=np.int32) + comm.rank
        receive = xp.zeros_like(send)
        comm.Allreduce(send, receive, algorithm="one_shot")
        comm.check()
        expected = comm.size * np.arange(1 + 7 * number) + sum(range(comm.size))
        assert to_host(receive).tolist() == expected.tolist()


def test_messages_longer_than_the_inboxes_in_some_directions(comm: mpicomm.Communicator, xp: Any) -> None:
    rank, size = comm.rank, comm.size
    for call in range(3):
        counts = [[LENGTHS[(2 * a + b + call) % 5] for b in range(size)] for a in range(size)]  # [from][to]
        coming = [counts[source][rank] for source in range(size)]
        send = xp.concatenate(
            [xp.arange(rank + to, rank + to + counts[rank][to], dtype=np.int32) for to in range(size)]
        )
        received = xp.zeros(sum(coming), np.int32)
        comm.Alltoallv([send, counts[rank]], [received, coming])
        whole = xp.arange(sum(counts[0]), dtype=np.int32)
        part, gathered = xp.zeros(counts[0][rank], np.int32), xp.zeros_like(whole)
        comm.Reduce_scatter(whole, part, counts[0])
        comm.Allgatherv(part, [gathered, counts[0]])
        comm.check()
        expected = [np.arange(source + rank, source + rank + coming[source]) for source in range(size)]
        assert np.array_equal(to_host(received), np.concatenate(expected))
        assert np.array_equal(to_host(gathered), size * to_host(whole))
