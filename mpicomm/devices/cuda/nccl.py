"""NCCL's C functions, from the library of PyTorch, of a CUDA package, of CuPy, or of the system."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mpicomm.devices.cuda.driver import cuda_major

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_BYTES = 1  # ncclUint8
_NO_ERRORS = (0, 7)  # ncclSuccess and ncclInProgress


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


_TEXTS: dict[str, list[Any]] = {"ncclGetErrorString": [_int], "ncclGetLastError": [_pointer]}
_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [_pointer],
    "ncclGetUniqueId": [_pointer],
    "ncclCommInitRank": [_pointer, _int, UniqueId, _int],
    "ncclCommDestroy": [_pointer],
    "ncclCommAbort": [_pointer],
    "ncclCommGetAsyncError": [_pointer, _pointer],
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
    for name, arguments in {**_SIGNATURES, **_NEWER, **_TEXTS}.items():
        if name not in _NEWER or hasattr(library, name):
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_char_p if name in _TEXTS else _int
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
    with suppress(ImportError):
        importlib.import_module("cupy.cuda.nccl")  # loads a library that only CuPy knows
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


class NcclCommunicator:
    """A communicator of NCCL. Construction blocks until all ranks have come. The device must be current.

    Other calls may block until a peer comes, too.
    """

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self.handle = ctypes.c_void_p()
        call("ncclCommInitRank", ctypes.byref(self.handle), size, UniqueId.from_buffer_copy(unique_id), rank)

    def exchange(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        """Enqueue sends and receives of bytes, each (peer, pointer, nbytes), as one group."""
        call("ncclGroupStart")
        try:
            for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
                for peer, pointer, nbytes in messages:
                    call(name, pointer, nbytes, _BYTES, peer, self.handle, stream)
        finally:  # in an open group NCCL only collects the calls of this thread
            call("ncclGroupEnd")

    def problem(self) -> str:
        """Return the error of work that was enqueued, or "". It does not block."""
        status = ctypes.c_int()
        call("ncclCommGetAsyncError", self.handle, ctypes.byref(status))
        return "" if status.value in _NO_ERRORS else str(load().ncclGetLastError(self.handle).decode())

    def abort(self) -> None:
        """End all work that is enqueued, even if a peer does not come, and destroy the communicator."""
        call("ncclCommAbort", self.handle)

    def destroy(self) -> None:
        """Destroy the communicator; its work must be over."""
        call("ncclCommDestroy", self.handle)
