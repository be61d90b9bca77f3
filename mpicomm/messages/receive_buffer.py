"""The host memory that MPI gets for a receive, and the delivery of the message from there into the user's memory.

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
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.rendezvous import PeerSlot, Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.messages.unexpected import unpack

_byte = MPI.BYTE
_memory_at = MPI.memory.fromaddress  # a third of the time of `ctypes.string_at`
_BYTES = np.dtype(np.uint8)
_LEAST_SPARE_NBYTES, _MOST_SPARE_NBYTES = 64 << 10, 16 << 20


class StagingMemory:
    """Staging memory for a header, or for ``capacity`` bytes of data."""

    __slots__ = ("capacity", "content", "pointer", "spec", "status")

    def __init__(self, capacity: int) -> None:
        self.capacity = nbytes = max(capacity, HEADER_NBYTES)
        # mpi4py and `struct` read a memoryview in half the time of an array.
        self.content = np.empty(nbytes, np.uint8).data
        self.pointer = MPI.Get_address(self.content)
        # MPI.PACKED matches every type of the sender.
        self.spec: list[Any] = [self.content, nbytes, MPI.PACKED]
        """The memory as MPI takes it."""
        self.status = MPI.Status()
        """A status for the receive, which takes as long to make as to fill."""


class StagingPool:
    """The free staging memory of a communicator: as many arrays as there were receives at once.

    The system provides no pages for the parts that no message has filled.
    """

    def __init__(self) -> None:
        self.spare: list[StagingMemory] = []

    def acquire(self, nbytes: int) -> StagingMemory:
        """Return staging memory for at most ``nbytes`` bytes of data, or for a header."""
        try:
            staging = self.spare.pop()
        except IndexError:
            staging = StagingMemory(_LEAST_SPARE_NBYTES)
        if staging.capacity < nbytes:
            if nbytes > _MOST_SPARE_NBYTES:
                self.spare.append(staging)
            staging = StagingMemory(nbytes)
        staging.spec[1] = nbytes if nbytes > HEADER_NBYTES else HEADER_NBYTES
        return staging

    def release(self, staging: StagingMemory, buffer: ReceiveBuffer) -> None:
        """Let `acquire` return the memory of a receive again, unless a long message has filled it."""
        is_nearly_empty = buffer.slot is not None or buffer.nbytes <= _LEAST_SPARE_NBYTES
        if is_nearly_empty and staging.capacity <= _MOST_SPARE_NBYTES:
            self.spare.append(staging)


Kind = Literal["flat", "host", "derived"]
"""What a receive fills: a flat device array, host memory with plain elements, or elements of a derived datatype."""


class ReceiveBuffer:
    """The buffer of one receive, which it keeps alive. ``capacity`` is the longest message, in bytes, that fits.

    MPI receives into ``spec``: ``staging`` memory, or the user's host array. After that `accept` reads the message,
    and `deliver` copies it into its array, which begins at ``pointer`` if it has plain elements. A plain NumPy array
    has no ``endpoint``, because most of its messages are data, which need none.
    """

    __slots__ = (
        "capacity", "endpoint", "kind", "nbytes", "overwritten", "pointer", "rendezvous", "slot", "spec", "staging",
    )  # fmt: skip

    # Callers pass the arguments by position, because each call on device arrays makes a buffer.
    def __init__(
        self,
        kind: Kind,
        rendezvous: Rendezvous,
        capacity: int,
        pointer: int,
        staging: StagingMemory | None,
        spec: Any = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.kind = kind
        self.rendezvous = rendezvous
        self.capacity = capacity
        self.pointer = pointer
        self.staging = staging
        self.spec = spec if staging is None else staging.spec
        self.endpoint = endpoint
        self.nbytes = 0
        """The bytes of the message that has arrived."""
        self.slot: PeerSlot | None = None
        """The slot of the message; None if MPI has received the data itself."""
        self.overwritten = b""
        """The user's bytes where MPI may receive a header. The message may be shorter than the header."""
        if staging is None and rendezvous.expects_headers:
            self.overwritten = _memory_at(pointer, HEADER_NBYTES).tobytes()

    def accept(self, status: MPI.Status) -> bool:
        """Read the message that MPI has received, and correct its status. Return whether it needs `deliver`.

        If the call sends the content of the buffer, it has done so before. Raises `MPI.Exception` for data that is
        longer than the buffer.
        """
        self.nbytes = nbytes = status.Get_count(_byte)
        staging = self.staging
        if nbytes == HEADER_NBYTES and self.rendezvous.expects_headers:
            content = array_at(self.pointer, nbytes, _BYTES).data if staging is None else staging.content
            found = self.rendezvous.resolve_header(content, status)
            if found is not None:
                self.slot, self.nbytes = found
                status.Set_elements(_byte, self.nbytes)
                return True
        # Staging memory may be longer than the buffer. MPICH 5.0.2 loses its own error of a receive from any source
        # while another thread polls a request. Without staging and a pointer MPI alone knows the capacity.
        if nbytes > self.capacity and (staging is not None or self.pointer):
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        if staging is None:
            return False
        if self.kind == "host":
            ctypes.memmove(self.pointer, staging.pointer, nbytes)
            return False
        return nbytes > 0

    def deliver(self, stream: int) -> None:
        """Enqueue the copies of the message. Copies into host memory are over when this returns.

        Raises `MPI.Exception` for a message that is longer than the buffer.
        """
        slot, nbytes, rendezvous = self.slot, self.nbytes, self.rendezvous
        if slot is not None and nbytes > self.capacity:
            rendezvous.discard(slot, nbytes, stream)
            raise MPI.Exception(MPI.ERR_TRUNCATE)
        if self.kind == "host":
            self._pull_to_host(self.pointer, stream)
        elif self.kind == "derived":
            self._unpack(stream)
        elif slot is not None and nbytes <= rendezvous_header.KERNEL_NBYTES:
            slot.copy_out(stream, self.pointer, nbytes)
        else:
            self._copy_to(self.pointer, stream)

    @property
    def waits_for_stream(self) -> bool:
        """Whether `deliver` into a device array waits for all earlier work of its stream."""
        # Kernels unpack a message in stream order if it fills all elements.
        in_order = self.slot is not None and (self.kind == "flat" or self.nbytes == self.capacity)
        return self.nbytes <= self.capacity and not in_order

    def _copy_to(self, pointer: int, stream: int) -> None:
        """Copy the message, as it lies, to an address."""
        slot, staging, device = self.slot, self.staging, self.rendezvous.device
        if slot is not None:
            self.rendezvous.pull(slot, self.nbytes, pointer, stream)
        elif staging is not None:
            device.copy(pointer, staging.pointer, self.nbytes, stream)
            device.synchronize(stream)  # because another receive may use the staging memory next

    def _pull_to_host(self, pointer: int, stream: int) -> None:
        nbytes, overwritten, device = self.nbytes, self.overwritten, self.rendezvous.device
        if nbytes < len(overwritten):
            ctypes.memmove(pointer + nbytes, overwritten[nbytes:], len(overwritten) - nbytes)
        self._copy_to(pointer, stream)
        device.synchronize(stream)
        device.check()  # raises if the sender did not fill its outbox in time

    def _unpack(self, stream: int) -> None:
        """Unpack elements of a derived datatype: by kernels into device memory, by MPI into host memory."""
        endpoint, staging, slot, nbytes = self.endpoint, self.staging, self.slot, self.nbytes
        rendezvous = self.rendezvous
        assert endpoint is not None and endpoint.operand is not None and staging is not None
        if not endpoint.on_device:
            if slot is not None:
                self._pull_to_host(staging.pointer, stream)
            unpack(staging.content[:nbytes], endpoint.operand.spec)
        elif slot is not None and nbytes == self.capacity:
            rendezvous.unpack(slot, nbytes, endpoint.elements, stream)
        else:
            rendezvous.unpack_partial(nbytes, self._copy_to, endpoint.elements, stream)


