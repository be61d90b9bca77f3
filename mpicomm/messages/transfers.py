"""Transfers: the way of a message's bytes, through the sender's outbox and across the link, in stream order."""

from __future__ import annotations

import threading

from mpicomm.devices.base import Segment
from mpicomm.devices.handle import MemoryHandle
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.messages.description import Description
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.outbox import DONE, Outbox


class Transfers:
    """The outbox of this rank, and those of its peers as mapped here. All methods are local, from any thread.

    Nothing is set up with the peers: a description holds the handle of the block its message lies in, which its
    receiver opens, and keeps open. What a wait on the device could not get, the device's `check` raises.
    """

    def __init__(self, device: MessageDevice, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._outbox = Outbox(device)
        self._lock = threading.Lock()  # two threads must not open one block twice
        self._opened: dict[bytes, Segment] = {}
        self._closed = False

    def send(self, pointer: int, nbytes: int, stream: int) -> Description:
        """Enqueue the copy of a message into the outbox; raises as `Outbox.reserve`."""
        described = self._outbox.reserve(nbytes)
        ready = self._line(described, self._rank)
        count, done = described.first, 0
        for extent, start, piece in described.pieces():
            segment = self._outbox.find(extent.packet)
            assert segment is not None
            self._device.copy(segment.pointer + extent.offset + start, pointer + done, piece, stream)
            done += piece
            count += 1
            # After each piece: the receiver copies one while the next is on its way here.
            self._device.publish(ready, count, stream)
        return described

    def receive(self, described: Description, pointer: int, source: int, stream: int) -> None:
        """Enqueue the copy of a message of rank ``source`` to ``pointer``, and give its place back."""
        count, done = described.first, 0
        ready = self._line(described, source)
        # All before the first wait is enqueued: to open a block may wait for the device.
        parts = [
            (self._block(extent.packet, extent.offset + extent.nbytes, source) + extent.offset + start, nbytes)
            for extent, start, nbytes in described.pieces()
        ]
        for part, nbytes in parts:
            count += 1
            self._device.await_count(ready, count, described.number, source, stream)
            self._device.copy(pointer + done, part, nbytes, stream)
            done += nbytes
        self._device.publish(ready + DONE, count, stream)

    def drop(self, described: Description, source: int, stream: int) -> None:
        """Give the place of a message back that nobody copies, once all of it has come.

        Not before: the next message there may be copied in by another stream, which does not wait for this one's.
        """
        ready = self._line(described, source)
        self._device.await_count(ready, described.last, described.number, source, stream)
        self._device.publish(ready + DONE, described.last, stream)

    def is_taken(self) -> bool:
        """Return whether all messages that were sent have been copied by their receivers."""
        return self._outbox.is_taken()

    def close_peers(self) -> None:
        """Unmap the peers' blocks; their work must be over. A second call does nothing."""
        with self._lock:
            self._closed = True
            while self._opened:
                self._opened.popitem()[1].close()

    def close_own(self) -> None:
        """Free the outbox, after every peer's `close_peers`. A second call does nothing."""
        self._outbox.close()

    def _line(self, described: Description, source: int) -> int:
        return self._block(described.words, described.line + 2 * DONE, source) + described.line

    def _block(self, packet: bytes, nbytes: int, source: int) -> int:
        """Return where a block begins here; raises `HandleError` where it cannot be opened, or has no such bytes."""
        segment = self._outbox.find(packet)  # what one has exported oneself cannot be opened
        if segment is None:
            with self._lock:
                if self._closed:
                    raise InvalidUsageError("a message came after Free: wait for all requests before")
                segment = self._opened.get(packet)
                if segment is None:
                    try:
                        segment = self._device.open(MemoryHandle.unpack(packet), None)
                    except HandleError as error:
                        raise HandleError(f"a message of rank {source}: {error}", ranks=[source]) from error
                    self._opened[packet] = segment
        if nbytes > segment.nbytes:
            raise HandleError(
                f"a message of rank {source} is said to lie up to byte {nbytes} of a block of {segment.nbytes}",
                ranks=[source],
            )
        return segment.pointer
