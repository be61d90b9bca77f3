"""The rendezvous of messages: copies into the sender's outbox and out of it, in the order of streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from mpicomm.devices.base import GpuBackend, MessageCopy, Segment
from mpicomm.devices.handle import MemoryHandle
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.in_flight import DONE
from mpicomm.messages.outbox import Outbox
from mpicomm.messages.outbox_slot import LINE_NBYTES, OutboxSlot
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader, is_for_kernels
from mpicomm.mpi.derived import Elements
from mpicomm.mpi.packing import table_for

_MOST_KNOWN = 4096
"""The largest number of headers of peers that a rank keeps."""


class Rendezvous:
    """The outbox of this rank, and the blocks of peers' outboxes that this rank has opened.

    All methods are local, from any thread. Ranks set nothing up together. A header holds the handle of the block with
    its message, and the receiver opens the block and keeps it open. If a wait on the device runs out of time, the
    device's `check` raises the error.

    The outbox has at most ``most_nbytes``. Without a ``secret`` no message has a header, and `header` finds none.
    """

    def __init__(self, device: GpuBackend, rank: int, secret: bytes | None, most_nbytes: int | None = None) -> None:
        self.device = device
        self._rank = rank
        self._secret = secret
        self._steps = device.message_steps()
        self._outbox = Outbox(device, secret or b"", most_nbytes)
        self.reserve = self._outbox.reserve
        """Gives a message of this rank its slot in the outbox; see `Outbox.reserve`."""
        self._lock = threading.Lock()  # so that two threads do not open one block twice
        self._opened: dict[bytes, Segment] = {}
        # For each packed header of a short message of a peer: its copy out, and its bytes.
        self._known: dict[bytes, tuple[MessageCopy, int]] = {}
        self._closed = False

    @property
    def expects_headers(self) -> bool:
        """Whether headers can arrive."""
        return self._secret is not None

    def exceeds(self, nbytes: int) -> bool:
        """Return whether a header can arrive that exceeds a receive buffer of ``nbytes`` bytes."""
        return self.expects_headers and nbytes < HEADER_NBYTES

    def header(self, pointer: int) -> RendezvousHeader | None:
        """Return the header that MPI has received at ``pointer``, or None for data of the same length."""
        if self._secret is None:
            return None
        return RendezvousHeader.unpack(ctypes.string_at(pointer, HEADER_NBYTES), self._secret)

    def fill(self, place: OutboxSlot, sent: Endpoint, stream: int) -> None:
        """Enqueue the copy of a message into its slot."""
        if not sent.is_flat:
            elements = sent.elements
            self.device.pack(table_for(elements.layout), elements.address, place.pointer, stream, unpacks=False)
            self._steps.announce(stream, ready=place.ready, count=place.counts)
        elif place.nbytes <= rendezvous_header.KERNEL_NBYTES:
            copy = place.copy_in
            if copy is None:
                copy = place.copy_in = self._steps.copy_in(place.pointer, ready=place.ready)
            copy(stream, sent.pointer, place.nbytes)
        else:
            done = 0
            for extent, start, piece in place.header.pieces():
                target = self._block(extent.packet, extent.nbytes, self._rank) + extent.offset + start
                self.device.copy(target, sent.pointer + done, piece, stream)
                # The announcement follows each piece, so that the receiver copies the piece while the next one goes
                # into the outbox. It pairs with the wait in `pull`, which keeps the receiver from reading memory that
                # is not written yet.
                self._steps.announce(stream, ready=place.ready, count=1)
                done += piece

    def put_back(self, place: OutboxSlot) -> None:
        """Release the slot of a message that this rank has neither filled nor sent."""
        self._outbox.put_back(place)

    def withdraw(self, place: OutboxSlot, stream: int) -> None:
        """Release the slot of a message that this rank does not send, but has filled in the same stream."""
        self._steps.release(stream, done=place.done, count=place.counts)

    def receive(self, header: RendezvousHeader, pointer: int, source: int, stream: int) -> None:
        """Enqueue the copy of a message of rank ``source`` to device memory, and the release of its slot."""
        if is_for_kernels(header.nbytes):
            self._copy_out(header, source)(stream, pointer, header.nbytes)
        else:
            self.pull(header, pointer, source, stream)

    def receive_packed(self, packed: bytes, received: Endpoint, source: int) -> int:
        """As `receive`, for the packed header that MPI has received. Return the bytes of the message.

        For data, and for a message that is too long for kernels or for the buffer, do nothing and return 0.
        """
        known = self._known.get(packed)
        if known is None:
            header = None if self._secret is None else RendezvousHeader.unpack(packed, self._secret)
            if header is None or header.nbytes > rendezvous_header.KERNEL_NBYTES:
                return 0
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            # The same header comes again for each message of this length in the same slot.
            known = self._known[packed] = self._copy_out(header, source), header.nbytes
        copy, nbytes = known
        if nbytes > received.nbytes:
            return 0
        assert received.stream is not None
        copy(received.stream, received.pointer, nbytes)
        return nbytes

    def pull(self, header: RendezvousHeader, pointer: int, source: int, stream: int) -> None:
        """As `receive`, by copy engines, which also reach host memory."""
        ready, awaits, copied = self._line(header, source), 0, 0
        # The receiver opens all blocks before it enqueues the first wait, because opening one may wait for the device.
        parts = [
            (self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset + start, nbytes)
            for extent, start, nbytes in header.pieces()
        ]
        for part, nbytes in parts:
            awaits += 1
            self._wait(header, ready, awaits, source, stream)
            self.device.copy(pointer + copied, part, nbytes, stream)
            copied += nbytes
        # Pairs with the sender's read of the counts in Outbox. After it the sender reuses the slot.
        self._steps.release(stream, done=ready + DONE, count=awaits)

    def unpack(self, header: RendezvousHeader, elements: Elements, source: int, stream: int) -> None:
        """As `receive`, for a message in one extent that fills ``elements``. A kernel unpacks it."""
        ready, place, counts = self._line(header, source), self._whole(header, source), header.counts
        self._wait(header, ready, counts, source, stream)
        self.device.pack(table_for(elements.layout), elements.address, place, stream, unpacks=True)
        # As in `pull`, the sender must not see the count before the kernel has read the message.
        self._steps.release(stream, done=ready + DONE, count=counts)

    def unpack_part(self, nbytes: int, fill: Callable[[int], None], elements: Elements, stream: int) -> None:
        """Unpack a message of ``nbytes`` bytes, which may be shorter than ``elements``, through this rank's outbox.

        ``fill`` enqueues the copy of the message to an address. Raises the errors of `reserve`.
        """
        layout = elements.layout
        place = self.reserve(layout.nbytes, whole=True)
        try:
            if nbytes < layout.nbytes:  # the kernel unpacks all elements: elements without data keep their values
                self.device.pack(table_for(layout), elements.address, place.pointer, stream, unpacks=False)
            fill(place.pointer)
            self.device.pack(table_for(layout), elements.address, place.pointer, stream, unpacks=True)
        finally:
            # This rank counts for sender and receiver, because the slot is its own. The counts follow all use of the
            # slot in the same stream. They pair with the read of the counts in Outbox; without them the slot would be
            # lost.
            self._steps.announce(stream, ready=place.ready, count=place.counts)
            self._steps.release(stream, done=place.done, count=place.counts)

    def drop(self, header: RendezvousHeader, source: int, stream: int) -> None:
        """Release the slot of a message that no rank copies, after the whole message is in the outbox.

        Before that the sender's stream may still write there. Another stream, which does not wait for it, may write the
        next message to the same slot.
        """
        ready, counts = self._line(header, source), header.counts
        self._wait(header, ready, counts, source, stream)
        self._steps.release(stream, done=ready + DONE, count=counts)

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages of this rank."""
        return self._outbox.is_drained()

    def memory_use(self) -> MemoryUse:
        """Return the memory of the outbox."""
        return self._outbox.memory_use()

    def close_peers(self) -> None:
        """Unmap the peers' blocks. Copies out of them must be over. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._known.clear()
            while self._opened:
                self._opened.popitem()[1].close()

    def close_own(self) -> None:
        """Free the outbox, after every peer's `close_peers`. A second call does nothing."""
        self._outbox.close()

    def _copy_out(self, header: RendezvousHeader, source: int) -> MessageCopy:
        (extent,) = header.extents
        ready = self._block(header.words, DONE + header.line + LINE_NBYTES, source) + header.line
        place = self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset
        # The copy releases the slot. It pairs with the sender's read of the counts in Outbox, as in `pull`.
        return self._steps.copy_out(place, ready=ready, done=ready + DONE, peer=source)

    def _wait(self, header: RendezvousHeader, ready: int, count: int, source: int, stream: int) -> None:
        self._steps.wait(stream, ready=ready, done=ready + DONE, count=count, blocks=header.blocks, peer=source)

    def _line(self, header: RendezvousHeader, source: int) -> int:
        return self._block(header.words, DONE + header.line + LINE_NBYTES, source) + header.line

    def _whole(self, header: RendezvousHeader, source: int) -> int:
        """Return the address of a message that lies in one extent."""
        (extent,) = header.extents
        return self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset

    def _block(self, packet: bytes, nbytes: int, source: int) -> int:
        """Return the address of a block of at least ``nbytes`` bytes.

        Raises `HandleError` if it cannot be opened or is shorter.
        """
        # A process cannot open a handle that it has exported.
        segment = self._opened.get(packet) or self._outbox.find(packet)
        if segment is None:
            with self._lock:
                if self._closed:
                    raise InvalidUsageError("a message came after Free: wait for all requests before Free")
                segment = self._opened.get(packet)
                if segment is None:
                    try:
                        segment = self.device.open(((MemoryHandle.unpack(packet), None),))
                    except HandleError as error:
                        raise HandleError(f"a message of rank {source}: {error}", ranks=[source]) from error
                    self._opened[packet] = segment
        if nbytes > segment.nbytes:
            raise HandleError(
                f"a message of rank {source} lies up to byte {nbytes} of a block of {segment.nbytes} bytes",
                ranks=[source],
            )
        return segment.pointer
