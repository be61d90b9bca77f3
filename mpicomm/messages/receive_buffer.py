"""The host memory that MPI gets for a receive, and the way of the message from there into the user's memory.

MPI matches a receive before this rank knows whether data or a header arrives. So MPI gets host memory that can hold
both: the user's memory if it is long enough, or *staging memory*. Long staging memory costs nothing if a header
arrives, because the system provides no pages for memory that is not written.
"""

from __future__ import annotations

import abc
import ctypes
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.devices.host import array_at
from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.matched import Content, unpack
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.rendezvous import PeerSlot, Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.buffers import read
from mpicomm.mpi.host_calls import through_host
from mpicomm.mpi.layout import Elements

_byte = MPI.BYTE
_BYTES = np.dtype(np.uint8)


class StagingMemory:
    """Staging memory for a header, or for ``capacity`` bytes of data."""

    __slots__ = ("capacity", "content", "pointer", "spec")

    def __init__(self, capacity: int) -> None:
        self.capacity = nbytes = max(capacity, HEADER_NBYTES)
        self.content = np.empty(nbytes, np.uint8)
        self.pointer = MPI.Get_address(self.content)  # NumPy's `ctypes` takes ten times as long
        # MPI.PACKED matches every type of the sender.
        self.spec: list[Any] = [self.content, nbytes, MPI.PACKED]
        """The memory as MPI takes it."""


class UserMemory:
    """The memory of the user's host array at ``pointer``. MPI takes ``spec``."""

    def __init__(self, spec: Any, pointer: int) -> None:
        self.spec = spec
        self.pointer = pointer

    @property
    def content(self) -> Content:
        """The first bytes."""
        return array_at(self.pointer, HEADER_NBYTES, _BYTES)


