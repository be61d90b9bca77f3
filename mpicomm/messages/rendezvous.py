"""The rendezvous of messages: copies into the sender's outbox and out of it, in the order of streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import MessageStep, Segment
from mpicomm.devices.handle import MemoryHandle
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.kernels.message import BLOCK_NBYTES, blocks_of_message
from mpicomm.messages import description
from mpicomm.messages.description import (
    DESCRIPTION_NBYTES,
    Description,
    is_for_kernels,
    unpack_one,
)
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.in_flight import DONE, LINE_NBYTES, Place
from mpicomm.messages.outbox import Outbox
from mpicomm.messages.plain_array import PlainArray
from mpicomm.mpi.derived import Elements
from mpicomm.mpi.packing import table_for

_byte = MPI.BYTE

_MOST_REPEATED = 4096
"""As many places of peers have a step that is ready to be enqueued again."""


def _receiving_blocks(nbytes: int) -> int:
    # The cut of the sender; the usual short message needs no call.
    return 1 if nbytes < BLOCK_NBYTES else blocks_of_message(nbytes)


class Rendezvous:
    """The outbox of this rank, and the blocks of peers' outboxes that this rank has opened.

    All methods are local, from any thread. Ranks set nothing up with each other: a description holds the handle of the
    block in which its message lies; the receiver opens the block and keeps it open. A wait on the device that ran out
    of time is raised by the device's `check`.

    The outbox has at most ``most_nbytes``. Without a ``secret`` no message is described, and `description` finds none.
    """

    def __init__(self, device: MessageDevice, rank: int, secret: bytes | None, most_nbytes: int | None = None) -> None:
        self.device = device
        self._rank = rank
        self._secret = secret
        self._step = device.message_step()
        self._outbox = Outbox(device, most_nbytes)
        self._lock = threading.Lock()  # so that two threads do not open one block twice
        self._opened: dict[bytes, Segment] = {}
        self._repeated: dict[int, MessageStep | None] = {}  # by the address of the place; None after the first message
        self._closed = False

    @property
    def describes(self) -> bool:
        """Whether descriptions can arrive."""
        return self._secret is not None

    def exceeds(self, nbytes: int) -> bool:
        """Return whether a description can arrive that exceeds a receive buffer of ``nbytes`` bytes."""
        return self.describes and nbytes < DESCRIPTION_NBYTES

    def description(self, pointer: int) -> Description | None:
        """Return the description that MPI has received to ``pointer``, None for data of the length of one."""
        if self._secret is None:
            return None
        return Description.unpack(ctypes.string_at(pointer, DESCRIPTION_NBYTES), self._secret)

    def send(self, pointer: int, nbytes: int, stream: int) -> tuple[Description, bytes]:
        """Enqueue the copy of a message into the outbox; return its description, also packed for MPI.

        Raises `OutboxFullError` or `HandleError` where the outbox has no room.
        """
        assert self._secret is not None
        by_kernel = is_for_kernels(nbytes)
        described = self._outbox.reserve(nbytes)
        ready, sent = self._line(described, self._rank), 0
        for extent, start, piece in described.pieces():
            target = self._block(extent.packet, extent.nbytes, self._rank) + extent.offset + start
            if by_kernel:
                self._step(stream, described.blocks, target, pointer, nbytes, ready, 0, 0, 1, 0, 0)
                break
            self.device.copy(target, pointer + sent, piece, stream)
            # After each piece, so that the receiver copies it while the next piece goes into the outbox. Pairs with the
            # step that waits in `receive`, which keeps the receiver from copying memory that is not written yet.
            self._step(stream, 1, 0, 0, 0, ready, 0, 0, 1, 0, 0)
            sent += piece
        return described, described.pack(self._secret)

    def take_place(self, nbytes: int) -> Place | None:
        """Give a message for kernels an idle place; return None, and do nothing, for others."""
        if self._secret is None or not 0 < nbytes <= description.KERNEL_NBYTES:
            return None
        return self._outbox.take_idle(nbytes, self._secret)

    def fill(self, place: Place, pointer: int, nbytes: int, stream: int) -> None:
        """Enqueue the copy of a message into its place."""
        step = place.step
        if step is None:
            step = place.step = self.device.message_step(repeated=True)
        step(stream, place.blocks, place.pointer, pointer, nbytes, place.ready, 0, 0, 1, 0, 0)

    def put_back(self, place: Place) -> None:
        """Release the place of a message that is not filled, and that this rank does not send."""
        self._outbox.put_back(place)

    def give_back(self, place: Place, stream: int) -> None:
        """Release the place of a message that this rank does not send, but has filled in the same stream."""
        self._step(stream, place.blocks, 0, 0, 0, 0, place.ready + DONE, 0, 0, 1, 0)

    def pack(self, elements: Elements, stream: int) -> tuple[Description, bytes]:
        """As `send`, for elements of a derived datatype, which a kernel packs."""
        assert self._secret is not None
        layout = elements.layout
        described = self._outbox.reserve(layout.nbytes, whole=True)
        place = self._whole(described, self._rank)
        self.device.pack(table_for(layout), elements.address, place, stream, unpacks=False)
        ready = self._line(described, self._rank)
        self._step(stream, 1, 0, 0, 0, ready, 0, 0, described.counts, 0, 0)
        return described, described.pack(self._secret)

    def receive(self, described: Description, pointer: int, source: int, stream: int) -> None:
        """Enqueue the copy of a message of rank ``source`` to device memory, and the release of its place."""
        if not is_for_kernels(described.nbytes):
            self.pull(described, pointer, source, stream)
            return
        ready, place, nbytes = self._line(described, source), self._whole(described, source), described.nbytes
        # `taken` pairs with the sender's read of the counts in Outbox, after which the sender reuses the place.
        self._step(stream, _receiving_blocks(nbytes), pointer, place, nbytes, ready, ready + DONE, 1, 0, 1, source)

    def receive_again(self, message: Any, received: PlainArray, status: MPI.Status) -> bool:
        """As `receive`, for a packed description of a message for one kernel, in blocks that are open.

        Return whether it is one, and let ``status`` tell its length; do nothing for all other messages.
        """
        secret, nbytes, line, extents, words, packet, offset, _ = unpack_one(message)
        pointer, capacity, stream = received
        if secret != self._secret or extents != 1 or nbytes > capacity or nbytes > description.KERNEL_NBYTES:
            return False
        counts, block = self._opened.get(words), self._opened.get(packet)
        if counts is None or block is None or offset + nbytes > block.nbytes or line > DONE - LINE_NBYTES:
            return False
        place, ready = block.pointer + offset, counts.pointer + line
        step = self._repeated.get(place) or self._next_step(place)
        step(stream, _receiving_blocks(nbytes), pointer, place, nbytes, ready, ready + DONE, 1, 0, 1, status.source)
        status.Set_elements(_byte, nbytes)
        return True

    def pull(self, described: Description, pointer: int, source: int, stream: int) -> None:
        """As `receive`, by copy engines, which also reach memory of the host."""
        ready, awaits, copied = self._line(described, source), 0, 0
        # All blocks are opened before the first wait is enqueued, because opening one may wait for the device.
        parts = [
            (self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset + start, nbytes)
            for extent, start, nbytes in described.pieces()
        ]
        for part, nbytes in parts:
            awaits += 1
            self._step(stream, described.blocks, 0, 0, 0, ready, ready + DONE, awaits, 0, 0, source)
            self.device.copy(pointer + copied, part, nbytes, stream)
            copied += nbytes
        # As in `receive`: the count must not be seen before the copies are over.
        self._step(stream, 1, 0, 0, 0, 0, ready + DONE, 0, 0, awaits, source)

    def unpack(self, described: Description, elements: Elements, source: int, stream: int) -> None:
        """As `receive`, for a message in one extent that fills ``elements``, to which a kernel unpacks it."""
        ready, place, counts = self._line(described, source), self._whole(described, source), described.counts
        self._step(stream, described.blocks, 0, 0, 0, ready, ready + DONE, counts, 0, 0, source)
        self.device.pack(table_for(elements.layout), elements.address, place, stream, unpacks=True)
        # As in `receive`: the count must not be seen before the kernel has read the message.
        self._step(stream, 1, 0, 0, 0, 0, ready + DONE, 0, 0, counts, source)

    def unpack_part(self, nbytes: int, fill: Callable[[int], None], elements: Elements, stream: int) -> None:
        """Unpack a message of ``nbytes`` bytes, which may be shorter than ``elements``, through this rank's outbox.

        ``fill`` enqueues the copy of the message to an address. Raises as `send` does.
        """
        layout = elements.layout
        described = self._outbox.reserve(layout.nbytes, whole=True)
        place, ready, counts = self._whole(described, self._rank), self._line(described, self._rank), described.counts
        try:
            if nbytes < layout.nbytes:  # the other elements keep their values, because a kernel unpacks all
                self.device.pack(table_for(layout), elements.address, place, stream, unpacks=False)
            fill(place)
            self.device.pack(table_for(layout), elements.address, place, stream, unpacks=True)
        finally:
            # The place is this rank's own, so that this rank counts for sender and receiver: after all use of the place
            # in the same stream. Pairs with the read of the counts in Outbox; without it the place would be lost.
            self._step(stream, 1, 0, 0, 0, ready, ready + DONE, 0, counts, counts, self._rank)

    def drop(self, described: Description, source: int, stream: int) -> None:
        """Release the place of a message that no rank copies, after all of it is in the outbox.

        Before that the sender's stream may still write there, and another stream, which does not wait for that one, may
        write the next message to the same place.
        """
        ready, counts = self._line(described, source), described.counts
        self._step(stream, described.blocks, 0, 0, 0, ready, ready + DONE, counts, 0, counts, source)

    def withdraw(self, described: Description, stream: int) -> None:
        """Release the place of a message that this rank does not send after all."""
        self.drop(described, self._rank, stream)

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages of this rank."""
        return self._outbox.is_drained()

    def memory_use(self) -> MemoryUse:
        """Return the memory of the outbox."""
        return self._outbox.memory_use()

    def close_peers(self) -> None:
        """Unmap the peers' blocks; their copies must be over. A second call does nothing."""
        with self._lock:
            self._closed = True
            while self._opened:
                self._opened.popitem()[1].close()

    def close_own(self) -> None:
        """Free the outbox, after every peer's `close_peers`. A second call does nothing."""
        self._outbox.close()

    def _next_step(self, place: int) -> MessageStep:
        """Return the function that takes a message from ``place``: one for repeated steps from the second time on."""
        if place not in self._repeated:
            if len(self._repeated) == _MOST_REPEATED:
                self._repeated.clear()
            self._repeated[place] = None
            return self._step
        step = self._repeated[place] = self.device.message_step(repeated=True)
        return step

    def _line(self, described: Description, source: int) -> int:
        return self._block(described.words, DONE + described.line + LINE_NBYTES, source) + described.line

    def _whole(self, described: Description, source: int) -> int:
        """Return the address of a message that lies in one extent."""
        (extent,) = described.extents
        return self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset

    def _block(self, packet: bytes, nbytes: int, source: int) -> int:
        """Return the address of a block, at least ``nbytes`` long. Raises `HandleError` where that cannot be had."""
        segment = self._outbox.find(packet)  # a process cannot open a handle that it has exported
        if segment is None:
            with self._lock:
                if self._closed:
                    raise InvalidUsageError("a message came after Free: wait for all requests before Free")
                segment = self._opened.get(packet)
                if segment is None:
                    try:
                        segment = self.device.open(MemoryHandle.unpack(packet), None)
                    except HandleError as error:
                        raise HandleError(f"a message of rank {source}: {error}", ranks=[source]) from error
                    self._opened[packet] = segment
        if nbytes > segment.nbytes:
            raise HandleError(
                f"a message of rank {source} lies up to byte {nbytes} of a block of {segment.nbytes} bytes",
                ranks=[source],
            )
        return segment.pointer
