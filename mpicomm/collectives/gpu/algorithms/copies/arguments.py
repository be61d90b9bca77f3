"""The kernel of local_reduction.cu: its arguments, and a variant for each reduction."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.team import MAX_RANKS
from mpicomm.kernels.variant import Variant, u32, u64

_SOURCE = Path(__file__).with_name("local_reduction.cu")

REDUCTION_THREADS = 512  # kReductionThreads in local_reduction.cu; a test compares them


class LocalReductionArguments(ctypes.Structure):
    """The host's copy of ``LocalReduction`` in local_reduction.cu."""

    _fields_ = [("sources", ctypes.c_uint64 * MAX_RANKS), *u64("output", "nbytes"), *u32("num_sources", "unused")]


def local_reduction_kernel(reduction: tuple[str, str]) -> Variant:
    """Return the kernel for ``(dtype, op)``; raises as `options_for`."""
    return Variant(_SOURCE, "mpicomm_local_reduction", options_for(reduction))
