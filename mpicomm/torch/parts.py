"""Communicators of some ranks of a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from mpi4py import MPI

from mpicomm.api.communicator import Communicator

_TAGS = 32768  # MPI promises tags below this number


def part_of(parent: Communicator, ranks: Sequence[int], name: str, timeout_s: float) -> Communicator:
    """Return a Communicator of some ranks of ``parent``, in this order, on the same devices.

    Collective over these ranks alone. ``name`` is the same on them, and differs between groups that are made at the
    same time.
    """
    plain = members_of(parent, ranks, name)
    try:
        return Communicator(plain, device=parent.device, timeout_s=timeout_s)
    finally:
        plain.Free()


def members_of(parent: MPI.Intracomm, ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Return MPI's communicator of some ranks of ``parent``; see `part_of`. The caller frees it."""
    whole = parent.Get_group()
    members = whole.Incl(ranks)
    tag = zlib.crc32(name.encode()) % _TAGS
    plain = MPI.Intracomm(parent).Create_group(members, tag)
    members.Free()
    whole.Free()
    assert isinstance(plain, MPI.Intracomm)
    return plain
