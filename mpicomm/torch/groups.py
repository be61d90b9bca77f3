"""The set-up of groups: their Communicators, PyTorch's rendezvous by MPI, and the barrier that names missing ranks."""

from __future__ import annotations

import json
import os
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from mpicomm.api.communicator import Communicator
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.monitored_barrier import private_copy
from mpicomm.cluster.process import node_key
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.works import GroupTimeoutError

Rendezvous = Iterator[tuple[dist.Store, int, int]]

_STEP = "init_process_group"
_TAGS = 32768  # MPI promises tags below this number
_SHORTEST = timedelta(milliseconds=1)  # a store does not wait for less


def create_communicator(description: Any, world: Communicator | None) -> Communicator:
    """Return a Communicator of the ranks of the new group that PyTorch's ``description`` names. Collective over them.

    ``world`` is the Communicator of the group of all ranks, None before it exists or if it has another backend. Raises
    the same error on all ranks; see `create`.
    """
    timeout_s = description.timeout.total_seconds()
    ranks, name = list(description.global_ranks_in_group), str(description.group_id)
    if world is not None and ranks:
        plain = create_subgroup(world, ranks, name, description.store, timeout_s)
        return communicator_on(plain, world.device, timeout_s)
    if not ranks:
        plain = private_copy(MPI.COMM_WORLD, _STEP, timeout_s)
    else:  # the group of all ranks has another backend
        _require_ranks(dist.get_rank(), dist.get_world_size())
        plain = create_subgroup(MPI.COMM_WORLD, ranks, name, description.store, timeout_s)
    return _in_order_of_pytorch(plain, description.group_rank, description.group_size, timeout_s)


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


def _in_order_of_pytorch(plain: MPI.Intracomm, rank: int, size: int, timeout_s: float) -> Communicator:
    """Return a Communicator of the ranks of ``plain`` in PyTorch's order, and free ``plain``. Collective."""
    group = Group(plain, range(plain.size), timeout_s)

    def describe() -> tuple[int, str, int]:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise InvalidUsageError(
                "the backend mpicomm calls MPI from several threads: start MPI with MPI.THREAD_MULTIPLE, which is "
                'mpi4py\'s default (mpi4py.rc.thread_level="multiple")'
            )
        if size != plain.size:
            _require_ranks(rank, size)
        return rank, node_key(), torch.cuda.current_device() if torch.cuda.is_available() else -1

    try:
        members = group.allgather(_STEP, describe)
        ranks = [each[0] for each in members]
        if sorted(ranks) != list(range(size)):
            raise InvalidUsageError(f"the ranks of MPI have the ranks {ranks} in torch.distributed: pass each once")
        chosen = {(node, gpu) for _, node, gpu in members}
        device: int | str = "cpu" if any(gpu < 0 for _, gpu in chosen) else "auto"
        if device == "auto" and len(chosen) == len(members):  # the ranks of each node have chosen different GPUs
            device = members[plain.rank][2]
        # A launcher of PyTorch inside an MPI job may number the ranks in another order.
        ordered = plain.Split(0, rank)
        assert isinstance(ordered, MPI.Intracomm)
        return communicator_on(ordered, device, timeout_s)
    finally:
        if group.broken is None:
            plain.Free()


def communicator_on(plain: MPI.Intracomm, device: int | str, timeout_s: float) -> Communicator:
    """Return a Communicator of the ranks of ``plain``, and free ``plain``. Collective."""
    comm = Communicator(plain, device=device, timeout_s=timeout_s)
    plain.Free()  # not after an error, because MPI's Free may wait without a limit for a rank that is missing
    return comm


def install_rendezvous_handler() -> None:
    """Let ``env://``, PyTorch's default, ask MPI if the environment names no rank. Local.

    PyTorch has no public way to change its behaviour without ``init_method``. So this replaces the handler of
    ``env://``.
    """
    by_environment = _rendezvous_handlers["env"]

    def handler(url: str, timeout: timedelta = dist.default_pg_timeout, **options: Any) -> Rendezvous:
        if url == "env://" and not {"RANK", "WORLD_SIZE"} & os.environ.keys():
            return _rendezvous_by_mpi(timeout)
        rendezvous: Rendezvous = by_environment(url, timeout=timeout, **options)
        return rendezvous

    _rendezvous_handlers["env"] = handler


