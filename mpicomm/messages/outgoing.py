"""The sends of one communicator on GPUs. For a device array MPI gets a rendezvous header, or a copy in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.devices.cuda.stream_threads import SideStream
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError
from mpicomm.log import log_once, logger, report_slow_path
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint, capture_error
from mpicomm.messages.in_flight import OutboxSlot
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.reader import read_plain
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.host_calls import log_host_staging
from mpicomm.mpi.requests import DeferredRequest, ProgressThread

Send = Callable[..., Any]
"""One of MPI's methods for sends, with a communicator, a buffer, a destination and a tag."""

_BUFFERED = frozenset((MPI.Intracomm.Bsend, MPI.Intracomm.Ibsend))
_isend = MPI.Intracomm.Isend
_EMPTY = np.empty(0, np.uint8)


@dataclass(slots=True)
class SendBuffer:
    """The host buffer that MPI sends."""

    spec: Any
    withdraw: Callable[[], None] | None = None
    """Releases the slot of a message whose header MPI has not sent."""

    def post(self, send: Callable[..., Any], comm: MPI.Intracomm, dest: int, tag: int) -> Any:
        """Let MPI send it, and return MPI's result. If MPI refuses it, the slot is released."""
        try:
            return send(comm, self.spec, dest, tag)
        except BaseException:
            if self.withdraw is not None:
                self.withdraw()
            raise


