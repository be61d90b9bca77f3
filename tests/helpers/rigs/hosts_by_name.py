"""Communicators whose ranks claim to be on several hosts, so that they are several groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

from mpi4py import MPI

import mpicomm
from mpicomm.cluster import placement as parts
from tests.helpers.rigs.communicators import communicator

PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "in order": lambda rank, size: 2 * rank // size,
    "in turns": lambda rank, size: rank % 2,
    "uneven": lambda rank, size: min(rank, 1),
    "a pair first": lambda rank, size: max(rank - 1, 0),
    "one each": lambda rank, size: rank,
    "one host": lambda rank, size: 0,
}
"""The host of a rank, from its number and the number of ranks. GPUs of one host are groups of up to `MOST` ranks."""
MOST = 2


def groups_of(placement: str, size: int, device: str = "cpu") -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks, in the order of their first ranks."""
    if placement == "one host" and device != "cpu":
        return tuple(map(tuple, parts.parts_of(range(size), MOST)))
    hosts: dict[int, list[int]] = {}
    for rank in range(size):
        hosts.setdefault(PLACEMENTS[placement](rank, size), []).append(rank)
    return tuple(map(tuple, hosts.values()))


@contextlib.contextmanager
def on_hosts(placement: str, device: str, *, timeout_s: float = 20.0) -> Iterator[mpicomm.Communicator]:
    """Give a Communicator of all ranks on these hosts. Collective."""
    host = PLACEMENTS[placement](MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    # NCCL takes ranks that share a GPU if they claim to be on different hosts. It reads the variable once.
    os.environ.setdefault("NCCL_HOSTID", f"rank{MPI.COMM_WORLD.rank}")
    few = mock.patch.object(parts, "MAX_RANKS", MOST) if placement == "one host" else contextlib.nullcontext()
    with few:
        with mock.patch.dict(os.environ, MPICOMM_HOSTID=f"host{host}"):
            comm = communicator(device, timeout_s=timeout_s)
        try:
            yield comm
        finally:
            comm.Free()
