"""Partitioned messages of device arrays: MPI moves a pinned host copy, one partition after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.devices.cuda.types import Backend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import parse
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.host_calls import HostCopies
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest

if TYPE_CHECKING:
    from typing_extensions import Self


class PartitionedRequest(PersistentRequest):
    """A partitioned send or receive of a device array.

    After `Pready` the partition is in host memory, and later work of the stream may overwrite it, unless the datatype
    has gaps. After a true `Parrived` later work of the stream finds the partition in the array. No progress thread
    completes the request, because Open MPI 5 loses the completion if two threads call MPI at once.
    """

    _request: MPI.Prequest
    _backend: Backend
    _copies: HostCopies
    _array: Any
    _parts: list[tuple[int, int, int]]
    """The address of each partition on the device and in the copy, and its bytes; the whole array if it has gaps."""
    _arrived: set[int]
    """The partitions of a receive that are in the device array since the last start."""

    @classmethod
    def prepare(cls, operation: str, call: Any, arguments: dict[str, Any], backend: Backend) -> Self:
        """Return the request of ``Psend_init`` or ``Precv_init``. ``call`` is MPI's call with the same arguments."""
        receives = operation == "Precv_init"
        array = array_of(arguments["buf"])
        copies = HostCopies(backend, backend.stream(None, array))
        buf = copies.stage(arguments["buf"], writable=receives, name="buf")
        copies.wait()
        request: MPI.Prequest = call(**{**arguments, "buf": buf})  # it raises for a bad number of partitions

        def begin() -> DeferredRequest:
            stream = self._stream()
            if receives:  # MPI does not write the gaps of a datatype
                copies.refresh(stream)
                copies.wait()
            self._arrived = set()
            request.Start()
            status = MPI.Status()

            def finish() -> None:
                if receives:
                    self._deliver(set(range(len(self._parts))) - self._arrived, stream)

            return DeferredRequest.of(lambda: request.Test(status), finish, status)

        self = cls.of(begin, request.Free)
        self._request, self._backend, self._copies, self._array = request, backend, copies, array
        ((memory, host, _),) = copies.staged
        array_at, copy_at, number = memory.pointer, host.ctypes.data, arguments["partitions"]
        operand = parse(arguments["buf"], blocks=number, writable=receives, name="buf")
        self._parts = [(array_at, copy_at, memory.nbytes)] * number
        if operand.dtype is not None:
            first, nbytes = operand.pointer - array_at, operand.count * operand.dtype.itemsize
            starts = [first + partition * nbytes for partition in range(number)]
            self._parts = [(array_at + start, copy_at + start, nbytes) for start in starts]
        self._arrived = set()
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
        self._require_existing(partitions)
        self._move(partitions, self._stream(), to_device=False)
        self._request.Pready_list(list(partitions))

    def Parrived(self, partition: int) -> bool:
        """Return whether a partition has arrived. Local."""
        self._require_existing([partition])
        if self._latest is not None and not self._latest.over and partition not in self._arrived:
            if not self._request.Parrived(partition):
                return False
            self._deliver([partition], self._stream())
        return True

    def _require_existing(self, partitions: Iterable[int]) -> None:
        for partition in partitions:  # Open MPI 5 ends the program at a partition that does not exist
            if not 0 <= partition < len(self._parts):
                raise InvalidUsageError(f"partition={partition} does not exist: use 0 to {len(self._parts) - 1}")

    def _stream(self) -> int:
        return self._backend.stream(None, self._array)

    def _deliver(self, partitions: Iterable[int], stream: int) -> None:
        self._move(partitions, stream, to_device=True)
        self._arrived.update(partitions)

    def _move(self, partitions: Iterable[int], stream: int, *, to_device: bool) -> None:
        """Copy partitions to the other memory. Blocking."""
        for partition in partitions:
            array_at, copy_at, nbytes = self._parts[partition]
            target, source = (array_at, copy_at) if to_device else (copy_at, array_at)
            self._backend.copy(target, source, nbytes, stream)
        self._backend.synchronize(stream)
