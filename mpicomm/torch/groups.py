"""Process groups and their Communicators: how ranks meet, and the ranks, the device and the life of a group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.rendezvous import _rendezvous_handlers

from mpicomm.api.communicator import Communicator
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import node_key
from mpicomm.cluster.roll_call import private_copy
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.process_group import ProcessGroup
from mpicomm.torch.subgroups import members_of, part_of

Found = Iterator[tuple[dist.Store, int, int]]

_STEP = "init_process_group"


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the Communicator of a group of the backend ``mpicomm``, by default of all ranks. Local.

    The group keeps it, and `torch.distributed.destroy_process_group` frees it. Its collectives take no turn among the
    calls of the group. So wait for the group's works first, and call the collectives in one thread. Raises
    `InvalidUsageError` for a group of another backend.
    """
    return group_of(group).communicator


def group_of(group: dist.ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, by default the group of all ranks. Raise `InvalidUsageError` for other backends. Local."""
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise InvalidUsageError(
            f'group={group!r} is no group of mpicomm: pass one that init_process_group("mpicomm") or new_group has made'
        )
    return group


def create(given: Any, options: Any) -> ProcessGroup:
    """Return a group for ``torch.distributed``, which describes the group in ``given``. Collective over its ranks.

    Raises the same error on all ranks: `InvalidUsageError` if PyTorch has other ranks than ``MPI.COMM_WORLD``,
    `GroupTimeoutError` if a rank does not come, and the errors of `Communicator`.
    """
    if options is not None:
        raise InvalidUsageError(f"pg_options={options!r}: the backend mpicomm has no options")
    timeout_s = given.timeout.total_seconds()
    ranks, name = list(given.global_ranks_in_group), str(given.group_id)
    whole = dist.group.WORLD
    if isinstance(whole, ProcessGroup) and ranks:
        comm = part_of(whole.communicator, ranks, name, given.store, timeout_s)
    else:
        if not ranks:
            plain = private_copy(MPI.COMM_WORLD, _STEP, timeout_s)
        else:  # the group of all ranks has another backend
            _require_ranks(dist.get_rank(), dist.get_world_size())
            plain = members_of(MPI.COMM_WORLD, ranks, name, given.store, timeout_s)
        comm = _agreed(plain, given.group_rank, given.group_size, timeout_s)
    return ProcessGroup(given.store, comm, timeout_s)


def _require_ranks(rank: int, size: int) -> None:
    world = MPI.COMM_WORLD
    if size != world.size:
        raise InvalidUsageError(
            f"torch.distributed has {size} ranks, but MPI has {world.size}: start the program with mpirun -np {size}, "
            "and pass no other world_size"
        )
    if rank != world.rank:
        raise InvalidUsageError(
            f"rank {rank} of torch.distributed is rank {world.rank} of MPI: pass rank={world.rank} to "
            "init_process_group, or use the backend mpicomm there"
        )


def _agreed(plain: MPI.Intracomm, rank: int, size: int, timeout_s: float) -> Communicator:
    """Return a Communicator of the ranks of ``plain`` in PyTorch's order, and free ``plain``. Collective."""
    group = Group(plain, range(plain.size), timeout_s)

    def describe() -> tuple[int, str, int | None]:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise InvalidUsageError(
                "the backend mpicomm calls MPI from several threads: start MPI with MPI.THREAD_MULTIPLE, which is "
                'mpi4py\'s default (mpi4py.rc.thread_level="multiple")'
            )
        if size != plain.size:
            _require_ranks(rank, size)
        return rank, node_key(), torch.cuda.current_device() if torch.cuda.is_available() else None

    try:
        members = group.exchange(_STEP, describe)
        ranks = [each[0] for each in members]
        if sorted(ranks) != list(range(size)):
            raise InvalidUsageError(f"the ranks of MPI have the ranks {ranks} in torch.distributed: pass each once")
        # A launcher of PyTorch inside an MPI job may number the ranks in another order.
        ordered = plain.Split(0, rank)
        assert isinstance(ordered, MPI.Intracomm)
        try:
            return Communicator(ordered, device=_device(members, plain.rank), timeout_s=timeout_s)
        finally:
            ordered.Free()
    finally:
        if group.broken is None:
            plain.Free()


def _device(members: Sequence[tuple[int, str, int | None]], index: int) -> int | str:
    """Return the device of a rank: its current device if all ranks of each node have chosen different devices.

    Local.
    """
    chosen = [(node, device) for _, node, device in members]
    current = members[index][2]
    if current is None or any(device is None for _, device in chosen):
        return "cpu"
    return current if len(set(chosen)) == len(chosen) else "auto"


def install_handler() -> None:
    """Let ``env://``, PyTorch's default, ask MPI if the environment names no rank. Local.

    PyTorch has no public way to change its behaviour without ``init_method``. So this replaces the handler of
    ``env://``.
    """
    by_environment = _rendezvous_handlers["env"]

    def handler(url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any) -> Found:
        if url == "env://" and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
            return _by_mpi(timeout)
        found: Found = by_environment(url, timeout=timeout, **options)
        return found

    _rendezvous_handlers["env"] = handler


def _port() -> int:
    text = os.environ.get("MASTER_PORT", "0")
    if not text.isdecimal() or int(text) > 65535:
        raise InvalidUsageError(f"MASTER_PORT={text!r} is no port: set a number from 0 to 65535, or unset it")
    return int(text)


def _by_mpi(timeout: timedelta) -> Found:
    """Yield a store on the first rank, and rank and size of ``MPI.COMM_WORLD``. Collective.

    If the first rank cannot listen, all ranks raise the same error. Raises `CollectiveTimeoutError` if a rank does not
    come.
    """
    limit_s = timeout.total_seconds()
    private = private_copy(MPI.COMM_WORLD, _STEP, limit_s)
    group = Group(private, range(private.size), limit_s)
    rank, size = private.rank, private.size
    try:
        hosts = group.exchange(f"{_STEP}: hosts", node_key)
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(set(hosts)) == 1 else socket.gethostname())
        served: list[dist.TCPStore] = []

        def listen() -> tuple[str, int]:
            if private.rank == 0:
                served.append(dist.TCPStore(address, _port(), private.size, True, timeout, wait_for_workers=False))
                return address, served[0].port
            return address, 0

        address, port = group.exchange(f"{_STEP}: store", listen)[0]
        store = served[0] if served else dist.TCPStore(address, port, private.size, False, timeout)
    finally:
        if group.broken is None:  # else a rank is missing, and MPI's Free would wait for it
            private.Free()
    yield store, rank, size
    raise RuntimeError("PyTorch asks for other ranks, but MPI does not change the ranks of a running program")
