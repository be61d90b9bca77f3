"""Partitioned messages of device arrays: MPI moves a pinned host copy, one partition after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.devices.cuda.types import Backend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import parse
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.host_calls import HostCopy, host_copy
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest

if TYPE_CHECKING:
    from typing_extensions import Self


# Open MPI 5 loses the completion of a partitioned message if two threads call MPI at once.
_COMPLETES_IN_THREADS = "Open MPI" not in MPI.Get_library_version()


class PartitionedRequest(PersistentRequest):
    """A partitioned send or receive of a device array.

    `Pready` returns when the partition is in host memory, and later work of the stream may overwrite it. When
    `Parrived` returns true, later work of the stream finds the partition in the array. With Open MPI only a thread that
    asks for the request completes it.
    """

    _request: MPI.Prequest
    _copies: _PartitionCopies
    _taken: set[int]
    """The partitions of a receive that are in the device array since the last start."""
    _lock: threading.RLock

    @classmethod
    def prepare(
        cls, operation: str, call: Any, arguments: dict[str, Any], backend: Backend, threads: Completer
    ) -> Self:
        """Return the request of ``Psend_init`` or ``Precv_init``. ``call`` is MPI's call with the same arguments."""
        receives = operation == "Precv_init"
        copy = host_copy(backend, arguments["buf"], writable=receives, name="buf")
        request: MPI.Prequest = call(**{**arguments, "buf": copy.spec})  # it raises for a bad number of partitions
        copies = _PartitionCopies(backend, copy, arguments["buf"], arguments["partitions"])

        def begin() -> DeferredRequest:
            stream = copies.stream()
            if receives:
                copies.move([0], stream, whole=True)  # MPI does not write the gaps of a datatype
            self._taken = set()
            request.Start()
            status = MPI.Status()

            def finish() -> None:
                if receives:
                    self._take(set(range(copies.partitions)) - self._taken, stream)

            work = DeferredRequest.of(lambda: request.Test(status), finish, status)
            return threads.add(work, backend.prepare_thread) if _COMPLETES_IN_THREADS else work

        self = cls.of(begin)
        self._request, self._copies, self._taken, self._lock = request, copies, set(), threading.RLock()
        return self

    def Pready(self, partition: int) -> None:
        """Send a partition, with the content that it has in the order of the stream. Local, blocking.

        Raises `InvalidUsageError` for a partition that does not exist.
        """
        self.Pready_list([partition])

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """As `Pready`, for the partitions from the first to the last."""
        self.Pready_list(range(partition_low, partition_high + 1))

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """As `Pready`, for several partitions."""
        self._require_known(partitions)
        self._copies.move(partitions, self._copies.stream())
        self._request.Pready_list(list(partitions))

    def Parrived(self, partition: int) -> bool:
        """Return whether a partition has arrived. Local."""
        self._require_known([partition])
        with self._lock:  # the completer's thread takes the other partitions when MPI's request is complete
            if self._started is not None and not self._started.over and partition not in self._taken:
                if not self._request.Parrived(partition):
                    return False
                self._take([partition], self._copies.stream())
            return True

    def Free(self) -> None:
        """Free the request, after a wait for the started call. A second call does nothing."""
        super().Free()
        if self._request:
            self._request.Free()

    def _require_known(self, partitions: Iterable[int]) -> None:
        for partition in partitions:  # Open MPI 5 ends the program at a partition that does not exist
            if not 0 <= partition < self._copies.partitions:
                raise InvalidUsageError(f"partition={partition} does not exist: use 0 to {self._copies.partitions - 1}")

    def _take(self, partitions: Iterable[int], stream: int) -> None:
        with self._lock:
            self._copies.move(partitions, stream, to_device=True)
            self._taken.update(partitions)


class _PartitionCopies:
    """The partitions of a device array, and of its copy in pinned host memory."""

    def __init__(self, backend: Backend, copy: HostCopy, spec: Any, partitions: int) -> None:
        self.partitions = partitions
        self._backend = backend
        self._array = array_of(spec)
        self._on_host, self._on_device, self._nbytes = copy.host, copy.memory.pointer, copy.memory.nbytes
        operand = parse(spec, blocks=partitions, writable=copy.written, name="buf")
        self._start, self._step = 0, 0
        if operand.dtype is not None:  # a datatype with gaps has no partitions here: `move` copies all of the array
            self._start, self._step = operand.pointer - self._on_device, operand.count * operand.dtype.itemsize

    def stream(self) -> int:
        """Return the current stream of the array's library."""
        return self._backend.stream(None, self._array)

    def move(self, partitions: Iterable[int], stream: int, *, to_device: bool = False, whole: bool = False) -> None:
        """Copy partitions, or with ``whole`` all of the array, to the other memory. Blocking."""
        for partition in partitions:
            start, nbytes = self._start + partition * self._step, self._step
            if whole or nbytes == 0:
                start, nbytes = 0, self._nbytes
            there, here = self._on_device + start, self._on_host.ctypes.data + start
            target, source = (there, here) if to_device else (here, there)
            self._backend.copy(target, source, nbytes, stream)
        self._backend.synchronize(stream)
