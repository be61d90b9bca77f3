"""The point-to-point calls of one communicator on GPUs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.stream_threads import SideStream, beside
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.array_receive import ArrayLanding, Exchanged, Side
from mpicomm.messages.endpoint import Endpoint, refused_capture
from mpicomm.messages.matched import Incoming, Posted, UnexpectedQueue
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.outgoing import Outgoing, Send, wait_for_copies
from mpicomm.messages.reader import SPECIFICATIONS, EndpointReader, element_nbytes, host_end
from mpicomm.messages.receive_buffer import PendingReceive, ReceiveBuffer, StagingMemory, receive_buffer
from mpicomm.messages.rendezvous import MessageMemory
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi import host_calls
from mpicomm.mpi.buffers import array_of, is_host_view
from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.mpi.shown import sendrecv

_byte = MPI.BYTE
_address = MPI.Get_address  # a tenth of the time of NumPy's `ctypes`
_iprobe = MPI.Intracomm.Iprobe
_irecv = MPI.Intracomm.Irecv
_isend = MPI.Intracomm.Isend
_LEAST_SPARE_NBYTES, _MOST_SPARE_NBYTES = 64 << 10, 16 << 20


class Messages:
    """The messages of communicator ``comm``. ``gpu`` returns its device. All methods are local.

    A call reads its buffers once, with `read`, and hands the endpoints to the other methods. MPI gets host memory in
    place of each endpoint, matches all messages, and blocks as usual.

    ``by_rendezvous`` is true if the ranks open memory by IPC handles. Then long messages of device arrays have a
    rendezvous header, and receives into host arrays must also look for headers.
    """

    def __init__(self, comm: MPI.Intracomm, placement: Placement, gpu: Callable[[str], GpuBackend]) -> None:
        here = placement.here
        self.on_gpu = isinstance(here.device, int)
        self.by_rendezvous = here.sends_headers
        self._comm = comm
        secret = placement.secret if self.by_rendezvous else None
        self.memory = MessageMemory(here.timeout_s, secret, here.most_outbox_nbytes)
        self._reader = EndpointReader(gpu, self.memory, by_rendezvous=self.by_rendezvous)
        self.read = self._reader.read
        self.unexpected = UnexpectedQueue(self, comm, secret)
        self._near = frozenset(placement.node_ranks)
        self._outgoing = Outgoing(comm, self._near, self.memory, "" if self.by_rendezvous else here.handle)
        self.send = self._outgoing.send
        # The spare staging memory: as many arrays as there were receives at once. The system provides no pages for the
        # parts that no message has filled.
        self._spare: list[StagingMemory] = []
        # Collectives have another completer. A receive into host memory blocks its thread until the sender's device has
        # sent the data. The sender may wait for a collective which this rank begins only after an earlier one is
        # complete.
        self._completer = Completer()
        # The thread that completes sends must not take them for receives, which it would begin to look for more often.
        # Each look keeps the interpreter's lock from a thread that waits for a receive.
        self._sends = Completer(by_itself=True)

    def posted(self, source: int, tag: int) -> Posted:
        """Return the receive of this source and tag."""
        return Posted(self.unexpected, self._comm, source, tag)

    def posted_beside_send(self, source: int, tag: int) -> Posted:
        """As `posted`, for a call that also sends.

        Raises MPI's errors for a bad source or tag before the call sends.
        """
        _iprobe(self._comm, source, tag)
        return self.posted(source, tag)

    def start_send(self, send: Send, sent: Endpoint, dest: int, tag: int) -> DeferredRequest:
        """Start to send a device array as ``send`` does. The request is complete when the array may be overwritten."""
        device, stream = sent.device, sent.stream
        assert device is not None and stream is not None
        if sent.captured:
            raise refused_capture(sent)
        # Later work of the user's stream does not wait for the copies of a message in several pieces, which takes long
        # enough to be worth a side stream.
        streams, aside = device.side_streams, sent.is_flat and sent.nbytes > rendezvous_header.LEAST_PIECE_NBYTES
        with SideStream(streams, streams.mark(stream)) if aside else contextlib.nullcontext(stream) as copies:
            buffer = self._outgoing.buffer(send, sent, dest, copies)
            return self._sending(buffer.hand_over(send, self._comm, dest, tag), device, copies, buffer)

    def start_send_array(self, buf: Any, dest: int, tag: int, stream: Any) -> DeferredRequest | None:
        """As `read` and `start_send` of a plain device array that kernels copy. Return None for other calls.

        This is straight-line code, as `exchange_arrays` is.
        """
        made = self.memory.made
        if made is None or not self.by_rendezvous or dest not in self._near:
            return None
        sent = self._reader.plain("Isend", buf, stream)
        if sent is None or sent.stream is None or sent.nbytes > rendezvous_header.KERNEL_NBYTES:
            return None
        resolved, nbytes = sent.stream, sent.nbytes
        try:
            place = made.reserve(nbytes)
        except (OutboxFullError, HandleError):
            return None
        (place.copy_in or made.copy_into(place))(resolved, sent.pointer, nbytes)
        try:
            request = _isend(self._comm, place.message, dest, tag)
        except BaseException:
            made.withdraw(place, resolved)
            raise
        return self._sending(request, made.device, resolved, (sent, place))

    def _sending(self, request: MPI.Request, device: GpuBackend, copies: int, kept: Any) -> DeferredRequest:
        """Return the request of a send that MPI has, and whose copy is enqueued on the stream ``copies``."""
        # Most headers leave at once. A later call of MPI may take long, because a thread that waits in MPI keeps other
        # threads out.
        left, copied = request.Test(), device.completion(copies)

        def done() -> bool:
            nonlocal left
            left = left or request.Test()
            return left and copied()

        work = DeferredRequest.of(copied if left else done, device.check)
        work.kept = kept  # MPI and the device still read its memory
        return (self._sends if left else self._completer).add(work, device.prepare_thread)

    def receive_array(
        self, operation: str, buf: Any, incoming: Incoming | Exchanged, status: MPI.Status | None, name: str = "buf"
    ) -> None:
        """Receive into a NumPy array, the argument ``name``."""
        status, landing = MPI.Status() if status is None else status, None
        if self.by_rendezvous:
            landing = ArrayLanding(operation, buf, name)
        try:
            incoming.recv_into(buf if landing is None else landing.spec, status)
        except host_calls.REFUSALS:  # MPI has no type for the elements, and has not received yet
            incoming.recv_into(host_calls.as_bytes(buf, True, name), status)
        if landing is not None and not landing.has_data(status):
            self._finish_array(landing, status)

    def exchange_on_host(self, sent: Side, buf: Any, posted: tuple[int, int], status: MPI.Status | None) -> None:
        """Send a NumPy array and receive into another, if no probe has taken a message."""
        self.receive_array("Sendrecv", buf, Exchanged(self._comm, sent, posted), status, "recvbuf")

    def start_receive_array(self, buf: Any, source: int, tag: int) -> DeferredRequest:
        """Start to receive into a NumPy array, if no probe has taken a message. MPI refuses some arrays: `REFUSALS`."""
        landing, device, status = ArrayLanding("Irecv", buf, "buf"), self._reader.device("Irecv"), MPI.Status()
        request = _irecv(self._comm, landing.spec, source, tag)

        def done() -> bool:
            if not request.Test(status):
                return False
            if not status.Is_cancelled() and not landing.has_data(status):
                self._finish_array(landing, status)
            return True

        return self._completer.add(
            DeferredRequest.of(done, lambda: None, status, request.Cancel), device.prepare_thread
        )

    def _finish_array(self, landing: ArrayLanding, status: MPI.Status) -> None:
        """Finish a receive into an array if the message may be a header."""
        buffer = self._receive_buffer(self._reader.parse_receive(landing.operation, landing.array, None, "buf"))
        buffer.saved = landing.saved
        if landing.staging is not None:
            assert buffer.staging is not None
            ctypes.memmove(buffer.staging.pointer, _address(landing.staging), HEADER_NBYTES)
        self._finish(buffer, status)

    def receive(self, received: Endpoint, incoming: Incoming, status: MPI.Status | None) -> None:
        """Receive. A device array has the message in the order of its stream."""
        if received.captured:
            raise refused_capture(received)
        status = MPI.Status() if status is None else status
        buffer = self._receive_buffer(received, spare=True)
        incoming.recv_into(buffer.spec, status)
        self._finish(buffer, status)
        if received.blocks:
            wait_for_copies(received)

    def start_receive(
        self,
        received: Endpoint,
        incoming: Incoming,
        *,
        replace: bool = False,
        before: Callable[[], bool] | None = None,
    ) -> DeferredRequest:
        """Start to receive. The request is complete when the message is in the buffer.

        The request is complete only after ``before`` has returned true, which means that the rest of the call is done.
        With ``replace`` the rest of the call sends the content of the buffer.
        """
        if received.captured:
            raise refused_capture(received)
        buffer = self._receive_buffer(received, replace=replace, spare=True)
        device, mark = buffer.rendezvous.device, self._mark(received)
        request, correct = incoming.irecv_into(buffer.spec)
        pending = PendingReceive(buffer, request, correct, mark, before, self._give_back)
        work = DeferredRequest.of(pending.done, device.check, pending.status, pending.cancel)
        return self._completer.add(work, device.prepare_thread)

    def exchange(
        self,
        sent: Endpoint,
        dest: int,
        tag: int,
        received: Endpoint,
        posted: tuple[int, int],
        status: MPI.Status | None,
        *,
        replace: bool = False,
    ) -> None:
        """Send one buffer and receive into another buffer, or with ``replace`` into the same buffer.

        ``posted`` is the source and the tag of the received message. Raises MPI's errors for them before it sends.
        """
        if sent.captured or received.captured:
            raise refused_capture(sent)
        status = MPI.Status() if status is None else status
        incoming = self.posted_beside_send(*posted) if self.unexpected.kept else None
        buffer = self._receive_buffer(received, replace=replace, spare=True)
        # The copies of a received message do not wait for the copies of the sent message, which lies elsewhere. The
        # copy of a message in one piece takes less time than a side stream costs.
        aside = buffer.capacity > rendezvous_header.LEAST_PIECE_NBYTES and not replace
        mark = self._mark(received) if aside else None
        # The copy of the sent message is enqueued before MPI's call, which returns when both messages are matched. The
        # peer's message may depend on the message that this rank sends.
        outgoing = self._outgoing.buffer(_isend, sent, dest, sent.stream)
        if incoming is None:
            try:
                sendrecv(self._comm, outgoing.spec, dest, tag, buffer.spec, *posted, status)
            except Exception as error:
                if outgoing.withdraw is not None and _is_refused(error):
                    outgoing.withdraw()
                raise
        else:
            request = outgoing.hand_over(_isend, self._comm, dest, tag)
            try:
                incoming.recv_into(buffer.spec, status)
            finally:
                request.Wait()
        self._finish(buffer, status, mark)
        if sent.blocks or received.blocks:
            wait_for_copies(sent, received)

    def exchange_arrays(
        self,
        send: Any,
        dest: int,
        sendtag: int,
        receive: Any,
        posted: tuple[int, int],
        status: MPI.Status | None,
        stream: Any,
    ) -> bool:
        """As `read` and `exchange` of two plain device arrays that kernels copy. Return False for other calls.

        This is straight-line code: a repeated call passes half as many functions here, and they take most of its time.
        """
        made = self.memory.made
        if made is None or type(send) is not type(receive) or dest not in self._near or self.unexpected.kept:
            return False
        if type(send) in SPECIFICATIONS:  # the kind of their elements has another form
            return False
        given, taken = plain_array(send), plain_array(receive)
        if not (given and taken and given[1] and taken[1] and len(given) == len(taken) == 3 and self.by_rendezvous):
            return False
        device, (dtype, ordinal), (room_dtype, room_ordinal) = made.device, given[2], taken[2]
        nbytes, room = given[1] * element_nbytes(dtype), taken[1] * element_nbytes(room_dtype)
        most = rendezvous_header.KERNEL_NBYTES
        if not (0 < nbytes <= most and 0 < room <= most and ordinal == room_ordinal == device.device):
            return False
        resolved = device.eager_stream(stream, send)  # arrays of one class have one current stream
        if resolved is None:
            return False
        try:
            place = made.reserve(nbytes)
        except (OutboxFullError, HandleError):
            return False
        (place.copy_in or made.copy_into(place))(resolved, given[0], nbytes)
        staging = self._staging(room)
        status = MPI.Status() if status is None else status
        try:
            sendrecv(self._comm, place.message, dest, sendtag, staging.spec, *posted, status)
        except Exception as error:
            if _is_refused(error):
                made.withdraw(place, resolved)
            raise
        found = made.arrived(staging.content, status.source) if status.Get_count(_byte) == HEADER_NBYTES else None
        slot, arrived = found or (None, 0)
        if slot is None or arrived > room or device.waits_beside(resolved, receive):
            received = Endpoint("Sendrecv", receive, taken[0], room, resolved, device, True)
            self._finish(ReceiveBuffer("flat", received, room, made, staging, taken[0]), status)
        else:
            status.Set_elements(_byte, arrived)
            slot.copy_out(resolved, taken[0], arrived)
            self._spare.append(staging)
        if device.completes:
            device.complete(resolved)
        return True

    def start_exchange(
        self, sent: Endpoint, dest: int, tag: int, received: Endpoint, incoming: Incoming, *, replace: bool = False
    ) -> DeferredRequest:
        """Start to send one buffer and to receive into another buffer, or with ``replace`` into the same buffer."""
        if received.captured:
            raise refused_capture(received)
        if sent.on_device:
            sending: MPI.Request = self.start_send(_isend, sent, dest, tag)
        else:
            sending = host_calls.call(_isend, self._comm, sent.spec, dest, tag)
        return self.start_receive(received, incoming, replace=replace, before=sending.Test)

    def receive_matched(self, message: Incoming, buf: Any, status: MPI.Status | None) -> None:
        """Receive a message that a probe has matched."""
        if type(buf) is np.ndarray and (buf.base is None or is_host_view(buf)):
            self.receive_array("Message.Recv", buf, message, status)
        else:
            self.receive(self._read_matched("Message.Recv", buf), message, status)

    def start_receive_matched(self, message: Incoming, buf: Any) -> MPI.Request:
        """Start to receive a message that a probe has matched."""
        return self.start_receive(self._read_matched("Message.Irecv", buf), message)

    def _read_matched(self, operation: str, buf: Any) -> Endpoint:
        _, received = self.read(operation, buf, None, MPI.ANY_SOURCE, receives=True)
        return received or host_end(operation, buf, True, "buf")

    def _receive_buffer(self, received: Endpoint, *, replace: bool = False, spare: bool = False) -> ReceiveBuffer:
        """Return the buffer of a receive. With ``spare`` it has spare memory, and `_give_back` takes it back."""
        device = received.device or self._reader.device(received.operation)
        rendezvous = self.memory.made or self.memory.rendezvous(device)
        nbytes = received.nbytes
        if not (spare and received.is_flat) or nbytes > _MOST_SPARE_NBYTES:
            return receive_buffer(received, rendezvous, replace=replace)
        return ReceiveBuffer("flat", received, nbytes, rendezvous, self._staging(nbytes), received.pointer)

    def _staging(self, nbytes: int) -> StagingMemory:
        """Return spare staging memory for at most ``nbytes`` bytes of data, or for a header."""
        try:
            staging = self._spare.pop()
        except IndexError:
            staging = StagingMemory(_LEAST_SPARE_NBYTES)
        if staging.capacity < nbytes:
            staging = StagingMemory(nbytes)
        staging.spec[1] = nbytes if nbytes > HEADER_NBYTES else HEADER_NBYTES
        return staging

    def _finish(self, buffer: ReceiveBuffer, status: MPI.Status, mark: Any = None) -> None:
        """Finish a blocking receive: in stream order for a device array, before this returns for host memory.

        The copies on the device follow ``mark``, if it is given.
        """
        if not buffer.arrived(status):
            return
        endpoint, device = buffer.endpoint, buffer.rendezvous.device
        stream = endpoint.stream
        if stream is None:
            # No earlier work of the user must precede copies into host memory, so they have their own stream.
            with SideStream(device.side_streams) as copies:
                buffer.deliver(copies)
        elif device.waits_beside(stream, endpoint.spec if endpoint.operand is None else array_of(endpoint.spec)):
            with beside(device, stream, mark) as copies:
                buffer.deliver(copies)
        elif mark is not None:
            with SideStream(device.side_streams, mark) as copies:
                buffer.deliver(copies)
                device.side_streams.wait_stream(stream, copies)
        else:
            buffer.deliver(stream)
        self._give_back(buffer)

    def _give_back(self, buffer: ReceiveBuffer) -> None:
        """Make the staging memory of a receive spare if it had a header, because copies may still read data there."""
        if buffer.slot is not None and buffer.kind == "flat" and buffer.capacity <= _MOST_SPARE_NBYTES:
            assert buffer.staging is not None
            self._spare.append(buffer.staging)

    def _mark(self, received: Endpoint) -> Any:
        if received.device is None or received.stream is None:
            return None
        return received.device.side_streams.mark(received.stream)


def _is_refused(error: Exception) -> bool:
    """Return whether MPI has refused a `Sendrecv`. If the received message was too long, it has sent the other one."""
    return not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE
