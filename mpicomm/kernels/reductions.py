"""The reductions that kernels can do, and the compiler options that choose one. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u32, u64

if TYPE_CHECKING:
    from mpicomm.expressions.expression import Expression

Reduction = tuple[str, str]
"""A reduction by the names of its element type and its operation."""

# The compiler must not fuse a product and a sum into one rounding, because results have the bits of NumPy's results.
OPTIONS = ("-fmad=false",)
HOST_SLOTS = ("-DMPICOMM_HOST_SLOTS",)
"""An additional option for slots in host memory: see ``fence_slots`` in memory_order.cuh."""

_LOGICAL = ("land", "lor", "lxor")
_BITWISE = ("band", "bor", "bxor")
_INTEGER = ("sum", "prod", "max", "min", *_LOGICAL, *_BITWISE, "tree")
_FLOAT = ("sum", "prod", "max", "min", "avg", *_LOGICAL, "tree")
_COMPLEX = ("sum", "prod", "avg", *_LOGICAL, "tree")

REDUCTIONS: dict[str, tuple[str, ...]] = {
    "bool": (*_LOGICAL, *_BITWISE),
    **{f"{sign}int{bits}": _INTEGER for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"), _FLOAT),
    **dict.fromkeys(("complex64", "complex128"), _COMPLEX),
}
"""The operations for each dtype, by the names of NumPy and ml_dtypes."""


def is_custom(op: str) -> bool:
    """Return whether an operation is an expression of the user, not a word."""
    return op in ("a", "b") or not op.isidentifier()


def custom_op(text: str) -> Expression:
    """Return an operation of the user: ``a`` is the reduction of the previous ranks, ``b`` the next contribution.

    Raises `InvalidUsageError` if the text is not an operation.
    """
    from mpicomm.expressions.expression import Variable, parse  # few programs have operations of their own

    return parse(text, (Variable("a", "a"), Variable("b", "b")), "op")


def cpp_name(dtype: str) -> str:
    """Return the name of the dtype in numbers.cuh."""
    return "boolean" if dtype == "bool" else dtype  # bool is a keyword of C++


def options_for(reduction: Reduction | None) -> tuple[str, ...]:
    """Return NVRTC's options for a kernel with the reduction ``(dtype, op)``, or without a reduction.

    Raises `InvalidUsageError` if kernels cannot do this reduction.
    """
    if reduction is None:
        return OPTIONS
    dtype, op = reduction
    if dtype in REDUCTIONS and is_custom(op):
        own = custom_op(op)
        own.require_defined(dtype)
        expression = f"-DMPICOMM_EXPRESSION={own.tree.cpp('State')}"
        return (*OPTIONS, f"-DMPICOMM_DTYPE={cpp_name(dtype)}", "-DMPICOMM_OP=custom", expression)
    if op not in REDUCTIONS.get(dtype, ()):
        raise InvalidUsageError(
            f"op={op!r} is not defined for {dtype} on a GPU"
            + (f": pass one of {', '.join(REDUCTIONS[dtype])}" if dtype in REDUCTIONS else "; no operation is")
        )
    return (*OPTIONS, f"-DMPICOMM_DTYPE={cpp_name(dtype)}", f"-DMPICOMM_OP={op}")


@lru_cache(256)  # a NumPy type takes some microseconds to name
def reduction_of(dtype: np.dtype[Any], op: str) -> Reduction:
    """Return the reduction of an element type by an operation; raises `InvalidUsageError` if there is none."""
    reduction = ("uint8" if dtype == np.dtype("V1") else dtype.name, op)  # V1 is MPI.BYTE
    options_for(reduction)
    return reduction


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
    return Variant(KERNEL_DIR / "combine.cu", "mpicomm_combine", options)


def blocks_for(nbytes: int, multiprocessors: int) -> int:
    """Return the blocks of a launch of combine.cu or epilogue.cu that makes a result of ``nbytes``."""
    most = _BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors
    return max(1, min(most, -(-nbytes // (COMBINE_THREADS * _NBYTES_OF_A_THREAD))))
