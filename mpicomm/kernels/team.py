"""Team, an argument of every kernel of a communicator, and inboxes: copies of CUDA headers. Imports no CUDA package."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.variant import u32, u64

# Constants and structures of team.cuh; a test compares them.
LANES = 32  # threads of a warp: kLanes in memory_order.cuh
MAX_RANKS = 8
MAX_BLOCKS = 256
LINE_NBYTES = 128
PACKET_NBYTES = 16  # kPacketNbytes in bytes.cuh
ARENA_HEADER_NBYTES = 2432
"""The size of the header of an arena, which is all zero at first: see the top of team.cuh."""
EXCHANGE, MISMATCH, MESSAGE = 2, 3, 4
COUNTS, RECEIVE_OVERFLOW = 13, 14
"""``enum Operation`` of faults.cuh, without signals."""
OF_RECEIVE = 1 << 31
"""In a record of `COUNTS`: the displacement of a received block. ``kOfReceive`` in device_counts.cuh of packets."""
ABORT_OPERATION = 7
"""The offset in an arena of the byte that names the operation in which a rank gave up: the last of the abort word."""


class Faults(ctypes.Structure):
    """The fault record in the view of kernels: the host's copy of ``Faults`` in faults.cuh."""

    _fields_ = [*u64("record", "failed")]


class Team(ctypes.Structure):
    """The host's copy of ``Team`` in team.cuh."""

    _fields_ = [
        ("arenas", ctypes.c_uint64 * MAX_RANKS),
        ("faults", Faults),
        *u64("timeout_ns"),
        ("user_ranks", ctypes.c_uint32 * MAX_RANKS),
        *u32("size", "rank"),
        ("tags", ctypes.c_uint32 * MAX_RANKS),
    ]


class LLInboxes(ctypes.Structure):
    """The host's copy of ``LLInboxes`` in ll_protocol.cuh; a test compares them."""

    _fields_ = [*u64("sets", "nbytes")]


ABSENT = 0xFFF5A3C6
"""It is ``kAbsent`` of sentinels.cuh; a test compares them."""
