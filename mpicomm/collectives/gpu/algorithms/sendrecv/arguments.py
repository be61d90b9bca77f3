"""The kernel of sendrecv.cu and its arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant, u32, u64

# Constants and structures of sendrecv.cu; a test compares them.
SENDRECV_THREADS = 256
SENDRECV_BLOCKS = 2
"""The fewest blocks that a multiprocessor holds."""
SENDRECV_SLOTS = 2
SENDRECV_SLOT_NBYTES = 64 * 1024


class SendrecvSide(ctypes.Structure):
    """The host's copy of ``Side`` in sendrecv.cu: a message that this rank sends or receives."""

    _fields_ = [*u64("pointer", "nbytes", "stride"), *u32("peer", "blocks", "tag", "mask")]


class SendrecvArguments(ctypes.Structure):
    """The host's copy of ``Sendrecv`` in sendrecv.cu."""

    _fields_ = [
        ("team", Team),
        ("sent", SendrecvSide),
        ("received", SendrecvSide),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        *u64("credits", "flags", "slots"),
        *u32("channels", "unused"),
    ]


SENDRECV_KERNEL = Variant(Path(__file__).with_name("sendrecv.cu"), "mpicomm_sendrecv", OPTIONS)
