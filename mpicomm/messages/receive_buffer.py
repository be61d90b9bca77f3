"""The host memory that MPI gets for a receive, and the way of the message from there into the user's memory.

MPI matches a receive before this rank knows whether data or a header arrives. So MPI gets host memory that can hold
both: the user's memory if it is long enough, or *staging memory*. Long staging memory costs nothing if a header
arrives, because the system provides no pages for memory that is not written.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import HandleError
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader
from mpicomm.messages.self_messages import unpack
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.buffers import read
from mpicomm.mpi.derived import Elements
from mpicomm.mpi.host_copies import through_host


@dataclass(slots=True)
class Delivery:
    """The rest of a receive after MPI's part: copies on a stream that bring the message into the user's memory."""

    enqueue: Callable[[int], None]
    """Enqueues the copies. Copies into host memory are over when it returns."""
    blocks: bool = False
    """Whether `enqueue` waits for all earlier work of its stream."""


class ReceiveBuffer(abc.ABC):
    """The buffer of one receive, which it keeps alive. ``capacity`` is the longest message, in bytes, that fits."""

    in_place = False
    """Whether MPI writes into the user's memory."""

    def __init__(self, endpoint: Endpoint, capacity: int, rendezvous: Rendezvous, spec: Any, pointer: int) -> None:
        self.endpoint = endpoint
        self.capacity = capacity
        self.device = rendezvous.device
        self._rendezvous = rendezvous
        self.spec = spec
        """The buffer argument of MPI's receive."""
        self.pointer = pointer
        """The address of the memory of ``spec``."""

    @property
    def goes_to_mpi(self) -> bool:
        """Whether MPI completes the receive without this package, because no header can arrive."""
        return self.in_place and not self._rendezvous.expects_headers

    def arrived(self, status: MPI.Status) -> Delivery | None:
        """Read the message that MPI has received, and correct its status. Return the rest of the receive, or None.

        If the call sends the content of the buffer, it has done so before. The delivery raises `MPI.Exception` for a
        message that is longer than the buffer.
        """
        nbytes = status.Get_count(MPI.BYTE)
        header = None
        if nbytes == HEADER_NBYTES and not self.goes_to_mpi:
            header = self._rendezvous.header(self.pointer)
        if header is None:
            # Staging memory may be longer than the buffer.
            return self._deliver_eager(nbytes) if nbytes <= self.capacity else Delivery(_refuse)
        status.Set_elements(MPI.BYTE, header.nbytes)
        if header.nbytes > self.capacity:
            return self._drop(header, status.source)
        return self._deliver_rendezvous(header, status.source)

    @abc.abstractmethod
    def _deliver_eager(self, nbytes: int) -> Delivery | None:
        """Deliver ``nbytes`` bytes of data that MPI has received. Return None if they are in the user's memory."""

    @abc.abstractmethod
    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        """Deliver the message with the header that MPI has received."""

    def _drop(self, header: RendezvousHeader, source: int) -> Delivery:
        def drop(stream: int) -> None:
            self._rendezvous.drop(header, source, stream)
            _refuse(stream)

        return Delivery(drop)

    def _pull(self, header: RendezvousHeader, pointer: int, source: int, stream: int) -> None:
        """Copy a message out of its sender's outbox to host memory, and wait for that."""
        self._rendezvous.pull(header, pointer, source, stream)
        self.device.synchronize(stream)
        self.device.check()  # raises if the sender did not fill its outbox in time


class HostReceive(ReceiveBuffer):
    """A receive into a host array of plain elements: MPI writes there."""

    in_place = True

    def __init__(self, endpoint: Endpoint, capacity: int, rendezvous: Rendezvous) -> None:
        pointer = 0 if endpoint.operand is None else endpoint.operand.pointer
        super().__init__(endpoint, capacity, rendezvous, endpoint.spec, pointer)

    def _deliver_eager(self, nbytes: int) -> None:
        return None

    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        return Delivery(lambda stream: self._pull(header, self.pointer, source, stream), blocks=True)


class StagedReceive(ReceiveBuffer):
    """A receive for which MPI gets staging memory. ``spec`` may be existing staging memory."""

    def __init__(
        self, endpoint: Endpoint, capacity: int, rendezvous: Rendezvous, spec: list[Any] | None = None
    ) -> None:
        spec = spec or staging(capacity)
        self._staging = spec[0]
        # NumPy's `ctypes` takes ten times as long.
        super().__init__(endpoint, capacity, rendezvous, spec, MPI.Get_address(self._staging))

    @property
    def _operand(self) -> Operand:
        operand = self.endpoint.operand
        assert operand is not None
        return operand