def _rendezvous_by_mpi(timeout: timedelta) -> Rendezvous:
    """Yield a store on the first rank, and rank and size of ``MPI.COMM_WORLD``. Collective.

    If the first rank cannot listen, all ranks raise the same error. Raises `CollectiveTimeoutError` if a rank does not
    come.
    """
    limit_s = timeout.total_seconds()
    private = private_copy(MPI.COMM_WORLD, _STEP, limit_s)
    group = Group(private, range(private.size), limit_s)
    rank, size = private.rank, private.size
    try:
        hosts = group.allgather(f"{_STEP}: hosts", node_key)
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if len(set(hosts)) == 1 else socket.gethostname())
        served: list[dist.TCPStore] = []

        def listen() -> tuple[str, int]:
            if private.rank:
                return address, 0
            port = os.environ.get("MASTER_PORT", "0")
            if not port.isdecimal() or int(port) > 65535:
                raise InvalidUsageError(f"MASTER_PORT={port!r} is no port: set a number from 0 to 65535, or unset it")
            # As PyTorch's own stores, it shares a port on which this process already has one.
            shares = {"wait_for_workers": False, "multi_tenant": True}
            served.append(dist.TCPStore(address, int(port), private.size, True, timeout, **shares))
            return address, served[0].port

        address, port = group.allgather(f"{_STEP}: store", listen)[0]
        store = served[0] if served else dist.TCPStore(address, port, private.size, False, timeout)
    finally:
        if group.broken is None:  # else a rank is missing, and MPI's Free would wait for it
            private.Free()
    yield store, rank, size
    raise RuntimeError("PyTorch asks for other ranks, but MPI does not change the ranks of a running program")


def create_subgroup(
    parent: MPI.Intracomm, ranks: Sequence[int], name: str, store: c10d.Store, timeout_s: float
) -> MPI.Intracomm:
    """Return MPI's communicator of some ranks of ``parent``, in this order. The caller frees it.

    Collective only over these ranks. They pass the same ``name``, which differs between groups that are made at the
    same time. ``store`` is the store of the new group. Raises `GroupTimeoutError` if a rank does not come.
    """
    # The barrier comes first, because MPI waits without a limit for ranks that do not come.
    came = dist.PrefixStore("came", store)
    store_barrier(came, list(ranks).index(parent.rank), len(ranks), timeout_s, wait_all_ranks=True, step="new_group")
    parent_group = parent.Get_group()
    members = parent_group.Incl(ranks)
    tag = zlib.crc32(name.encode()) % _TAGS
    plain = MPI.Intracomm(parent).Create_group(members, tag)
    members.Free()
    parent_group.Free()
    assert isinstance(plain, MPI.Intracomm)
    return plain


def store_barrier(
    store: c10d.Store, rank: int, size: int, timeout_s: float, *, wait_all_ranks: bool, step: str = "monitoredBarrier"
) -> None:
    """Wait until all ranks have come to ``step``. Raise `GroupTimeoutError`. Collective, with its own store.

    Rank 0 names the first missing rank, or all with ``wait_all_ranks``. The other ranks get its error, also a late
    rank. If rank 0 is late, it gets the error of the others. The errors begin like gloo's, because programs look for
    these words.
    """
    text, missing = "", list[int]()
    if rank:
        store.set(str(rank), "")
        # Rank 0 may come up to `timeout_s` after this rank. It writes the result at most `timeout_s` later.
        if not _arrives(store, "result", 2 * timeout_s):
            text, missing = f"rank 0 did not come within {2 * timeout_s:g} s", [0]
    elif timeout_s <= 0:
        text = f"Rank 0 timed out in {step} after {timeout_s:g} s"
    else:
        end = time.monotonic() + timeout_s
        for other in range(1, size):
            if (wait_all_ranks or not missing) and not _arrives(store, str(other), end - time.monotonic()):
                missing.append(other)
        if missing:
            names = ", ".join(map(str, missing))
            text = f"Rank{'s' * (len(missing) > 1)} {names} failed to pass {step} in {timeout_s:g} s"
    # The first result that is written holds for all ranks. So rank 0 does not pass after another rank has given up.
    text, missing = json.loads(store.compare_set("result", "", json.dumps((text, missing))))
    if text and rank:
        reached = f"Rank {rank} successfully reached {step}"
        text = f"{reached}, but received errors while waiting for send/recv from rank 0: {text}"
    if text:
        raise GroupTimeoutError(text, ranks=missing)


def _arrives(store: c10d.Store, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], max(timedelta(seconds=timeout_s), _SHORTEST))
    except RuntimeError:  # of PyTorch, among them DistStoreError
        return bool(store.check([key]))
    return True