def receive_buffer(
    endpoint: Endpoint, rendezvous: Rendezvous, acquire: Callable[[int], StagingMemory], *, replace: bool
) -> ReceiveBuffer:
    """Return the receive buffer of an endpoint that is not flat. ``acquire`` returns staging memory.

    With ``replace`` the same call sends the content of the buffer.
    """
    operand = endpoint.operand
    if operand is None:
        return ReceiveBuffer("host", rendezvous, 0, 0, None, endpoint.spec, endpoint)
    if operand.derived is not None:
        capacity = operand.packed_nbytes
        if capacity:
            rendezvous.load_packing(endpoint.elements)
        return ReceiveBuffer("derived", rendezvous, capacity, 0, acquire(capacity), None, endpoint)
    if operand.dtype is not None:
        capacity = operand.nbytes
    elif operand.mpi_type is not None and operand.mpi_type != MPI.BYTE:
        capacity = operand.mpi_type.Pack_size(operand.total, MPI.COMM_SELF)
        return ReceiveBuffer("derived", rendezvous, capacity, 0, acquire(capacity), None, endpoint)
    else:  # NumPy lacks the element type of a host array, and MPI may know it; MPI.BYTE stands for it in the endpoint
        capacity = operand.memory.nbytes
    # A header may come, which does not fit into the user's memory.
    is_staged = replace or (rendezvous.expects_headers and capacity < HEADER_NBYTES)
    staging = acquire(capacity) if is_staged else None
    return ReceiveBuffer("host", rendezvous, capacity, operand.pointer, staging, endpoint.spec, endpoint)
