"""Process groups and their Communicators: which ranks a group has, on which device, and for how long."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.cluster.agreement import Group, node_key
from mpicomm.cluster.roll_call import duplicate
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.parts import part_of
from mpicomm.torch.process_group import ProcessGroup


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the Communicator of a group of the backend ``mpicomm``, by default of all ranks. Local.

    The group keeps it: `torch.distributed.destroy_process_group` frees it. Raises `InvalidUsageError` for a group of
    another backend.
    """
    return group_of(group).communicator


def group_of(group: dist.ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, by default that of all ranks; raise `InvalidUsageError` if it is not mpicomm's. Local."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise InvalidUsageError(
            f'group={group!r} is no group of mpicomm: pass one that init_process_group("mpicomm") or new_group has made'
        )
    return group


def create(given: Any, options: Any) -> ProcessGroup:
    """Return a group for ``torch.distributed``, which describes it in ``given``. Collective over its ranks.

    Raises `InvalidUsageError` where PyTorch has other ranks than ``MPI.COMM_WORLD``, and the errors of `Communicator`,
    on all ranks alike.
    """
    if options is not None:
        raise InvalidUsageError(f"pg_options={options!r}: the backend mpicomm has no options")
    timeout_s = given.timeout.total_seconds()
    ranks = list(given.global_ranks_in_group)
    if not ranks:
        comm = _of_all(given.group_rank, given.group_size, timeout_s)
    else:
        comm = part_of(communicator(), ranks, str(given.group_id), timeout_s)
    return ProcessGroup(given.store, comm, timeout_s)


def _of_all(rank: int, size: int, timeout_s: float) -> Communicator:
    world, step = MPI.COMM_WORLD, "init_process_group"
    private = duplicate(world, step, timeout_s)
    group = Group(private, range(world.size), timeout_s)

    def describe() -> tuple[int, str, int | None]:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise InvalidUsageError(
                "the backend mpicomm calls MPI from several threads: start MPI with MPI.THREAD_MULTIPLE, which is "
                'mpi4py\'s default (mpi4py.rc.thread_level="multiple")'
            )
        if size != world.size:
            raise InvalidUsageError(
                f"torch.distributed has {size} ranks, but MPI has {world.size}: start the program with mpirun -np "
                f"{size}, and pass no other world_size"
            )
        return rank, node_key(), torch.cuda.current_device() if torch.cuda.is_available() else None

    try:
        described = group.exchange(step, describe)
        ranks = [each[0] for each in described]
        if len(set(ranks)) < size:
            raise InvalidUsageError(f"the ranks of MPI have the ranks {ranks} in torch.distributed: pass each once")
        # Where the ranks of each node have chosen different devices, these are kept.
        chosen = [each[1:] for each in described]
        device: int | str | None = chosen[world.rank][1]
        if any(each[1] is None for each in chosen):
            device = "cpu"
        elif len(set(chosen)) < size:
            device = "auto"
        # A launcher of PyTorch inside an MPI job may number the ranks in another order.
        ordered = private.Split(0, rank)
        try:
            assert device is not None
            assert isinstance(ordered, MPI.Intracomm)
            return Communicator(ordered, device=device, timeout_s=timeout_s)
        finally:
            ordered.Free()
    finally:
        if group.broken is None:
            private.Free()
