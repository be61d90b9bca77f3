"""Epilogues of reductions: in kernels that reduce, and in epilogue.cu and norm.cu after other kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from mpicomm.kernels.reductions import OPTIONS, cpp_name
from mpicomm.kernels.variant import KERNEL_DIR, Variant, u64

# Constants of epilogue.cuh, epilogue.cu and norm.cuh; a test compares them.
MOST_OPERANDS = 8
EPILOGUE_THREADS = 512
NORM_THREADS = 256


class EpilogueOperands(ctypes.Structure):
    """The host's copy of ``Operands`` in epilogue.cuh."""

    _fields_ = [("words", ctypes.c_uint64 * MOST_OPERANDS), *u64("count")]


class PacketEpilogue(ctypes.Structure):
    """The host's copy of ``Finish`` in finish.cuh of packets."""

    _fields_ = [("operands", EpilogueOperands), *u64("reduced", "finished")]


class EpilogueArguments(ctypes.Structure):
    """The host's copy of ``Epilogue`` in epilogue.cu."""

    _fields_ = [*u64("source", "output", "failed"), ("operands", EpilogueOperands)]


class NormArguments(ctypes.Structure):
    """The host's copy of ``Norm`` in norm.cuh."""

    _fields_ = [
        *u64("output", "residual", "weight", "bias", "linear_bias", "scales"),
        *u64("scale_at", "rows", "rows_of_shard", "hidden", "tiles"),
        ("eps", ctypes.c_double),
        ("scale", ctypes.c_double),
    ]


class NormKernelArguments(ctypes.Structure):
    """The host's copy of ``NormKernel`` in norm.cu."""

    _fields_ = [*u64("source", "failed"), ("norm", NormArguments)]


def epilogue_options(expression: str, result: str | None = None) -> tuple[str, ...]:
    """Return the options for a kernel that applies an expression in C++ to the elements that it has reduced.

    ``result`` is the type of the results, or None if it is the type of the reduced elements.
    """
    converts = () if result is None else (f"-DMPICOMM_RESULT={cpp_name(result)}",)
    return f"-DMPICOMM_EPILOGUE={expression}", *converts


def norm_options(
    result: str,
    weight: str,
    flags: Iterable[str] = (),
    quantized: str | None = None,
    scales: tuple[str, int] | None = None,
) -> tuple[str, ...]:
    """Return the options for a kernel that normalises rows of reduced elements: see norm.cuh.

    ``flags`` are some of CENTRED, BIAS, LINEAR_BIAS and ALIGNED, which says that all arrays lie at multiples of 16
    bytes, and that rows are whole packets. ``quantized`` is the quantized type of the results, and ``scales`` the type
    of their scales and the elements of a group, 0 for a row.
    """
    scaled: tuple[str, ...] = () if quantized is None else (f"-DMPICOMM_QUANTIZED={quantized}",)
    if scales is not None:
        scaled += (f"-DMPICOMM_SCALES={scales[0]}", f"-DMPICOMM_GROUP={scales[1]}")
    types = f"-DMPICOMM_RESULT={cpp_name(result)}", f"-DMPICOMM_WEIGHT={cpp_name(weight)}"
    return (*types, *(f"-DMPICOMM_{flag}" for flag in flags), *scaled)


def epilogue_kernel(dtype: str, result: str, expression: str) -> Variant:
    """Return the kernel that turns elements of ``dtype`` into elements of ``result`` by an expression in C++."""
    options = (*_reduced(dtype), *epilogue_options(expression, result))
    return Variant(KERNEL_DIR / "epilogue.cu", "mpicomm_epilogue", options)


def norm_kernel(dtype: str, options: tuple[str, ...]) -> Variant:
    """Return the kernel that normalises rows of ``dtype``. ``options`` are of `norm_options`."""
    return Variant(KERNEL_DIR / "norm.cu", "mpicomm_norm", (*_reduced(dtype), *options))


def _reduced(dtype: str) -> tuple[str, ...]:
    # Only the headers need the operation.
    return *OPTIONS, f"-DMPICOMM_DTYPE={cpp_name(dtype)}", "-DMPICOMM_OP=sum"
