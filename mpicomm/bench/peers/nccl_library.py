"""NCCL's C functions that the bench calls, from the library of PyTorch, of a CUDA package, or of the system."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpicomm.bench.peers.base import cuda_major

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
UNIQUE_ID_NBYTES = 128
COLLECTIVE_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC

_TYPES = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2"),
)
COLLECTIVES = {
    "allreduce": "ncclAllReduce",
    "reduce_scatter": "ncclReduceScatter",
    "allgather": "ncclAllGather",
    "bcast": "ncclBroadcast",
    "reduce": "ncclReduce",
    "gather": "ncclGather",
    "scatter": "ncclScatter",
    "alltoall": "ncclAlltoAll",
}
"""The functions by the bench's names of the operations. An older library lacks the last three functions."""
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_NBYTES)]


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_pointer],
    "ncclGetUniqueId": [_pointer],
    "ncclCommInitRank": [_pointer, _int, UniqueId, _int],
    "ncclCommDestroy": [_pointer],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclAllReduce": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclReduceScatter": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclAllGather": [_pointer, _pointer, _size, _int, _pointer, _pointer],
    "ncclBroadcast": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclReduce": [_pointer, _pointer, _size, _int, _int, _int, _pointer, _pointer],
    "ncclSend": [_pointer, _size, _int, _int, _pointer, _pointer],
    "ncclRecv": [_pointer, _size, _int, _int, _pointer, _pointer],
}
_NEWER: dict[str, list[Any]] = {  # since NCCL 2.27 and 2.28
    "ncclMemAlloc": [_pointer, _size],
    "ncclMemFree": [_pointer],
    "ncclCommWindowRegister": [_pointer, _pointer, _size, _pointer, _int],
    "ncclCommWindowDeregister": [_pointer, _pointer],
    "ncclAlltoAll": [_pointer, _pointer, _size, _int, _pointer, _pointer],
    "ncclGather": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclScatter": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
}


@cache
def load() -> Any:
    """Return the library. Raises OSError if there is none."""
    library = ctypes.CDLL(_path())
    library.ncclGetErrorString.argtypes = [_int]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    for name, arguments in {**_SIGNATURES, **_NEWER}.items():
        if name in _SIGNATURES or hasattr(library, name):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
    return library


def _path() -> str:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")  # PyTorch's wheels depend on it
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.exists():
            return str(path)
    return "libnccl.so.2"


def call(name: str, *arguments: Any) -> None:
    """Call a function. Raises the error of `check`."""
    check(name, getattr(load(), name)(*arguments))


def check(name: str, status: int) -> None:
    """Raise RuntimeError with NCCL's text if ``status`` is a failure."""
    if status != 0:
        raise RuntimeError(f"{name}: {load().ncclGetErrorString(status).decode()}")


def has(name: str) -> bool:
    """Return whether the library has a function."""
    return hasattr(load(), name)


def version() -> str:
    """Return the version as NCCL writes it."""
    number = ctypes.c_int()
    call("ncclGetVersion", ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def missing() -> str | None:
    """Return the package to install if there is no NCCL, else None. Local."""
    try:
        load()
    except OSError as error:
        return f"not installed ({error}): pip install nvidia-nccl-cu{cuda_major()}"
    return None


def unique_id() -> bytes:
    """Return a new id for a communicator."""
    value = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(value))
    return bytes(value)


def type_of(dtype: np.dtype[Any]) -> int | None:
    """Return NCCL's number of an element type, or None if it has none."""
    return _TYPES.index(dtype.name) if dtype.name in _TYPES else None
