"""The point-to-point calls of one communicator on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.stream_threads import SideStream, synchronized_side_stream
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.endpoint import Endpoint, capture_error
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.outgoing import Outgoing, wait_for_copies
from mpicomm.messages.reader import LISTS, element_nbytes, host_endpoint, parse_any, read
from mpicomm.messages.receive_buffer import ReceiveBuffer, StagingPool, receive_buffer
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.messages.unexpected import FillSource, MatchedMessage, ReceiveInto, StartReceiveInto, UnexpectedQueue
from mpicomm.mpi import host_calls
from mpicomm.mpi.buffers import array_of, is_host_view
from mpicomm.mpi.descriptors import descriptor_of
from mpicomm.mpi.doctor_rows import sendrecv
from mpicomm.mpi.requests import DeferredRequest, ProgressThread

_byte = MPI.BYTE
_address = MPI.Get_address  # a tenth of the time of NumPy's `ctypes`
_iprobe = MPI.Intracomm.Iprobe
_irecv = MPI.Intracomm.Irecv
_isend = MPI.Intracomm.Isend


class Messages:
    """The messages of communicator ``comm``. ``gpu`` returns its device. All methods are local.

    A call reads its buffers once, with `read`, and hands the endpoints to the other methods. MPI gets host memory in
    place of each endpoint, matches all messages, and blocks as usual.

    ``by_rendezvous`` is true if the ranks open memory by IPC handles. Then long messages of device arrays have a
    rendezvous header, and receives into host arrays must also look for headers.

    An *envelope* is the source and the tag of a receive.
    """

    def __init__(self, comm: MPI.Intracomm, placement: Placement, gpu: Callable[[str], GpuBackend]) -> None:
        here = placement.here
        self.on_gpu = isinstance(here.device, int)
        self.by_rendezvous = here.sends_headers
        self._comm = comm
        secret = placement.secret if self.by_rendezvous else None
        self.rendezvous = Rendezvous(gpu, here.timeout_s, secret, here.outbox_limit_nbytes)
        self.read = partial(read, self.rendezvous)
        self.unexpected = UnexpectedQueue(self, comm, secret)
        self._node_ranks = frozenset(placement.node_ranks)
        pool = StagingPool()
        self._acquire_staging, self._release_staging, self._spare = pool.acquire, pool.release, pool.spare
        # Collectives have another progress thread. A receive into host memory blocks its thread until the sender's
        # device has sent the data. The sender may wait for a collective which this rank begins only after an earlier
        # one is complete.
        self._progress_thread = ProgressThread()
        self._outgoing = Outgoing(comm, self._node_ranks, here.handle, self.rendezvous, self._progress_thread)
        self.send, self.start_send = self._outgoing.send, self._outgoing.start_send
        self.start_send_device_array = self._outgoing.start_send_device_array

    def receive_host_array(self, buf: Any, receive: ReceiveInto, status: MPI.Status | None, name: str = "buf") -> None:
        """Receive into a NumPy array, the argument ``name``, by ``receive``."""
        status = MPI.Status() if status is None else status
        buffer = self._array_buffer(buf, name) if self.by_rendezvous else None
        try:
            receive(buf if buffer is None else buffer.spec, status)
        except host_calls.REFUSALS:  # MPI has no type for the elements, and has not received yet
            receive(host_calls.as_bytes(buf, True, name), status)
        if buffer is not None:
            self._complete_receive(buffer, status)

    def start_receive_host_array(self, buf: Any, source: int, tag: int) -> DeferredRequest:
        """Start to receive into a NumPy array from MPI. MPI refuses some arrays: `REFUSALS`."""
        buffer, device = self._array_buffer(buf, "buf"), self.rendezvous.device_for("Irecv")
        return self._receiving(buffer, device, _irecv(self._comm, buffer.spec, source, tag))

    def _array_buffer(self, array: Any, name: str) -> ReceiveBuffer:
        """Return the buffer of a receive into a NumPy array. Raises the errors of `parse` if it cannot receive."""
        flags, nbytes = array.flags, array.nbytes
        # MPI would not see the references of Python objects if it gets staging memory.
        if not (flags.forc and flags.writeable) or array.dtype.hasobject:
            parse_any(array, True, name)  # raises
        # MPI gets the array itself if a header fits into it.
        staging = self._acquire_staging(nbytes) if nbytes < HEADER_NBYTES else None
        return ReceiveBuffer("host", self.rendezvous, nbytes, _address(array), staging, array)

    def receive(self, received: Endpoint, receive_into: ReceiveInto, status: MPI.Status | None) -> None:
        """Receive by ``receive_into``. A device array has the message in the order of its stream."""
        if received.captured:
            raise capture_error(received)
        status = MPI.Status() if status is None else status
        buffer = self._receive_buffer(received)
        receive_into(buffer.spec, status)
        self._complete_receive(buffer, status)
        if received.completes:
            wait_for_copies(received)

    def start_receive(
        self,
        received: Endpoint,
        start_receive_into: StartReceiveInto,
        *,
        replace: bool = False,
        before: Callable[[], bool] | None = None,
    ) -> DeferredRequest:
        """Start to receive by ``start_receive_into``. The request is complete when the message is in the buffer.

        The request is complete only after ``before`` has returned true, which means that the rest of the call is done.
        With ``replace`` the rest of the call sends the content of the buffer.
        """
        if received.captured:
            raise capture_error(received)
        buffer, mark = self._receive_buffer(received, replace=replace), self._mark(received)
        request, fill_source = start_receive_into(buffer.spec)
        return self._receiving(buffer, buffer.rendezvous.device, request, fill_source, mark, before)

    def _receiving(
        self,
        buffer: ReceiveBuffer,
        device: GpuBackend,
        request: MPI.Request,
        fill_source: FillSource | None = None,
        mark: Any = None,
        before: Callable[[], bool] | None = None,
    ) -> DeferredRequest:
        """Return the request of a receive that MPI has begun. ``before`` is as in `start_receive`.

        ``fill_source`` corrects the status that MPI fills. ``mark`` lies in the user's stream, and the copies into a
        device array follow it.
        """
        status = MPI.Status()

        def steps() -> Iterator[bool]:
            """Yield False until the message is in the user's memory, or the receive was cancelled, and then True."""
            while before is not None and not before():
                yield False
            while not request.Test(status):
                yield False
            cancelled = status.Is_cancelled()
            if fill_source is not None and not cancelled:
                fill_source(status)
            if not cancelled and buffer.accept(status):
                streams = device.side_streams
                # A delivery that waits for its stream would also wait for the user's work, and this thread would
                # complete no other request.
                while mark is not None and buffer.waits_for_stream and not streams.is_done(mark):
                    yield False
                # The copies may wait for the sender. On the user's stream they would hold up its later work, and other
                # receives.
                side = streams.acquire(mark)
                try:
                    buffer.deliver(side)
                    delivered = device.completion(side)
                except BaseException:
                    streams.release(side)
                    raise
                while not delivered():
                    yield False
                # `delivered` has seen the event behind the last work of the stream. If the stream came back before, the
                # copies of the next receive could wait there for this sender.
                streams.release(side, is_idle=True)
            if buffer.staging is not None:
                self._release_staging(buffer.staging, buffer)
            yield True

        def cancel() -> None:
            if request:  # MPI frees it when it has received the message
                request.Cancel()

        work = DeferredRequest.of(steps().__next__, device.check, status, cancel)
        return self._progress_thread.add(work, device.prepare_thread)

    def exchange(
        self,
        sent: Endpoint,
        dest: int,
        tag: int,
        received: Endpoint,
        envelope: tuple[int, int],
        status: MPI.Status | None,
        *,
        replace: bool = False,
    ) -> None:
        """Send one buffer and receive into another buffer, or with ``replace`` into the same buffer.

        Raises MPI's errors for a bad envelope before it sends.
        """
        if sent.captured or received.captured:
            raise capture_error(sent)
        status = MPI.Status() if status is None else status
        searches_queue = bool(self.unexpected.queued)
        if searches_queue:
            _iprobe(self._comm, *envelope)  # raises MPI's errors, as MPI's Sendrecv does
        buffer = self._receive_buffer(received, replace=replace)
        # The copies of a received message do not wait for the copies of the sent message, which lies elsewhere. The
        # copy of a message in one piece takes less time than a side stream costs.
        overlaps = buffer.capacity > rendezvous_header.LEAST_PIECE_NBYTES and not replace
        mark = self._mark(received) if overlaps else None
        # The copy of the sent message is enqueued before MPI's call, which returns when both messages are matched. The
        # peer's message may depend on the message that this rank sends.
        outgoing = self._outgoing.stage(_isend, sent, dest, sent.stream)
        if not searches_queue:
            try:
                sendrecv(self._comm, outgoing.spec, dest, tag, buffer.spec, *envelope, status)
            except Exception as error:
                if outgoing.withdraw is not None and _sends_nothing(error):
                    outgoing.withdraw()
                raise
        else:
            request = outgoing.post(_isend, self._comm, dest, tag)
            try:
                self.unexpected.recv_into(*envelope, buffer.spec, status)
            finally:
                request.Wait()
        self._complete_receive(buffer, status, mark)
        if sent.completes or received.completes:
            wait_for_copies(sent, received)

    def exchange_device_arrays(
        self,
        send: Any,
        dest: int,
        sendtag: int,
        receive: Any,
        source: int,
        recvtag: int,
        status: MPI.Status | None,
        stream: Any,
    ) -> bool:
        """As `read` and `exchange` of two plain device arrays that kernels copy. Return False for other calls.

        This is straight-line code: a repeated call passes half as many functions here, and they take most of its time.
        """
        rendezvous = self.rendezvous
        if (
            not (rendezvous.has_begun and self.by_rendezvous)
            or type(send) is not type(receive)
            or dest not in self._node_ranks
            or self.unexpected.queued
        ):
            return False
        if type(send) in LISTS:  # the kind of their elements has another form
            return False
        sent, received = descriptor_of(send), descriptor_of(receive)
        if not (sent and received and sent[1] and received[1] and len(sent) == len(received) == 3):
            return False
        device, (dtype, ordinal), (received_dtype, received_ordinal) = rendezvous.device, sent[2], received[2]
        itemsize = element_nbytes(dtype)
        nbytes = sent[1] * itemsize
        capacity = received[1] * (itemsize if received_dtype is dtype else element_nbytes(received_dtype))
        longest = rendezvous_header.KERNEL_NBYTES
        if not (0 < nbytes <= longest and 0 < capacity <= longest and ordinal == received_ordinal == device.device):
            return False
        resolved = device.eager_stream(stream, send)  # arrays of one class have one current stream
        if resolved is None:
            return False
        try:
            slot = rendezvous.reserve(nbytes)
        except (OutboxFullError, HandleError):
            return False
        (slot.copy_in or rendezvous.copy_into(slot))(resolved, sent[0], nbytes)
        staging = self._acquire_staging(capacity)
        seen = staging.status if status is None else status
        try:
            sendrecv(self._comm, slot.header, dest, sendtag, staging.spec, source, recvtag, seen)
        except Exception as error:
            if _sends_nothing(error):
                rendezvous.withdraw(slot, resolved)
            raise
        found = None
        if seen.Get_count(_byte) == HEADER_NBYTES:
            found = rendezvous.resolve_header(staging.content, seen)
        peer_slot, arrived = (None, 0) if found is None else found
        if peer_slot is None or arrived > capacity or device.needs_side_stream(resolved, receive):
            endpoint = Endpoint("Sendrecv", receive, received[0], capacity, resolved, device, True)
            self._complete_receive(
                ReceiveBuffer("flat", rendezvous, capacity, received[0], staging, None, endpoint), seen
            )
        else:
            if status is not None:
                status.Set_elements(_byte, arrived)
            peer_slot.copy_out(resolved, received[0], arrived)
            self._spare.append(staging)
        if device.completes:
            device.complete(resolved)
        return True

    def start_exchange(
        self,
        sent: Endpoint,
        dest: int,
        tag: int,
        received: Endpoint,
        envelope: tuple[int, int],
        *,
        replace: bool = False,
    ) -> DeferredRequest:
        """Start to send one buffer and to receive into another buffer, or with ``replace`` into the same buffer.

        Raises MPI's errors for a bad envelope before it sends.
        """
        _iprobe(self._comm, *envelope)  # raises MPI's errors
        if received.captured:
            raise capture_error(received)
        if sent.on_device:
            sending: MPI.Request = self.start_send(_isend, sent, dest, tag)
        else:
            sending = host_calls.call(_isend, self._comm, sent.spec, dest, tag)
        start_receive_into = partial(self.unexpected.irecv_into, *envelope)
        return self.start_receive(received, start_receive_into, replace=replace, before=sending.Test)

    def receive_matched(self, message: MatchedMessage, buf: Any, status: MPI.Status | None) -> None:
        """Receive a message that a probe has matched."""
        if type(buf) is np.ndarray and (buf.base is None or is_host_view(buf)):
            self.receive_host_array(buf, message.recv_into, status)
        else:
            self.receive(self._read_matched("Message.Recv", buf), message.recv_into, status)

    def start_receive_matched(self, message: MatchedMessage, buf: Any) -> MPI.Request:
        """Start to receive a message that a probe has matched."""
        return self.start_receive(self._read_matched("Message.Irecv", buf), message.irecv_into)

    def _read_matched(self, operation: str, buf: Any) -> Endpoint:
        _, received = self.read(operation, buf, None, MPI.ANY_SOURCE, receives=True)
        return received or host_endpoint(operation, buf, True, "buf")

    def _receive_buffer(self, received: Endpoint, *, replace: bool = False) -> ReceiveBuffer:
        rendezvous = self.rendezvous
        if not rendezvous.has_begun:
            rendezvous.begin(received.operation)
        if not received.is_flat:
            return receive_buffer(received, rendezvous, self._acquire_staging, replace=replace)
        nbytes = received.nbytes
        staging = self._acquire_staging(nbytes)
        return ReceiveBuffer("flat", rendezvous, nbytes, received.pointer, staging, None, received)

    def _complete_receive(self, buffer: ReceiveBuffer, status: MPI.Status, mark: Any = None) -> None:
        """Complete a blocking receive: in stream order for a device array, before this returns for host memory.

        The copies on the device follow ``mark``, if it is given.
        """
        if buffer.accept(status):
            endpoint, device = buffer.endpoint, buffer.rendezvous.device
            if endpoint is None or endpoint.stream is None:
                # No earlier work of the user must precede copies into host memory, so they have their own stream.
                with SideStream(device.side_streams) as copies:
                    buffer.deliver(copies)
            elif device.needs_side_stream(
                endpoint.stream, endpoint.spec if endpoint.operand is None else array_of(endpoint.spec)
            ):
                with synchronized_side_stream(device, endpoint.stream, mark) as copies:
                    buffer.deliver(copies)
            elif mark is not None:
                with SideStream(device.side_streams, mark) as copies:
                    buffer.deliver(copies)
                    device.side_streams.wait_stream(endpoint.stream, copies)
            else:
                buffer.deliver(endpoint.stream)
        if buffer.staging is not None:
            self._release_staging(buffer.staging, buffer)

    def _mark(self, received: Endpoint) -> Any:
        if received.device is None or received.stream is None:
            return None
        return received.device.side_streams.mark(received.stream)


def _sends_nothing(error: Exception) -> bool:
    """Return whether a `Sendrecv` that raises ``error`` has sent nothing: the received message was not too long."""
    return not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE
