"""The kernel of exchange.cu: its arguments, and a variant for each reduction."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant, u32, u64

_SOURCE = Path(__file__).with_name("exchange.cu")

# Constants and structures of exchange.cu; a test compares them.
THREADS = 512
SLOTS = 2
PACKET_NBYTES = 16  # kPacketNbytes in bytes.cuh


class ChunkLink(ctypes.Structure):
    """The host's copy of ``Link`` in exchange.cu: the message to, or from, one rank."""

    _fields_ = [*u64("pointer", "nbytes", "stride"), *u32("tag", "unused")]


class ExchangeArguments(ctypes.Structure):
    """The host's copy of ``Exchange`` in exchange.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ChunkLink * MAX_RANKS),
        ("receives", ChunkLink * MAX_RANKS),
        *u64("own", "output", "counts", "credits", "flags"),
        ("slots", ctypes.c_uint64 * MAX_RANKS),
        *u64("slot_nbytes"),
        *u32("channels", "num_sources"),
        ("sources", ctypes.c_uint32 * MAX_RANKS),
    ]


def exchange_kernel(reduction: tuple[str, str] | None) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`."""
    return Variant(_SOURCE, "mpicomm_exchange", options_for(reduction))
