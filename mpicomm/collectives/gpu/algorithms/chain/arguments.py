"""The kernel of chain.cu: its arguments, and a variant for each reduction."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import HOST_SLOTS, options_for
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant

_SOURCE = Path(__file__).with_name("chain.cu")

# Constants and structures of chain.cu; a test compares them.
CHAIN_THREADS = 256
CHAIN_SLOTS = 2
BATCH_NBYTES = 2 * 1024


class HopArguments(ctypes.Structure):
    """The host's copy of ``Hop`` in chain.cu: a hop of this rank in the chain."""

    _fields_ = [
        ("own", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("receives", ctypes.c_uint32),
        ("sends", ctypes.c_uint32),
    ]


class ChainArguments(ctypes.Structure):
    """The host's copy of ``Chain`` in chain.cu."""

    _fields_ = [
        ("team", Team),
        ("places", HopArguments * 2),
        ("nbytes", ctypes.c_uint64),
        ("batch_nbytes", ctypes.c_uint64),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        ("credits", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("slot_nbytes", ctypes.c_uint64),
        ("batches", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("previous", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("tag", ctypes.c_uint32),
    ]


def chain_kernel(reduction: tuple[str, str] | None, *, host_slots: bool = False) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`.

    ``host_slots`` is whether slots lie in host memory.
    """
    return Variant(
        _SOURCE,
        "mpicomm_chain",
        options_for(reduction) + (HOST_SLOTS if host_slots else ()),
    )