class DeviceReceive(StagedReceive):
    """A receive into a flat device array, in the order of its stream."""

    def _deliver_eager(self, nbytes: int) -> Delivery | None:
        def copy(stream: int) -> None:
            self.device.copy(self.endpoint.pointer, self.pointer, nbytes, stream)
            self.device.synchronize(stream)  # because the staging memory ends with this object

        return Delivery(copy, blocks=True) if nbytes else None

    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        return Delivery(lambda stream: self._rendezvous.receive(header, self.endpoint.pointer, source, stream))


class StagedHostReceive(StagedReceive):
    """A receive into a host array that is shorter than a header, or that the same call still sends."""

    def _deliver_eager(self, nbytes: int) -> None:
        ctypes.memmove(self._operand.pointer, self.pointer, nbytes)

    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        return Delivery(lambda stream: self._pull(header, self._operand.pointer, source, stream), blocks=True)


class DerivedReceive(StagedReceive):
    """A receive of elements of a derived datatype.

    The packed message comes into the staging memory, and MPI unpacks it into the user's memory.
    """

    def _deliver_eager(self, nbytes: int) -> Delivery | None:
        return Delivery(lambda stream: self._unpack(nbytes, stream), blocks=True) if nbytes else None

    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        def pull_and_unpack(stream: int) -> None:
            self._pull(header, self.pointer, source, stream)
            self._unpack(header.nbytes, stream)

        return Delivery(pull_and_unpack, blocks=True)

    def _unpack(self, nbytes: int, stream: int) -> None:
        packed, operand = self._staging[:nbytes], self._operand
        buffer = operand.spec, True, operand.name, operand
        through_host(self.device, stream, lambda spec: unpack(packed, spec), [buffer])


class DerivedDeviceReceive(DerivedReceive):
    """A receive of elements of a derived datatype into device memory, which kernels unpack.

    If the outbox has no room for a message that needs it, MPI unpacks into a host copy of the array.
    """

    def __init__(self, endpoint: Endpoint, elements: Elements, rendezvous: Rendezvous) -> None:
        super().__init__(endpoint, elements.layout.nbytes, rendezvous)
        self._elements = elements

    def _deliver_eager(self, nbytes: int) -> Delivery | None:
        def copy(place: int, stream: int) -> None:
            self.device.copy(place, self.pointer, nbytes, stream)

        def unpack_part(stream: int) -> None:
            try:
                self._rendezvous.unpack_part(nbytes, lambda place: copy(place, stream), self._elements, stream)
            except (OutboxFullError, HandleError):
                self._unpack(nbytes, stream)
            self.device.synchronize(stream)  # because the staging memory ends with this object

        return Delivery(unpack_part, blocks=True) if nbytes else None

    def _deliver_rendezvous(self, header: RendezvousHeader, source: int) -> Delivery:
        nbytes, elements = header.nbytes, self._elements
        if len(header.extents) == 1 and nbytes == elements.layout.nbytes:
            return Delivery(lambda stream: self._rendezvous.unpack(header, elements, source, stream))
        by_host = super()._deliver_rendezvous(header, source)

        def unpack_part(stream: int) -> None:
            def fill(place: int) -> None:
                self._rendezvous.pull(header, place, source, stream)

            try:
                self._rendezvous.unpack_part(nbytes, fill, elements, stream)
            except OutboxFullError:
                by_host.enqueue(stream)

        return Delivery(unpack_part, blocks=True)


def staging(capacity: int) -> list[Any]:
    """Return memory for a header, or for data that fills a buffer, as MPI takes it."""
    nbytes = max(capacity, HEADER_NBYTES)
    # MPI.PACKED matches every type of the sender.
    return [np.empty(nbytes, np.uint8), nbytes, MPI.PACKED]


def receive_buffer(endpoint: Endpoint, rendezvous: Rendezvous, *, replace: bool = False) -> ReceiveBuffer:
    """Return the receive buffer of an endpoint. With ``replace`` the same call sends the content of the buffer."""
    operand = endpoint.operand
    if endpoint.is_flat:
        return DeviceReceive(endpoint, endpoint.nbytes, rendezvous)
    if operand is None:
        return HostReceive(endpoint, 0, rendezvous)
    if operand.dtype is not None:
        capacity = operand.nbytes
    elif operand.derived is not None and operand.packed_nbytes and rendezvous.expects_headers:
        return DerivedDeviceReceive(endpoint, operand.derived[0], rendezvous)
    elif operand.mpi_type is not None and operand.mpi_type != MPI.BYTE:
        return DerivedReceive(endpoint, operand.mpi_type.Pack_size(operand.total, MPI.COMM_SELF), rendezvous)
    else:  # NumPy lacks the element type of a host array, and MPI may know it; MPI.BYTE stands for it in the endpoint
        capacity = read(operand.owner, True, operand.name).nbytes
    staged = replace or rendezvous.exceeds(capacity)
    return (StagedHostReceive if staged else HostReceive)(endpoint, capacity, rendezvous)


def _refuse(stream: int) -> None:
    raise MPI.Exception(MPI.ERR_TRUNCATE)
