"""The kernel of sendrecv.cu and its arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant

_SOURCE = Path(__file__).with_name("sendrecv.cu")

# Constants and structures of sendrecv.cu; a test compares them.
SENDRECV_THREADS = 256
SENDRECV_BLOCKS = 2
"""The fewest blocks that a multiprocessor holds."""
SENDRECV_SLOTS = 2
SENDRECV_SLOT_NBYTES = 64 * 1024


class SendrecvSide(ctypes.Structure):
    """The host's copy of ``Side`` in sendrecv.cu: a message that this rank sends or receives."""

    _fields_ = [
        ("pointer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("peer", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("tag", ctypes.c_uint32),
        ("mask", ctypes.c_uint32),
    ]


class SendrecvArguments(ctypes.Structure):
    """The host's copy of ``Sendrecv`` in sendrecv.cu."""

    _fields_ = [
        ("team", Team),
        ("sent", SendrecvSide),
        ("received", SendrecvSide),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        ("credits", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("channels", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


def sendrecv_kernel() -> Variant:
    """Return the kernel."""
    return Variant(_SOURCE, "mpicomm_sendrecv", OPTIONS)
