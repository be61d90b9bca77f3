"""The host memory that MPI gets for a receive, and the way of the message from there into the user's memory.

MPI matches a receive before this rank knows whether data or a header arrives. So MPI gets host memory that can hold
both: the user's memory if it is long enough, or *staging memory*. Long staging memory costs nothing if a header
arrives, because the system provides no pages for memory that is not written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpicomm.devices.host import array_at
from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.matched import Correct, unpack
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.rendezvous import PeerSlot, Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.buffers import read
from mpicomm.mpi.host_calls import HostCopies
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


Kind = Literal["flat", "host", "derived", "kernels"]
"""What a receive fills: a flat device array, a host array of plain elements, elements of a derived datatype that MPI
unpacks, or such elements in device memory that kernels unpack."""


class ReceiveBuffer:
    """The buffer of one receive, which it keeps alive. ``capacity`` is the longest message, in bytes, that fits.

    MPI receives into ``spec``: staging memory, or the user's host array without ``staging``. After that `arrived` reads
    the message, and `deliver` brings it to its array, which begins at ``pointer`` if it has plain elements.
    """

    # Callers pass the arguments by position, because each call on device arrays makes a buffer.
    def __init__(
        self,
        kind: Kind,
        endpoint: Endpoint,
        capacity: int,
        rendezvous: Rendezvous,
        staging: StagingMemory | None,
        pointer: int = 0,
        elements: Elements | None = None,
    ) -> None:
        self.kind = kind
        self.endpoint = endpoint
        self.capacity = capacity
        self.rendezvous = rendezvous
        self.staging = staging
        self.spec = endpoint.spec if staging is None else staging.spec
        self.nbytes = 0
        """The bytes of the message that has arrived."""
        self.slot: PeerSlot | None = None
        """The slot of the message; None if MPI has received the data itself."""
        self._pointer = pointer
        self._elements = elements
        self.saved = b""
        """What a header in the user's memory has overwritten: the message may be shorter than the header."""
        if staging is None and rendezvous.expects_headers:
            self.saved = ctypes.string_at(pointer, HEADER_NBYTES)

    def arrived(self, status: MPI.Status) -> bool:
        """Read the message that MPI has received, and correct its status. Return whether it needs `deliver`.

        If the call sends the content of the buffer, it has done so before.
        """
        nbytes, staging = status.Get_count(_byte), self.staging
        if nbytes == HEADER_NBYTES and self.rendezvous.expects_headers:
            content = array_at(self._pointer, nbytes, _BYTES) if staging is None else staging.content
            found = self.rendezvous.arrived(content, status.source)
            if found is not None:
                self.slot, self.nbytes = found
                status.Set_elements(_byte, self.nbytes)
                return True
        self.nbytes = nbytes
        if staging is None:
            return False
        if self.kind == "host" and nbytes <= self.capacity:  # staging memory may be longer than the buffer
            ctypes.memmove(self._pointer, staging.pointer, nbytes)
            return False
        return nbytes > 0

    def deliver(self, stream: int) -> None:
        """Enqueue the copies of the message. Copies into host memory are over when this returns.

        Raises `MPI.Exception` for a message that is longer than the buffer.
        """
        slot, nbytes, rendezvous = self.slot, self.nbytes, self.rendezvous
        if nbytes > self.capacity:
            if slot is not None:
                rendezvous.drop(slot, nbytes, stream)
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        if self.kind == "kernels":
            self._unpack_by_kernels(stream)
        elif self.kind != "flat":
            self._to_host(stream)
        elif slot is None:
            self._copy_staging(self._pointer, stream)
            rendezvous.device.synchronize(stream)  # because the staging memory ends with this object
        elif nbytes <= rendezvous_header.KERNEL_NBYTES:
            slot.copy_out(stream, self._pointer, nbytes)
        else:
            rendezvous.pull(slot, nbytes, self._pointer, stream)

    @property
    def blocks(self) -> bool:
        """Whether `deliver` waits for all earlier work of its stream."""
        in_order = self.slot is not None and (self.kind == "flat" or self._fills_all())
        return self.nbytes <= self.capacity and not in_order

    def _fills_all(self) -> bool:
        """Return whether kernels unpack the message where it lies, because it is whole."""
        elements = self._elements
        return elements is not None and self.slot is not None and self.nbytes == elements.layout.nbytes

    def _copy_staging(self, pointer: int, stream: int) -> None:
        assert self.staging is not None
        self.rendezvous.device.copy(pointer, self.staging.pointer, self.nbytes, stream)

    def _to_host(self, stream: int) -> None:
        """Copy the message to host memory, and let MPI unpack a derived datatype."""
        device, staging = self.rendezvous.device, self.staging
        if self.slot is not None:
            pointer = self._pointer if self.kind == "host" or staging is None else staging.pointer
            if self.nbytes < len(self.saved):
                ctypes.memmove(pointer + self.nbytes, self.saved[self.nbytes :], len(self.saved) - self.nbytes)
            self.rendezvous.pull(self.slot, self.nbytes, pointer, stream)
            device.synchronize(stream)
            device.check()  # raises if the sender did not fill its outbox in time
        if self.kind != "host":
            operand = self.endpoint.operand
            assert staging is not None and operand is not None
            copies = HostCopies(device, stream)
            buffer = copies.spec(operand.spec, writable=True, name=operand.name, operand=operand)
            copies.ready()
            unpack(staging.content[: self.nbytes], buffer)
            copies.back()

    def _unpack_by_kernels(self, stream: int) -> None:
        slot, nbytes, rendezvous, elements = self.slot, self.nbytes, self.rendezvous, self._elements
        assert elements is not None
        if slot is not None and self._fills_all():
            rendezvous.unpack(slot, nbytes, elements, stream)
            return

        def fill(place: int) -> None:
            if slot is None:
                self._copy_staging(place, stream)
            else:
                rendezvous.pull(slot, nbytes, place, stream)

        try:
            rendezvous.unpack_part(nbytes, fill, elements, stream)
        except (OutboxFullError, HandleError):  # no room for the message: MPI unpacks into a host copy of the array
            self._to_host(stream)
        if slot is None:
            rendezvous.device.synchronize(stream)  # because the staging memory ends with this object


