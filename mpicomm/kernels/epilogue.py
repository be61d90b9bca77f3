"""Epilogues of reductions in kernels: their operands, and the kernels of epilogue.cu and rms_norm.cu."""

from __future__ import annotations

import ctypes

from mpicomm.kernels.headers import SHARED
from mpicomm.kernels.reductions import OPTIONS, cpp_name
from mpicomm.kernels.variant import Variant

# Constants of epilogue.cuh, epilogue.cu and rms_norm.cu; a test compares them.
MOST_OPERANDS = 8
EPILOGUE_THREADS = 512
NORM_THREADS = 256
_BLOCKS_OF_A_MULTIPROCESSOR = 4
_NBYTES_OF_A_THREAD = 16


class EpilogueOperands(ctypes.Structure):
    """The host's copy of ``Operands`` in epilogue.cuh."""

    _fields_ = [
        ("words", ctypes.c_uint64 * MOST_OPERANDS),
        ("first", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    ]


class EpilogueArguments(ctypes.Structure):
    """The host's copy of ``Epilogue`` in epilogue.cu."""

    _fields_ = [
        ("source", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("operands", EpilogueOperands),
    ]


class NormArguments(ctypes.Structure):
    """The host's copy of ``RmsNorm`` in rms_norm.cu."""

    _fields_ = [
        ("source", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("weight", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("eps", ctypes.c_double),
    ]


def epilogue_options(expression: str) -> tuple[str, ...]:
    """Return the options for a kernel that applies an expression in C++ to what it has reduced."""
    return (f"-DMPICOMM_EPILOGUE={expression}",)


def epilogue_kernel(dtype: str, result: str, expression: str) -> Variant:
    """Return the kernel that makes elements of ``result`` of elements of ``dtype`` by an expression in C++."""
    return Variant(SHARED / "epilogue.cu", "mpicomm_epilogue", (*_types(dtype, result), *epilogue_options(expression)))


def norm_kernel(dtype: str, result: str, weight: str) -> Variant:
    """Return the kernel that adds a residual to rows of ``dtype`` and normalises them to ``result``."""
    options = (*_types(dtype, result), f"-DMPICOMM_WEIGHT={cpp_name(weight)}")
    return Variant(SHARED / "rms_norm.cu", "mpicomm_rms_norm", options)


def _types(dtype: str, result: str) -> tuple[str, ...]:
    # The operation is for the headers alone.
    return *OPTIONS, f"-DMPICOMM_DTYPE={cpp_name(dtype)}", f"-DMPICOMM_RESULT={cpp_name(result)}", "-DMPICOMM_OP=sum"


def blocks_for(nbytes: int, multiprocessors: int) -> int:
    """Return the blocks of a launch that reads or writes ``nbytes``."""
    most = _BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors
    return max(1, min(most, -(-nbytes // (EPILOGUE_THREADS * _NBYTES_OF_A_THREAD))))
