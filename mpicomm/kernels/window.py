"""The kernels of window.cu and accumulate.cu: their arguments, and the board of a window. Imports no CUDA package."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.packing import PackArguments
from mpicomm.kernels.reductions import OPTIONS, Reduction, options_for
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u32, u64

# Constants and a structure of window.cu, window_lock.cuh and faults.cuh; a test compares them.
WINDOW_RANKS = 56
WINDOW_THREADS = 64
ROW_WORDS = 64
ROWS_OF_COUNTS = 3
LOCK_ROW = 9
EXCLUSIVE_SHIFT = 56
COMES_FIRST = 1
"""The sequence number of a fault of `LOCK` whose peer does not hold the lock, but has its turn before this rank."""
FENCE, START, WAIT, LOCK = 5, 6, 7, 8  # of ``enum Operation``

WORD_NBYTES = 8
BOARD_NBYTES = (LOCK_ROW + 1) * ROW_WORDS * WORD_NBYTES


class SynchronisationArguments(ctypes.Structure):
    """The host's copy of ``Synchronisation`` in window.cu."""

    _fields_ = [
        *u64("boards", "signals", "waits", "timeout_ns", "record", "failed"),
        *u32("rank", "kind", "operation", "exclusive", "yields"),
    ]


class LockWords(ctypes.Structure):
    """The host's copy of ``Lock`` in window_lock.cuh, at the beginning of `LOCK_ROW`."""

    _fields_ = [*u64("holders", "waiting", "turns", "last")]


def lock_of(board: int) -> LockWords:
    """Return the lock on the board at an address of this process."""
    return LockWords.from_address(board + LOCK_ROW * ROW_WORDS * WORD_NBYTES)


SYNCHRONISE_KERNEL = Variant(KERNEL_DIR / "window.cu", "mpicomm_window_synchronise", options_for(None))
"""Signals ranks, then waits for ranks."""
LOCK_KERNEL = Variant(KERNEL_DIR / "window.cu", "mpicomm_window_lock", options_for(None))
"""Releases locks, then acquires locks."""


ACCUMULATE_THREADS = 256  # kAccumulateThreads in accumulate.cu; a test compares them

MOVING = ("replace", "no_op")
"""The operations that move the bits of any type."""
LOCATING = ("minloc", "maxloc")
"""The operations on pairs of a value and an index."""
_TYPE_OF_SIZE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
"""For each size of an element a type that `MOVING` operations take."""
UPDATED_SIZES = tuple(_TYPE_OF_SIZE)
SWAPPED_SIZES = (1, 2, 4, 8)
WIDE_NBYTES = 16
"""The size of elements that only GPUs of compute capability 9.0 or newer update atomically."""


class AccumulateArguments(ctypes.Structure):
    """The host's copy of ``Accumulation`` in accumulate.cu."""

    _fields_ = [("walk", PackArguments), *u64("result")]


class SwapArguments(ctypes.Structure):
    """The host's copy of ``Swap`` in accumulate.cu."""

    _fields_ = [*u64("target", "value", "compare", "result", "failed")]


def accumulate_kernel(reduction: Reduction, itemsize: int) -> Variant:
    """Return the kernel that updates elements of ``itemsize`` bytes by ``(dtype, op)``; raises as `options_for`.

    ``op`` may be one of `MOVING`, for any dtype, or one of `LOCATING`, for a type of pairs in accumulate.cu.
    """
    dtype, op = reduction
    if op in MOVING:
        dtype = _TYPE_OF_SIZE[itemsize]
    options = _options(dtype, op) if op in (*MOVING, *LOCATING) else options_for(reduction)
    return Variant(KERNEL_DIR / "accumulate.cu", "mpicomm_accumulate", options)


def swap_kernel(itemsize: int) -> Variant:
    """Return the kernel that compares and swaps an element of ``itemsize`` bytes, one of `SWAPPED_SIZES`."""
    options = _options(_TYPE_OF_SIZE[itemsize], "replace")
    return Variant(KERNEL_DIR / "accumulate.cu", "mpicomm_compare_and_swap", options)


def _options(dtype: str, op: str) -> tuple[str, ...]:
    return (*OPTIONS, f"-DMPICOMM_DTYPE={dtype}", f"-DMPICOMM_OP={op}")
