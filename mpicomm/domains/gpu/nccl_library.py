"""NCCL's point-to-point calls through nccl4py, or through CuPy if nccl4py is not installed."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError

T = TypeVar("T")

_BYTES = 1  # ncclUint8
_NO_ERRORS = (0, 7)  # ncclSuccess and ncclInProgress


class NcclCommunicator:
    """A communicator of NCCL, ``comm`` of one of the bindings. Its calls may block until a peer comes: see `bounded`.

    ``send`` and ``receive`` enqueue bytes. They take pointer, nbytes, peer and stream. ``problem`` returns the error of
    work that was enqueued, or "", and does not block.
    """

    def __init__(
        self,
        comm: Any,
        start_group: Callable[[], object],
        end_group: Callable[[], object],
        send: Callable[[int, int, int, int], object],
        receive: Callable[[int, int, int, int], object],
        problem: Callable[[], str],
    ) -> None:
        self._comm = comm
        self._start_group, self._end_group = start_group, end_group
        self._send, self._receive = send, receive
        self.problem = problem

    def exchange(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]], stream: int
    ) -> None:
        """Enqueue sends and receives, each (peer, pointer, nbytes), as one group."""
        self._start_group()
        try:
            for peer, pointer, nbytes in sends:
                self._send(pointer, nbytes, peer, stream)
            for peer, pointer, nbytes in receives:
                self._receive(pointer, nbytes, peer, stream)
        finally:  # in an open group NCCL only collects the calls of this thread
            self._end_group()

    def abort(self) -> None:
        """End all work that is enqueued, even if a peer does not come, and destroy the communicator."""
        self._comm.abort()

    def destroy(self) -> None:
        """Destroy the communicator; its work must be over."""
        self._comm.destroy()


class _Nccl4py:
    def __init__(self) -> None:
        self._core: Any = importlib.import_module("nccl.core")
        self._bindings: Any = importlib.import_module("nccl.bindings.nccl")
        self.name = f"nccl4py {self._core.__version__}"

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def create(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        comm = self._core.Communicator.init(size, rank, self._core.UniqueId.from_bytes(unique_id))
        bindings = self._bindings
        # `send` of nccl.core takes arrays, and takes ten times as long.
        handle = bindings.Comm(comm.ptr)
        return NcclCommunicator(
            comm,
            bindings.group_start,
            bindings.group_end,
            lambda pointer, nbytes, peer, stream: bindings.send(pointer, nbytes, _BYTES, peer, handle, stream),
            lambda pointer, nbytes, peer, stream: bindings.recv(pointer, nbytes, _BYTES, peer, handle, stream),
            lambda: "" if int(comm.get_async_error()) in _NO_ERRORS else str(comm.get_last_error()),
        )


class _Cupy:
    def __init__(self) -> None:
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self.name = f"cupy.cuda.nccl {self._nccl.get_version()}"

    def unique_id(self) -> bytes:
        return bytes(byte % 256 for byte in self._nccl.get_unique_id())

    def create(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        nccl = self._nccl
        signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)  # C's char
        comm = nccl.NcclCommunicator(size, signed, rank)

        def problem() -> str:
            try:
                comm.check_async_error()
            except nccl.NcclError as error:
                return str(error)
            return ""

        return NcclCommunicator(
            comm,
            nccl.groupStart,
            nccl.groupEnd,
            lambda pointer, nbytes, peer, stream: comm.send(pointer, nbytes, _BYTES, peer, stream),
            lambda pointer, nbytes, peer, stream: comm.recv(pointer, nbytes, _BYTES, peer, stream),
            problem,
        )


def load() -> _Nccl4py | _Cupy:
    """Return the installed binding, whose ``create`` blocks until all ranks have come and needs a current device.

    Raises ImportError, which says why each binding fails.
    """
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
