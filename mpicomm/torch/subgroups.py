"""Communicators of some ranks of a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch.distributed as dist
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.torch.monitored_barrier import wait_for_all

_TAGS = 32768  # MPI promises tags below this number


def part_of(parent: Communicator, ranks: Sequence[int], name: str, store: c10d.Store, timeout_s: float) -> Communicator:
    """Return a Communicator of some ranks of ``parent``, in this order, on the same devices.

    Collective only over these ranks. They pass the same ``name``, which differs between groups that are made at the
    same time. ``store`` is the store of the new group. Raises `GroupTimeoutError` if a rank does not come.
    """
    plain = members_of(parent, ranks, name, store, timeout_s)
    try:
        return Communicator(plain, device=parent.device, timeout_s=timeout_s)
    finally:
        plain.Free()


def members_of(
    parent: MPI.Intracomm, ranks: Sequence[int], name: str, store: c10d.Store, timeout_s: float
) -> MPI.Intracomm:
    """Return MPI's communicator of some ranks of ``parent``; see `part_of`. The caller frees it."""
    # The barrier comes first, because MPI waits without a limit for ranks that do not come.
    came = dist.PrefixStore("came", store)
    wait_for_all(came, list(ranks).index(parent.rank), len(ranks), timeout_s, name_all=True, step="new_group")
    whole = parent.Get_group()
    members = whole.Incl(ranks)
    tag = zlib.crc32(name.encode()) % _TAGS
    plain = MPI.Intracomm(parent).Create_group(members, tag)
    members.Free()
    whole.Free()
    assert isinstance(plain, MPI.Intracomm)
    return plain
