"""The kernel of exchange.cu: its arguments, and a variant for each reduction."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant

_SOURCE = Path(__file__).with_name("exchange.cu")

# Constants and structures of exchange.cu; a test compares them.
THREADS = 512
SLOTS = 2
PACKET_NBYTES = 16  # kPacketNbytes in bytes.cuh


class ChunkLink(ctypes.Structure):
    """The host's copy of ``Link`` in exchange.cu: the message to, or from, one rank."""

    _fields_ = [
        ("pointer", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("tag", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class ExchangeArguments(ctypes.Structure):
    """The host's copy of ``Exchange`` in exchange.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ChunkLink * MAX_RANKS),
        ("receives", ChunkLink * MAX_RANKS),
        ("own", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("credits", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("slots", ctypes.c_uint64 * MAX_RANKS),
        ("slot_nbytes", ctypes.c_uint64),
        ("channels", ctypes.c_uint32),
        ("num_sources", ctypes.c_uint32),
        ("sources", ctypes.c_uint32 * MAX_RANKS),
    ]


def exchange_kernel(reduction: tuple[str, str] | None) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`."""
    return Variant(_SOURCE, "mpicomm_exchange", options_for(reduction))
