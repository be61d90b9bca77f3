"""The kernel of combine.cu: its arguments, and a variant for each reduction and type of the result."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.reductions import Reduction, cpp_name, options_for
from mpicomm.kernels.variant import SHARED, Variant, u32, u64

_SOURCE = SHARED / "combine.cu"
COMBINE_THREADS = 512  # kCombineThreads in combine.cu; a test compares them
_BLOCKS_OF_A_MULTIPROCESSOR = 4
_NBYTES_OF_A_THREAD = 16


class CombineArguments(ctypes.Structure):
    """The host's copy of ``Combination`` in combine.cu."""

    _fields_ = [*u64("source", "stride", "output", "count"), *u32("sources", "divisor")]


def combine_kernel(reduction: Reduction, result: str) -> Variant:
    """Return the kernel that reduces by ``(dtype, op)`` to elements of the dtype ``result``; raises as `options_for`.

    The two types differ only in width, and the kernel reduces in the wider type.
    """
    options = (*options_for(reduction), f"-DMPICOMM_RESULT={cpp_name(result)}")
    return Variant(_SOURCE, "mpicomm_combine", options)


def blocks_for(nbytes: int, multiprocessors: int) -> int:
    """Return the number of blocks of a launch that makes a result of ``nbytes`` bytes."""
    most = _BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors
    return max(1, min(most, -(-nbytes // (COMBINE_THREADS * _NBYTES_OF_A_THREAD))))
