"""The sends of one communicator on GPUs. For a device array MPI gets a rendezvous header, or a copy in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import HandleError
from mpicomm.log import log_once, logger, tell_slow_way
from mpicomm.messages.endpoint import Endpoint, refused_capture
from mpicomm.messages.in_flight import OutboxSlot
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.rendezvous import MessageMemory
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.host_calls import HostCopies, announce

Send = Callable[..., Any]
"""One of MPI's methods for sends, with a communicator, a buffer, a destination and a tag."""

_BUFFERED = frozenset((MPI.Intracomm.Bsend, MPI.Intracomm.Ibsend))
_NOTHING = np.empty(0, np.uint8)


@dataclass(slots=True)
class SendBuffer:
    """The buffer that MPI sends. ``owner`` keeps its memory alive until the send is complete."""

    spec: Any
    owner: Any = None
    withdraw: Callable[[], None] | None = None
    """Gives back the slot of a message if MPI has not sent its header."""

    def hand_over(self, send: Callable[..., Any], comm: MPI.Intracomm, dest: int, tag: int) -> Any:
        """Let MPI send it, and return MPI's result. If MPI refuses it, the message leaves the outbox."""
        try:
            return send(comm, self.spec, dest, tag)
        except BaseException:
            if self.withdraw is not None:
                self.withdraw()
            raise


class Outgoing:
    """The sends of communicator ``comm``. ``near`` are the ranks that share memory with this rank. Local.

    ``refused`` is the kind of handles if messages cannot have headers, else empty.
    """

    def __init__(self, comm: MPI.Intracomm, near: Collection[int], memory: MessageMemory, refused: str) -> None:
        self._comm = comm
        self._near = near
        self._memory = memory
        self._refused = refused

    def send(self, send: Send, sent: Endpoint, dest: int, tag: int) -> None:
        """Send a device array as ``send`` does. Later work of the stream may overwrite the array."""
        if sent.captured:
            raise refused_capture(sent)
        place, device, stream = self._place(send, sent, dest), sent.device, sent.stream
        if place is None:
            self._eager(sent, dest, stream).hand_over(send, self._comm, dest, tag)
            return
        assert device is not None and stream is not None
        rendezvous = self._memory.made or self._memory.rendezvous(device)
        # The copy is enqueued after MPI's call, so that the receiver works at the same time: its kernel waits for this
        # copy. Until then this thread defers the copy, because no work of another thread may come before it.
        threads = device.threads(stream)
        threads.defer(rendezvous.fill, place, sent, stream)
        try:
            send(self._comm, place.message, dest, tag)
        except Exception:  # MPI has refused the message
            if threads.cancel():
                rendezvous.outbox.put_back(place)
            else:
                rendezvous.withdraw(place, stream)
            raise
        except BaseException:
            threads.flush()  # a Ctrl-C may come after MPI has sent the message
            raise
        threads.flush()
        if sent.blocks:
            wait_for_copies(sent)

    def buffer(self, send: Send, sent: Endpoint, dest: int, stream: int | None) -> SendBuffer:
        """Copy a device array, on ``stream``, to memory that MPI or the receiver finds. Leave host memory to MPI."""
        place = self._place(send, sent, dest)
        if place is None or sent.device is None or stream is None:
            return self._eager(sent, dest, stream)
        rendezvous = self._memory.made or self._memory.rendezvous(sent.device)
        rendezvous.fill(place, sent, stream)
        return SendBuffer(place.message, sent, partial(rendezvous.withdraw, place, stream))

    def _place(self, send: Send, sent: Endpoint, dest: int) -> OutboxSlot | None:
        """Return a slot in the outbox for a message, or None if MPI carries the data or the outbox has no room."""
        nbytes, device = sent.nbytes, sent.device
        if not nbytes or dest < 0 or device is None or sent.stream is None:
            return None
        if dest not in self._near:
            announce("Send", "the ranks are on several nodes")
            return None
        if self._refused:
            reason = f"memory is opened as {self._refused!r}, not by IPC handles"
        elif nbytes < HEADER_NBYTES and send in _BUFFERED:
            return None  # the user's buffer of a buffered send has room for the data, but perhaps not for a header
        else:
            try:
                rendezvous = self._memory.made or self._memory.rendezvous(device)
                if not sent.is_flat:
                    rendezvous.load(sent.elements)
                return rendezvous.reserve(nbytes)
            except (OutboxFullError, HandleError) as error:
                reason = str(error)
        tell_slow_way(f"through pinned host memory and MPI: {reason}")
        text = f"messages of GPU arrays go through pinned host memory and MPI, which is slower: {reason}"
        log_once(logger.warning, text)
        return None

    def _eager(self, sent: Endpoint, dest: int, stream: int | None) -> SendBuffer:
        """Return the host memory from which MPI sends a message. For a device array it is a copy. Blocking."""
        device = sent.device
        if stream is None or device is None:
            return SendBuffer(sent.spec)
        if dest < 0:  # MPI.PROC_NULL, or no rank, for which MPI raises
            return SendBuffer([_NOTHING, 0, MPI.BYTE])
        if sent.is_flat:
            host = device.pinned(sent.nbytes)
            device.copy(host.ctypes.data, sent.pointer, sent.nbytes, stream)
            device.synchronize(stream)
            return SendBuffer([host, sent.nbytes, MPI.PACKED])  # packed: MPI lacks a type for some elements
        copies = HostCopies(device, stream)
        spec = copies.spec(sent.spec, writable=False, name="buf", operand=sent.operand)
        copies.ready()
        return SendBuffer(spec, copies)


def wait_for_copies(*endpoints: Endpoint) -> None:
    """Wait for the copies of a blocking call if later work of its caller may be on any stream."""
    for endpoint in endpoints:
        if endpoint.blocks and endpoint.device is not None and endpoint.stream is not None:
            endpoint.device.complete(endpoint.stream)
