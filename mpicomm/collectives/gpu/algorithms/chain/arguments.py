"""The kernel of chain.cu: its arguments, and a variant for each reduction."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import HOST_SLOTS, options_for
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant, u32, u64

_SOURCE = Path(__file__).with_name("chain.cu")

# Constants and structures of chain.cu; a test compares them.
CHAIN_THREADS = 256
CHAIN_SLOTS = 2
BATCH_NBYTES = 2 * 1024


class HopArguments(ctypes.Structure):
    """The host's copy of ``Hop`` in chain.cu: a hop of this rank in the chain."""

    _fields_ = [*u64("own", "output"), *u32("receives", "sends")]


class ChainArguments(ctypes.Structure):
    """The host's copy of ``Chain`` in chain.cu."""

    _fields_ = [
        ("team", Team),
        ("places", HopArguments * 2),
        *u64("nbytes", "batch_nbytes"),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        *u64("credits", "flags", "slots", "slot_nbytes"),
        *u32("batches", "channels", "blocks", "previous", "next", "tag"),
    ]


def chain_kernel(reduction: tuple[str, str] | None, *, host_slots: bool = False) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`.

    ``host_slots`` is whether slots lie in host memory.
    """
    return Variant(_SOURCE, "mpicomm_chain", options_for(reduction) + (HOST_SLOTS if host_slots else ()))