def receive_buffer(endpoint: Endpoint, rendezvous: Rendezvous, *, replace: bool = False) -> ReceiveBuffer:
    """Return the receive buffer of an endpoint. With ``replace`` the same call sends the content of the buffer."""
    operand = endpoint.operand
    if endpoint.is_flat:
        nbytes = endpoint.nbytes
        return ReceiveBuffer("flat", endpoint, nbytes, rendezvous, StagingMemory(nbytes), endpoint.pointer)
    if operand is None:
        return ReceiveBuffer("host", endpoint, 0, rendezvous, None)
    if operand.dtype is not None:
        capacity = operand.nbytes
    elif operand.derived is not None and operand.packed_nbytes and rendezvous.expects_headers:
        elements = operand.derived[0]
        capacity = elements.layout.nbytes
        rendezvous.load(elements)
        return ReceiveBuffer("kernels", endpoint, capacity, rendezvous, StagingMemory(capacity), 0, elements)
    elif operand.mpi_type is not None and operand.mpi_type != MPI.BYTE:
        capacity = operand.mpi_type.Pack_size(operand.total, MPI.COMM_SELF)
        return ReceiveBuffer("derived", endpoint, capacity, rendezvous, StagingMemory(capacity))
    else:  # NumPy lacks the element type of a host array, and MPI may know it; MPI.BYTE stands for it in the endpoint
        capacity = read(operand.owner, True, operand.name).nbytes
    # A header may come, which does not fit into the user's memory.
    stages = replace or (rendezvous.expects_headers and capacity < HEADER_NBYTES)
    staging = StagingMemory(capacity) if stages else None
    return ReceiveBuffer("host", endpoint, capacity, rendezvous, staging, operand.pointer)


class PendingReceive:
    """A receive that MPI has begun. One thread at a time calls its methods.

    ``mark`` lies in the user's stream, and the copies into a device array follow it. `done` asks ``before`` first, and
    asks MPI only after ``before`` has returned true. ``correct`` corrects the status that MPI fills. ``give_back`` gets
    the buffer when its copies are enqueued.
    """

    def __init__(
        self,
        buffer: ReceiveBuffer,
        request: MPI.Request,
        correct: Correct | None,
        mark: Any,
        before: Callable[[], bool] | None,
        give_back: Callable[[ReceiveBuffer], None],
    ) -> None:
        self.device = buffer.rendezvous.device
        self.status = MPI.Status()
        self._buffer = buffer
        self._request: MPI.Request | None = request
        self._correct = correct
        self._mark = mark
        self._before = before
        self._give_back = give_back
        self._side: int | None = None  # the stream of the copies, until they are over
        self._delivered: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Return whether the message is in the user's memory, or the receive was cancelled."""
        buffer, device = self._buffer, self.device
        if self._request is not None:
            if self._before is not None and not self._before():
                return False
            if not self._request.Test(self.status):
                return False
            self._request = None  # MPI has freed it
            cancelled = self.status.Is_cancelled()
            if self._correct is not None and not cancelled:
                self._correct(self.status)
            if cancelled or not buffer.arrived(self.status):
                self._delivered = lambda: True
        if self._delivered is None:
            # A delivery that waits for its stream would also wait for the user's work, and this thread would complete
            # no other request.
            if buffer.blocks and self._mark is not None and not device.side_streams.passed(self._mark):
                return False
            self._delivered = self._deliver()
        if not self._delivered():
            return False
        if self._side is not None:
            # `_delivered` has seen the event behind the last work of the stream. If the stream came back before, the
            # copies of the next receive could wait there for this sender.
            device.side_streams.give_back(self._side, is_idle=True)
            self._side = None
        return True

    def _deliver(self) -> Callable[[], bool]:
        """Enqueue the copies; return what says whether they are over."""
        # The copies may wait for the sender. On the user's stream they would hold up its later work, and other
        # receives.
        buffer, streams = self._buffer, self.device.side_streams
        side = streams.take(self._mark)
        try:
            buffer.deliver(side)
            delivered = self.device.completion(side)
        except BaseException:
            streams.give_back(side)
            raise
        self._side = side
        self._give_back(buffer)
        return delivered

    def cancel(self) -> None:
        """Cancel the receive unless MPI has received the message."""
        if self._request is not None:
            self._request.Cancel()
