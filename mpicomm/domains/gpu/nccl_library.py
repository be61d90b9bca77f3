"""NCCL's point-to-point calls through nccl4py, or through CuPy if nccl4py is not installed."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError

T = TypeVar("T")

_BYTES = 1  # ncclUint8
_NO_ERRORS = (0, 7)  # ncclSuccess and ncclInProgress


class NcclCommunicator(Protocol):
    """A communicator of NCCL. Its calls may block until a peer comes: see `bounded`."""

    def exchange(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        """Enqueue sends and receives, each (peer, pointer, nbytes), as one group."""

    def problem(self) -> str:
        """Return the error of work that was enqueued, "" if there is none; does not block."""

    def abort(self) -> None:
        """End all work that is enqueued, even if a peer does not come, and destroy the communicator."""

    def destroy(self) -> None:
        """Destroy the communicator; its work must be over."""


class Library(Protocol):
    """A binding of NCCL."""

    name: str

    def unique_id(self) -> bytes:
        """Return the id of a new communicator."""

    def create(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Join a communicator; blocks until all ranks have come. The device must be current."""


class _Nccl4py:
    def __init__(self) -> None:
        self._core: Any = importlib.import_module("nccl.core")
        self._bindings: Any = importlib.import_module("nccl.bindings.nccl")
        self.name = f"nccl4py {importlib.import_module('nccl.core').__version__}"

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def create(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        joined = self._core.Communicator.init(size, rank, self._core.UniqueId.from_bytes(unique_id))
        return _Nccl4pyCommunicator(joined, self._bindings)


class _Nccl4pyCommunicator:
    def __init__(self, comm: Any, bindings: Any) -> None:
        self._comm = comm
        # `send` of nccl.core takes arrays, and takes ten times as long.
        self._handle: Any = bindings.Comm(comm.ptr)
        self._bindings = bindings

    def exchange(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        bindings = self._bindings
        bindings.group_start()
        try:
            for peer, pointer, nbytes in sends:
                bindings.send(pointer, nbytes, _BYTES, peer, self._handle, stream)
            for peer, pointer, nbytes in receives:
                bindings.recv(pointer, nbytes, _BYTES, peer, self._handle, stream)
        finally:  # in an open group NCCL only collects the calls of this thread
            bindings.group_end()

    def problem(self) -> str:
        return "" if int(self._comm.get_async_error()) in _NO_ERRORS else str(self._comm.get_last_error())

    def abort(self) -> None:
        self._comm.abort()

    def destroy(self) -> None:
        self._comm.destroy()


class _Cupy:
    def __init__(self) -> None:
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.name = f"cupy.cuda.nccl {self._nccl.get_version()}"

    def unique_id(self) -> bytes:
        return bytes(byte % 256 for byte in self._nccl.get_unique_id())

    def create(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)  # C's char
        return _CupyCommunicator(self._nccl.NcclCommunicator(size, signed, rank), self._nccl)


class _CupyCommunicator:
    def __init__(self, comm: Any, nccl: Any) -> None:
        self._comm = comm
        self._nccl = nccl

    def exchange(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        self._nccl.groupStart()
        try:
            for peer, pointer, nbytes in sends:
                self._comm.send(pointer, nbytes, _BYTES, peer, stream)
            for peer, pointer, nbytes in receives:
                self._comm.recv(pointer, nbytes, _BYTES, peer, stream)
        finally:  # in an open group NCCL only collects the calls of this thread
            self._nccl.groupEnd()

    def problem(self) -> str:
        try:
            self._comm.check_async_error()
        except self._nccl.NcclError as error:
            return str(error)
        return ""

    def abort(self) -> None:
        self._comm.abort()

    def destroy(self) -> None:
        self._comm.destroy()


def load() -> Library:
    """Return the installed binding. Raises ImportError, which says why each binding fails."""
    reasons = []
    for binding in (_Nccl4py, _Cupy):
        try:
            return binding()
        except Exception as error:  # nccl4py has other errors for a missing library
            reasons.append(f"{binding.__name__.strip('_').lower()}: {error}")
    raise ImportError("; ".join(reasons))


def require_possible(uuids: Sequence[bytes]) -> None:
    """Raise `BackendUnavailableError` if NCCL refuses the ranks because two of them have the same GPU."""
    if len(set(uuids)) < len(uuids) and "NCCL_HOSTID" not in os.environ:
        raise BackendUnavailableError(
            "ranks share a GPU, which NCCL refuses: start one rank for each GPU, or give each rank another NCCL_HOSTID"
        )


def bounded(act: Callable[[], T], timeout_s: float, what: str) -> T:
    """Return the result of ``act``, which another thread calls. Raises `CollectiveTimeoutError` when time is up.

    NCCL offers no other way out of a call that waits for a peer. The thread stays in the call, and ends with the
    process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mpicomm-nccl-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise CollectiveTimeoutError(f"{what} within {timeout_s:g} s")
    if errors:
        raise HandleError(f"NCCL: {errors[0]}") from errors[0]
    return results[0]
