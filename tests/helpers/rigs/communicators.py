"""Communicators on the device of a test or on hosts by name, a test of their memory, and the forms of their calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpicomm
from mpicomm.cluster import placement as parts
from tests.helpers.jobs.pace import stretched


def communicator(
    device: str, comm: MPI.Intracomm = MPI.COMM_WORLD, *, timeout_s: float = 20.0, handle: str = "auto"
) -> mpicomm.Communicator:
    """Return a new Communicator on the device that the ``device`` fixture names. Collective."""
    return mpicomm.Communicator(comm, device="cpu" if device == "cpu" else "auto", handle=handle, timeout_s=timeout_s)


def patience_s(device: str) -> float:
    """Return a deadline for data that never comes. Data that comes is faster, also on GPUs and a busy machine."""
    return stretched(0.5 if device == "cpu" else 1.0)


@contextlib.contextmanager
def array_module(comm: mpicomm.Communicator) -> Iterator[Any]:
    """Give NumPy, or CuPy with the communicator's GPU as the current device."""
    if comm.device == "cpu":
        yield np
    else:
        import cupy

        with cupy.cuda.Device(comm.device):
            yield cupy


def to_host(array: Any) -> npt.NDArray[Any]:
    """Return a NumPy copy of a NumPy or CuPy array."""
    copy: npt.NDArray[Any] = array.get() if hasattr(array, "get") else np.array(array)
    return copy


def settle(comm: mpicomm.Communicator) -> None:
    """Let every rank come to the end of its work. Collective."""
    comm.check()
    comm.Barrier()


def node_ranks(array: mpicomm.SymmetricArray) -> list[int]:
    """Return the ranks whose parts this rank can access."""
    return [rank for rank, pointer in enumerate(to_host(array.pointers).tolist()) if pointer]


def ring_in_host(comm: mpicomm.Communicator) -> tuple[int, int]:
    """Return the ranks that follow and precede this one among the ranks of its host. Collective."""
    host = comm.describe().node
    ranks = [rank for rank, each in enumerate(comm.allgather(host)) if each == host]
    return ranks[(comm.local_rank + 1) % len(ranks)], ranks[comm.local_rank - 1]


def groups_of(comm: mpicomm.Communicator) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks of each group that reduces by itself, None if there is one group. Local."""
    groups = comm._placement.domains
    return groups if len(groups) > 1 else None


def require_memory_works(comm: mpicomm.Communicator) -> None:
    """Let every rank write into every part that it can access, and check its own part. Collective."""
    with array_module(comm), comm.zeros(comm.size, np.int64) as array:
        ranks = node_ranks(array)
        assert comm.rank in ranks
        for peer in ranks:
            array.peer(peer)[comm.rank] = 1000 + 10 * comm.rank + peer
        settle(comm)
        expected = [1000 + 10 * rank + comm.rank if rank in ranks else 0 for rank in range(comm.size)]
        assert to_host(array.local).tolist() == expected


def halves(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Even ranks and odd ranks, in order."""
    half = comm.Split(comm.rank % 2, comm.rank)
    assert isinstance(half, MPI.Intracomm)
    return half


FORMS = ("{}", "I{}", "{}_init")


def method_name(form: str, operation: str) -> str:
    return form.format(operation.lower() if form == "I{}" else operation)


def complete(request: MPI.Request | None, starts: int = 1) -> None:
    """Wait for a call in any form. A persistent request is started ``starts`` times and freed."""
    if isinstance(request, MPI.Prequest):
        for _ in range(starts):
            request.Start()
            request.Wait()
        request.Free()
    elif request is not None:
        request.Wait()


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


def groups_on(placement: str, size: int, device: str = "cpu") -> tuple[tuple[int, ...], ...]:
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
