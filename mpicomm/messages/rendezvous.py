"""The rendezvous of messages: copies into the sender's outbox and out of it, in the order of streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpicomm.cluster.process import release_before_finalize
from mpicomm.collectives.packed import table_of_element
from mpicomm.devices.base import GrowingScratch, MessageCopy
from mpicomm.devices.cuda.types import GpuBackend, Segment
from mpicomm.devices.handle import MemoryHandle, MemoryUse
from mpicomm.errors import HandleError, InvalidUsageError, MpicommError
from mpicomm.kernels.message import blocks_of_message
from mpicomm.log import logger
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.in_flight import DONE, LINE_NBYTES, OutboxSlot
from mpicomm.messages.outbox import Outbox
from mpicomm.messages.rendezvous_header import (
    HEADER_NBYTES,
    PREFIX,
    RendezvousHeader,
    piece_count,
    pieces,
    require_fits,
)
from mpicomm.mpi.layout import Elements
from mpicomm.waiting import wait_until

if TYPE_CHECKING:
    from mpicomm.devices.cuda.launches import MessageSteps

_CACHE_SIZE = 4096
"""The largest number of cached slots of peers, and of counted or captured launches."""
_CAPTURE_AT = 4
"""A message of a datatype that repeats so often gets a graph. To make one takes about as long as ten messages save."""


@dataclass(frozen=True, slots=True)
class PeerSlot:
    """A slot in the outbox of rank ``source``, as this rank reaches it: where it lies, and its words."""

    pointer: int
    capacity: int
    ready: int
    done: int
    source: int
    copy_out: MessageCopy
    """The kernel launch that copies messages out of the slot, and releases it."""


class Rendezvous:
    """The outbox of this rank, and the blocks of peers' outboxes that this rank has opened: a `Shared`.

    All methods are local, from any thread. No collective call precedes a message. A header holds the handle of the
    block with its message, and the receiver opens the block and keeps it open. If a wait on the device runs out of
    time, the device's `check` raises the error.

    The outbox has at most ``most_nbytes``. Without a ``secret`` no message has a header. ``gpu`` returns the device of
    the communicator. There is no reference to the communicator itself. A symmetric array refers to its domain, and the
    domain to this object. So the reference would keep the communicator alive as long as any of its arrays.
    """

    device: GpuBackend
    outbox: Outbox
    reserve: Callable[[int], OutboxSlot]
    _steps: MessageSteps

    def __init__(
        self, gpu: Callable[[str], GpuBackend], timeout_s: float, secret: bytes | None, most_nbytes: int | None
    ) -> None:
        self._gpu = gpu
        self._timeout_s = timeout_s
        self._secret = secret or b""
        self._most_nbytes = most_nbytes
        self.expects_headers = secret is not None
        """Whether headers can arrive."""
        self.has_begun = False
        """Whether there is an outbox."""
        # Two threads must not open one block twice, or make two outboxes. One would replace the other, which holds
        # messages in flight and is then never closed.
        self._lock = threading.Lock()
        self._opened: dict[bytes, Segment] = {}
        self._peer_slots: dict[bytes, PeerSlot] = {}  # by the keys in their headers
        # The number of times that launches were enqueued, and then their graph.
        self._launches: dict[Hashable, int | Callable[[int], object]] = {}
        self._spare_scratch: list[GrowingScratch] = []
        self._closed = False

    def device_for(self, operation: str) -> GpuBackend:
        """Return the device of the communicator. Raises the error of an earlier call."""
        device = self._gpu(operation)
        device.check()
        return device

    def begin(self, operation: str) -> None:
        """Make the outbox, if a message needs it for the first time. Raises the error of an earlier call."""
        device = self.device_for(operation)
        with self._lock:
            if not self.has_begun:
                self.device, self._steps = device, device.message_steps()
                self.outbox = Outbox(device, self._secret, self._most_nbytes)
                self.reserve = self.outbox.reserve
                # Last, because other threads read it without the lock, and then use what is set above.
                self.has_begun = True
                release_before_finalize(self)

    def resolve_header(self, content: memoryview, status: MPI.Status) -> tuple[PeerSlot, int] | None:
        """Return the slot and the bytes of the message whose header MPI has received into ``content``.

        ``status`` is the status of the receive. Return None for data of the length of a header. Raises `HandleError`
        for a damaged header, or if the slot cannot be opened.
        """
        key, nbytes = PREFIX.unpack_from(content)
        slot = self._peer_slots.get(key)
        if slot is None:
            header = RendezvousHeader.unpack(content[:HEADER_NBYTES].tobytes(), self._secret)
            if header is None:
                return None
            if not self.has_begun:
                self.begin("Recv")
            if len(self._peer_slots) >= _CACHE_SIZE:
                self._peer_slots.clear()
            slot = self._peer_slots[key] = self._open_slot(header, status.source)
        if nbytes > slot.capacity:
            require_fits(nbytes, slot.capacity)
        return slot, nbytes

    def load_packing(self, elements: Elements) -> None:
        """Load what packs and unpacks ``elements``, before MPI gets their send or receive; blocking for new ones.

        Loading may wait for the device, whose kernels may wait for a peer to fill its slot. If a peer, too, loaded only
        after MPI had matched the messages, both would wait for each other.
        """
        self.device.load_packing(table_of_element(elements.layout))
        if not self.expects_headers:  # each message goes through scratch memory
            with self._scratch(elements.layout.nbytes):
                pass

    def fill(self, slot: OutboxSlot, sent: Endpoint, stream: int) -> None:
        """Enqueue the copy of a message into its slot."""
        if not sent.is_flat:
            elements = sent.elements
            self._enqueue_repeatable(stream, (slot.ready, slot.pointer, elements), partial(self._pack, slot, elements))
        elif slot.nbytes <= rendezvous_header.KERNEL_NBYTES:
            self.copy_into(slot)(stream, sent.pointer, slot.nbytes)
        else:
            done = 0
            for target, piece in pieces(slot.pointer, slot.nbytes):
                self.device.copy(target, sent.pointer + done, piece, stream)
                # The announcement follows each piece, so that the receiver copies the piece while the next one goes
                # into the outbox. It pairs with the wait in `pull`, which keeps the receiver from reading memory that
                # is not written yet.
                self._steps.announce(stream, ready=slot.ready, count=1)
                done += piece

    def copy_into(self, slot: OutboxSlot) -> MessageCopy:
        """Return the kernel launch that copies messages into a slot."""
        copy = slot.copy_in
        if copy is None:
            copy = slot.copy_in = self._steps.copy_in(slot.pointer, ready=slot.ready)
        return copy

    def withdraw(self, slot: OutboxSlot, stream: int) -> None:
        """Release the slot of a message that this rank does not send, but has filled in the same stream."""
        self._steps.release(stream, done=slot.done, count=slot.pieces)

    def pull(self, slot: PeerSlot, nbytes: int, pointer: int, stream: int) -> None:
        """Enqueue the copies of a message of ``nbytes`` by copy engines to any memory, and the release of its slot."""
        awaits = copied = 0
        for part, piece in pieces(slot.pointer, nbytes):
            awaits += 1
            self._wait(slot, nbytes, awaits, stream)
            self.device.copy(pointer + copied, part, piece, stream)
            copied += piece
        # Pairs with the sender's read of the counts in Outbox. After it the sender reuses the slot.
        self._steps.release(stream, done=slot.done, count=awaits)

    def unpack(self, slot: PeerSlot, nbytes: int, elements: Elements, stream: int) -> None:
        """As `pull`, for a message that fills ``elements``. A kernel unpacks it."""
        key = slot.ready, slot.pointer, nbytes, elements
        self._enqueue_repeatable(stream, key, partial(self._unpack, slot, nbytes, elements))

    def _pack(self, slot: OutboxSlot, elements: Elements, stream: int) -> None:
        self.device.pack(table_of_element(elements.layout), elements.address, slot.pointer, stream, unpacks=False)
        # It follows the kernel in the stream and pairs with the wait in `_unpack` and `pull`, as in `fill`.
        self._steps.announce(stream, ready=slot.ready, count=slot.pieces)

    def _unpack(self, slot: PeerSlot, nbytes: int, elements: Elements, stream: int) -> None:
        count = piece_count(nbytes)
        self._wait(slot, nbytes, count, stream)
        self.device.pack(table_of_element(elements.layout), elements.address, slot.pointer, stream, unpacks=True)
        # As in `pull`, the sender must not see the count before the kernel has read the message.
        self._steps.release(stream, done=slot.done, count=count)

    def _enqueue_repeatable(self, stream: int, key: Hashable, enqueue: Callable[[int], object]) -> None:
        """Enqueue the launches of a message, which are the same for each message with this key.

        The launches of messages that repeat are one graph, which takes as long to enqueue as one of them.
        """
        graph = self._launches.get(key, 0)
        if not isinstance(graph, int):
            graph(stream)
            return
        enqueue(stream)
        times = graph + 1
        if times == 1 and len(self._launches) >= _CACHE_SIZE:
            self._launches.clear()
        self._launches[key] = times if times < _CAPTURE_AT else self.device.graph_of(enqueue)

    def unpack_partial(self, nbytes: int, fill: Callable[[int, int], None], elements: Elements, stream: int) -> None:
        """Unpack ``nbytes`` bytes, which may be fewer than ``elements`` have, through scratch memory. Blocking.

        ``fill`` enqueues the copy of the message to an address.
        """
        table, address = table_of_element(elements.layout), elements.address
        with self._scratch(elements.layout.nbytes) as packed:
            if nbytes < elements.layout.nbytes:  # the kernel unpacks all elements: those without data keep their values
                self.device.pack(table, address, packed, stream, unpacks=False)
            fill(packed, stream)
            self.device.pack(table, address, packed, stream, unpacks=True)
            self.device.synchronize(stream)

    def pack_to_host(self, elements: Elements, host: int, stream: int) -> None:
        """Pack elements into host memory at an address. Blocking."""
        nbytes = elements.layout.nbytes
        with self._scratch(nbytes) as packed:
            self.device.pack(table_of_element(elements.layout), elements.address, packed, stream, unpacks=False)
            self.device.copy(host, packed, nbytes, stream)
            self.device.synchronize(stream)

    @contextlib.contextmanager
    def _scratch(self, nbytes: int) -> Iterator[int]:
        """Give the address of device memory in a ``with`` block, at whose end no work uses it any more."""
        try:
            scratch = self._spare_scratch.pop()
        except IndexError:
            scratch = GrowingScratch(self.device)
        yield scratch.of(nbytes)
        self._spare_scratch.append(scratch)  # not after an exception, when work may still use it

    def discard(self, slot: PeerSlot, nbytes: int, stream: int) -> None:
        """Release the slot of a message that no rank copies, after the whole message is in the outbox.

        Before that the sender's stream may still write there. Another stream, which does not wait for it, may write the
        next message to the same slot.
        """
        count = piece_count(nbytes)
        self._wait(slot, nbytes, count, stream)
        self._steps.release(stream, done=slot.done, count=count)

    def _wait(self, slot: PeerSlot, nbytes: int, count: int, stream: int) -> None:
        blocks = blocks_of_message(nbytes) if nbytes <= rendezvous_header.KERNEL_NBYTES else 1
        self._steps.wait(stream, ready=slot.ready, done=slot.done, count=count, blocks=blocks, peer=slot.source)

    def _open_slot(self, header: RendezvousHeader, source: int) -> PeerSlot:
        """Open the blocks of a slot, before the receiver enqueues a wait: opening one may wait for the device."""
        ready = self._open_block(header.words, DONE + header.line + LINE_NBYTES, source) + header.line
        pointer = self._open_block(header.block, header.offset + header.capacity, source) + header.offset
        done = ready + DONE
        # The copy releases the slot. It pairs with the sender's read of the counts in Outbox, as in `pull`.
        copy_out = self._steps.copy_out(pointer, ready=ready, done=done, peer=source)
        return PeerSlot(pointer, header.capacity, ready, done, source, copy_out)

    def _open_block(self, packet: bytes, nbytes: int, source: int) -> int:
        """Return the address of a block of at least ``nbytes`` bytes.

        Raises `HandleError` if it cannot be opened or is shorter.
        """
        # A process cannot open a handle that it has exported.
        segment = self._opened.get(packet) or self.outbox.find(packet)
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

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of the outbox. Blocks of peers that this rank has opened count as the peers' memory."""
        return (self.outbox.memory_use(),) if self.has_begun else ()

    def close_peers(self) -> None:
        """Unmap the peers' blocks. Copies out of them must be over. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._peer_slots.clear()
            self._launches.clear()
            while self._opened:
                self._opened.popitem()[1].close()

    def close_own(self) -> None:
        """Free this rank's outbox, after every peer's `close_peers`. A second call does nothing."""
        if self.has_begun:
            self.has_begun = False
            self.outbox.close()

    def reset(self) -> None:
        """Free the outbox, which the next call that needs it makes again. No peer may have opened it."""
        self.close_peers()
        self.close_own()
        self._closed = False

    def release(self) -> None:
        """Wait until the receivers have copied all messages, and unmap the peers' outboxes, before MPI_Finalize.

        MPI_Finalize also lets earlier messages arrive. The process may end after it, and its outbox ends with the
        process.
        """
        if not self.has_begun:
            return
        with contextlib.suppress(MpicommError):  # after an error no message is sure to arrive
            self.device.synchronize()  # this rank's copies out of outboxes, because their senders wait for them
            self.device.check()
            # The wait calls MPI, because MPI may not have sent a header yet.
            if not wait_until(self.outbox.is_drained, self._timeout_s, MPI.Intracomm(MPI.COMM_SELF).Iprobe):
                logger.warning("messages of GPU arrays were not received within %g s of the end", self._timeout_s)
            self.close_peers()