class ReceiveBuffer(abc.ABC):
    """The buffer of one receive, which it keeps alive. ``capacity`` is the longest message, in bytes, that fits.

    MPI receives into ``memory``. After that `arrived` reads the message, and `deliver` brings it to its array.
    """

    in_place = False
    """Whether MPI writes into the user's memory."""

    # Callers pass the arguments by position, because each call on device arrays makes a buffer.
    def __init__(
        self, endpoint: Endpoint, capacity: int, rendezvous: Rendezvous, memory: StagingMemory | UserMemory
    ) -> None:
        self.endpoint = endpoint
        self.capacity = capacity
        self.rendezvous = rendezvous
        self.memory = memory
        self.nbytes = 0
        """The bytes of the message that has arrived."""
        self.slot: PeerSlot | None = None
        """The slot of the message; None if MPI has received the data itself."""

    def arrived(self, status: MPI.Status) -> bool:
        """Read the message that MPI has received, and correct its status. Return whether it needs `deliver`.

        If the call sends the content of the buffer, it has done so before.
        """
        nbytes = status.Get_count(_byte)
        if nbytes == HEADER_NBYTES and self.rendezvous.expects_headers:
            found = self.rendezvous.arrived(self.memory.content, status.source)
            if found is not None:
                self.slot, self.nbytes = found
                status.Set_elements(_byte, self.nbytes)
                return True
        self.nbytes = nbytes
        # Staging memory may be longer than the buffer.
        return (nbytes > self.capacity and not self.in_place) or self._needs_device(nbytes)

    def deliver(self, stream: int) -> None:
        """Enqueue the copies of the message. Copies into host memory are over when this returns.

        Raises `MPI.Exception` for a message that is longer than the buffer.
        """
        slot, nbytes = self.slot, self.nbytes
        if nbytes > self.capacity:
            if slot is not None:
                self.rendezvous.drop(slot, nbytes, stream)
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        if slot is None:
            self._copy(nbytes, stream)
        else:
            self._receive(slot, nbytes, stream)

    @property
    def blocks(self) -> bool:
        """Whether `deliver` waits for all earlier work of its stream."""
        return self.nbytes <= self.capacity and not self._is_stream_ordered()

    def _is_stream_ordered(self) -> bool:
        return False

    @abc.abstractmethod
    def _needs_device(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` bytes of data that MPI has received are yet to be copied to the device.

        If not, they are in the user's memory.
        """

    def _copy(self, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` bytes of data that MPI has received to the device."""
        raise NotImplementedError

    @abc.abstractmethod
    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        """Copy a message out of its slot."""

    def _pull(self, slot: PeerSlot, nbytes: int, pointer: int, stream: int) -> None:
        """Copy a message out of its slot to host memory, and wait for that."""
        device = self.rendezvous.device
        self.rendezvous.pull(slot, nbytes, pointer, stream)
        device.synchronize(stream)
        device.check()  # raises if the sender did not fill its outbox in time


class HostReceive(ReceiveBuffer):
    """A receive into a host array of plain elements: MPI writes there."""

    in_place = True

    def _needs_device(self, nbytes: int) -> bool:
        return False

    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        self._pull(slot, nbytes, self.memory.pointer, stream)


class StagedReceive(ReceiveBuffer):
    """A receive for which MPI gets staging memory, which may be memory of an earlier receive."""

    memory: StagingMemory

    def _needs_device(self, nbytes: int) -> bool:
        return nbytes > 0

    @property
    def _operand(self) -> Operand:
        operand = self.endpoint.operand
        assert operand is not None
        return operand


class DeviceReceive(StagedReceive):
    """A receive into a flat device array, in the order of its stream."""

    def _is_stream_ordered(self) -> bool:
        return self.slot is not None

    def _copy(self, nbytes: int, stream: int) -> None:
        device = self.rendezvous.device
        device.copy(self.endpoint.pointer, self.memory.pointer, nbytes, stream)
        device.synchronize(stream)  # because the staging memory ends with this object

    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        if nbytes <= rendezvous_header.KERNEL_NBYTES and slot.copy_out is not None:
            slot.copy_out(stream, self.endpoint.pointer, nbytes)
        else:
            self.rendezvous.pull(slot, nbytes, self.endpoint.pointer, stream)


class StagedHostReceive(StagedReceive):
    """A receive into a host array that is shorter than a header, or that the same call still sends."""

    def _needs_device(self, nbytes: int) -> bool:
        ctypes.memmove(self._operand.pointer, self.memory.pointer, nbytes)
        return False

    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        self._pull(slot, nbytes, self._operand.pointer, stream)


class DerivedReceive(StagedReceive):
    """A receive of elements of a derived datatype.

    The packed message comes into the staging memory, and MPI unpacks it into the user's memory.
    """

    def _copy(self, nbytes: int, stream: int) -> None:
        self._unpack(nbytes, stream)

    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        self._pull(slot, nbytes, self.memory.pointer, stream)
        self._unpack(nbytes, stream)

    def _unpack(self, nbytes: int, stream: int) -> None:
        packed, operand = self.memory.content[:nbytes], self._operand
        buffer = operand.spec, True, operand.name, operand
        through_host(self.rendezvous.device, stream, lambda spec: unpack(packed, spec), [buffer])


class DerivedDeviceReceive(DerivedReceive):
    """A receive of elements of a derived datatype into device memory, which kernels unpack.

    If the outbox has no room for a message that needs it, MPI unpacks into a host copy of the array.
    """

    def __init__(self, endpoint: Endpoint, elements: Elements, rendezvous: Rendezvous) -> None:
        nbytes = elements.layout.nbytes
        super().__init__(endpoint, nbytes, rendezvous, StagingMemory(nbytes))
        self._elements = elements

    def _is_stream_ordered(self) -> bool:
        return self.slot is not None and len(self.slot.places) == 1 and self.nbytes == self._elements.layout.nbytes

    def _copy(self, nbytes: int, stream: int) -> None:
        device = self.rendezvous.device

        def fill(place: int) -> None:
            device.copy(place, self.memory.pointer, nbytes, stream)

        try:
            self.rendezvous.unpack_part(nbytes, fill, self._elements, stream)
        except (OutboxFullError, HandleError):
            self._unpack(nbytes, stream)
        device.synchronize(stream)  # because the staging memory ends with this object

    def _receive(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        if self._is_stream_ordered():
            self.rendezvous.unpack(slot, nbytes, self._elements, stream)
            return

        def fill(place: int) -> None:
            self.rendezvous.pull(slot, nbytes, place, stream)

        try:
            self.rendezvous.unpack_part(nbytes, fill, self._elements, stream)
        except OutboxFullError:
            super()._receive(slot, nbytes, stream)


def receive_buffer(endpoint: Endpoint, rendezvous: Rendezvous, *, replace: bool = False) -> ReceiveBuffer:
    """Return the receive buffer of an endpoint. With ``replace`` the same call sends the content of the buffer."""
    operand = endpoint.operand
    if endpoint.is_flat:
        return DeviceReceive(endpoint, endpoint.nbytes, rendezvous, StagingMemory(endpoint.nbytes))
    if operand is None:
        return HostReceive(endpoint, 0, rendezvous, UserMemory(endpoint.spec, 0))
    if operand.dtype is not None:
        capacity = operand.nbytes
    elif operand.derived is not None and operand.packed_nbytes and rendezvous.expects_headers:
        return DerivedDeviceReceive(endpoint, operand.derived[0], rendezvous)
    elif operand.mpi_type is not None and operand.mpi_type != MPI.BYTE:
        capacity = operand.mpi_type.Pack_size(operand.total, MPI.COMM_SELF)
        return DerivedReceive(endpoint, capacity, rendezvous, StagingMemory(capacity))
    else:  # NumPy lacks the element type of a host array, and MPI may know it; MPI.BYTE stands for it in the endpoint
        capacity = read(operand.owner, True, operand.name).nbytes
    if replace or rendezvous.exceeds(capacity):
        return StagedHostReceive(endpoint, capacity, rendezvous, StagingMemory(capacity))
    return HostReceive(endpoint, capacity, rendezvous, UserMemory(endpoint.spec, operand.pointer))