class Outgoing:
    """The sends of communicator ``comm``. ``node_ranks`` can open this rank's memory. Local."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        node_ranks: Collection[int],
        handle: str,
        rendezvous: Rendezvous,
        progress: ProgressThread,
    ) -> None:
        self._comm = comm
        self._node_ranks = node_ranks
        self._handle = handle
        self._rendezvous = rendezvous
        self._progress_thread = progress
        # Sends whose header has left need no frequent polls. Each poll keeps the interpreter's lock from a thread that
        # waits for a receive.
        self._local_progress = ProgressThread(self_driven=True)

    def send(self, send: Send, sent: Endpoint, dest: int, tag: int) -> None:
        """Send a device array as ``send`` does. Later work of the stream may overwrite the array."""
        if sent.captured:
            raise capture_error(sent)
        slot, device, stream = self._reserve(send, sent, dest), sent.device, sent.stream
        if slot is None:
            self._stage_eager(sent, dest, stream).post(send, self._comm, dest, tag)
            return
        assert device is not None and stream is not None
        rendezvous = self._rendezvous
        # The copy is enqueued after MPI's call, so that the receiver works at the same time: its kernel waits for this
        # copy. Until then this thread defers the copy, because no work of another thread may come before it.
        threads = device.threads(stream)
        threads.defer(rendezvous.fill, slot, sent, stream)
        try:
            send(self._comm, slot.header, dest, tag)
        except BaseException as error:
            threads.flush()  # a Ctrl-C may come after MPI has sent the message
            if isinstance(error, Exception):  # MPI has refused it
                rendezvous.withdraw(slot, stream)
            raise
        threads.flush()
        if sent.completes:
            wait_for_copies(sent)

    def start_send(self, send: Send, sent: Endpoint, dest: int, tag: int) -> DeferredRequest:
        """Start to send a device array as ``send`` does. The request is complete when the array may be overwritten."""
        device, stream = sent.device, sent.stream
        assert device is not None and stream is not None
        if sent.captured:
            raise capture_error(sent)
        # Later work of the user's stream does not wait for the copies of a message in several pieces, which takes long
        # enough to be worth a side stream.
        streams, overlaps = device.side_streams, sent.is_flat and sent.nbytes > rendezvous_header.LEAST_PIECE_NBYTES
        with SideStream(streams, streams.mark(stream)) if overlaps else contextlib.nullcontext(stream) as copies:
            buffer = self.stage(send, sent, dest, copies)
            return self._sending(buffer.post(send, self._comm, dest, tag), device, copies, (sent, buffer))

    def start_send_device_array(self, buf: Any, dest: int, tag: int, stream: Any) -> DeferredRequest | None:
        """As `read` and `start_send` of a plain device array that kernels copy. Return None for other calls.

        This is straight-line code, as `Messages.exchange_device_arrays` is.
        """
        rendezvous = self._rendezvous
        if not rendezvous.has_begun or not rendezvous.expects_headers or dest not in self._node_ranks:
            return None
        sent = read_plain(rendezvous, "Isend", buf, stream)
        if sent is None or sent.stream is None or sent.nbytes > rendezvous_header.KERNEL_NBYTES:
            return None
        resolved, nbytes = sent.stream, sent.nbytes
        try:
            slot = rendezvous.reserve(nbytes)
        except (OutboxFullError, HandleError):
            return None
        (slot.copy_in or rendezvous.copy_into(slot))(resolved, sent.pointer, nbytes)
        try:
            request = _isend(self._comm, slot.header, dest, tag)
        except BaseException:
            rendezvous.withdraw(slot, resolved)
            raise
        return self._sending(request, rendezvous.device, resolved, (sent, slot))

    def _sending(self, request: MPI.Request, device: GpuBackend, copies: int, kept: Any) -> DeferredRequest:
        """Return the request of a send that MPI has begun, and whose copy is enqueued on the stream ``copies``."""
        # Most headers leave at once. A later call of MPI may take long, because a thread that waits in MPI keeps other
        # threads out.
        left, copied = request.Test(), device.completion(copies)

        def done() -> bool:
            nonlocal left
            left = left or request.Test()
            return left and copied()

        work = DeferredRequest.of(copied if left else done, device.check)
        work.kept = kept  # MPI and the device still read its memory
        return (self._local_progress if left else self._progress_thread).add(work, device.prepare_thread)

    def stage(self, send: Send, sent: Endpoint, dest: int, stream: int | None) -> SendBuffer:
        """Copy a device array, on ``stream``, into the outbox or into host memory. Host memory stays where it is."""
        slot = self._reserve(send, sent, dest)
        if slot is None or sent.device is None or stream is None:
            return self._stage_eager(sent, dest, stream)
        self._rendezvous.fill(slot, sent, stream)
        return SendBuffer(slot.header, partial(self._rendezvous.withdraw, slot, stream))

    def _reserve(self, send: Send, sent: Endpoint, dest: int) -> OutboxSlot | None:
        """Return a slot in the outbox for a message, or None if MPI carries the data or the outbox has no room."""
        nbytes, device = sent.nbytes, sent.device
        if not nbytes or dest < 0 or device is None or sent.stream is None:
            return None
        if dest not in self._node_ranks:
            log_host_staging("Send", "the ranks are on several nodes")
            return None
        if not self._rendezvous.expects_headers:
            reason = f"memory is opened as {self._handle!r}, not by IPC handles"
        elif nbytes < HEADER_NBYTES and send in _BUFFERED:
            return None  # the user's buffer of a buffered send has room for the data, but perhaps not for a header
        else:
            try:
                rendezvous = self._rendezvous
                if not rendezvous.has_begun:
                    rendezvous.begin(sent.operation)
                if not sent.is_flat:
                    rendezvous.load_packing(sent.elements)
                return rendezvous.reserve(nbytes)
            except (OutboxFullError, HandleError) as error:
                reason = str(error)
        report_slow_path(f"through pinned host memory and MPI: {reason}")
        text = f"messages of GPU arrays go through pinned host memory and MPI, which is slower: {reason}"
        log_once(logger.warning, text)
        return None

    def _stage_eager(self, sent: Endpoint, dest: int, stream: int | None) -> SendBuffer:
        """Return the host memory from which MPI sends a message. For a device array it is a copy. Blocking."""
        device, nbytes, rendezvous = sent.device, sent.nbytes, self._rendezvous
        if stream is None or device is None:
            return SendBuffer(sent.spec)
        if dest < 0 or not nbytes:  # MPI.PROC_NULL, or no rank, for which MPI raises
            return SendBuffer([_EMPTY, 0, MPI.PACKED])
        host = device.pinned(nbytes)
        if sent.is_flat:
            device.copy(host.ctypes.data, sent.pointer, nbytes, stream)
            device.synchronize(stream)
        else:
            if not rendezvous.has_begun:
                rendezvous.begin(sent.operation)
            rendezvous.load_packing(sent.elements)
            rendezvous.pack_to_host(sent.elements, host.ctypes.data, stream)
        return SendBuffer([host, nbytes, MPI.PACKED])  # packed: MPI lacks a type for some elements


def wait_for_copies(*endpoints: Endpoint) -> None:
    """Wait for the copies of a blocking call if later work of its caller may be on any stream."""
    for endpoint in endpoints:
        if endpoint.completes and endpoint.device is not None and endpoint.stream is not None:
            endpoint.device.complete(endpoint.stream)
