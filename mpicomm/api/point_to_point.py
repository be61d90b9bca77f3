"""The point-to-point calls of a Communicator on arrays of the host or of a GPU, also the persistent ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mpi4py import MPI
from numpy import ndarray

from mpicomm.dispatch.in_stream_order import End
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import host_calls
from mpicomm.mpi.arguments import refuse_stream
from mpicomm.mpi.buffers import is_host_view
from mpicomm.mpi.doctor_rows import recv, sending, sendrecv, sendrecv_replace
from mpicomm.mpi.requests import PersistentRequest

if TYPE_CHECKING:
    from mpicomm.messages.calls import Messages

# These are MPI's own methods, looked up once, because `super()` takes a tenth of the time of a small call.
_irecv = MPI.Intracomm.Irecv
_isend = MPI.Intracomm.Isend
_send = sending(MPI.Intracomm.Send)

Sent = TypeVar("Sent", covariant=True)
_IN_STREAM_ORDER = ("Send", "Recv", "Sendrecv")
"""The calls whose messages kernels can match."""
_ALGORITHMS = ("auto", "stream", "copy_engine")


class SendMethod(Protocol[Sent]):
    """A method that sends a buffer to a rank."""

    def __call__(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Sent: ...


def _sender(by_mpi: Callable[..., Sent], doc: str) -> SendMethod[Sent]:
    """Return the method for ``by_mpi``, a send of MPI, with the docstring ``doc``."""
    name = by_mpi.__name__

    def send(self: Any, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Any:
        if type(buf) is not ndarray:
            request = self._messages.start_send_device_array(buf, dest, tag, stream) if by_mpi is _isend else None
            if request is not None:
                return request
        elif stream is None and (buf.base is None or is_host_view(buf)):
            try:
                return by_mpi(self, buf, dest, tag)
            except host_calls.REFUSALS:
                pass  # as bytes below
        return self._transfer(by_mpi, (buf, dest, tag), None, stream)

    method: Any = send
    method.__name__, method.__qualname__, method.__doc__ = name, f"PointToPoint.{name}", doc
    method.__annotations__["return"] = by_mpi.__annotations__["return"]
    return method  # type: ignore[no-any-return]


class PointToPoint(MPI.Intracomm):
    """mpi4py's point-to-point calls on arrays of the host or of a GPU, in any mixture. Local, as in MPI.

    MPI matches all messages, by source and tag. Between GPUs of one node a message of a device array is a *rendezvous*.
    The sender's GPU copies the data into its outbox. MPI carries only a header, and the receiver's GPU copies the data
    from there. Kernels pack and unpack derived datatypes. All other messages are *eager*: the data goes through pinned
    host memory and MPI. A message is eager if it goes to another node, if the handle kind is not "ipc", or if the
    outbox is full. The outbox takes at most 1/32 of the GPU's memory. A message leaves the outbox when it is received.

    ``stream`` orders the copies of device arrays, as for collectives. Without ``stream`` each buffer has the current
    stream of the library that it comes from.

    `Send`, `Bsend` and `Rsend` return when MPI has taken the message or its header, so they seldom wait for the
    receiver. `Ssend` returns when the message is matched. After a send, later work of the stream may overwrite the
    array. `Recv` and `Sendrecv` return when a message is matched. Later work of the stream finds the data in a device
    array. A host array holds the data at once. A request is complete when the host and all streams may use the array.
    Each ``Start`` of a persistent request does the work of the nonblocking call.

    **In stream order.** With ``algorithm="stream"`` (alias "one_shot") kernels match the messages of `Send`, `Recv` and
    `Sendrecv`, without MPI. They match the messages from one rank to another by their order in the streams of the two
    ranks. Device arrays in a stream that captures a CUDA graph go this way without the argument. Sender and receiver
    must both go this way. The calls return when they are enqueued. The first such call of a communicator sets up 20 MiB
    of memory for each rank of the node, and is collective over all ranks.

    The two ranks name each other, the same length, and the same tag. The receiver may name `MPI.ANY_TAG`. `Send` may
    hold up its stream until the receiver receives the message. If the receiver has all earlier messages, one message
    of up to 8 MiB, or three of up to 512 KiB, hold up no stream. So the ranks must make these calls, and collectives,
    in orders that go together, as with NCCL. If two ranks both send first and receive later, let them use `Sendrecv`.
    With ``algorithm="copy_engine"`` MPI matches the message, and the call raises `InvalidUsageError` in a capture.

    **Errors.** The calls raise `InvalidUsageError` and TypeError for bad arguments, on the ranks that pass them. A
    receiver raises `MPI.Exception` with ``MPI.ERR_TRUNCATE`` for a message that is longer than its buffer. If a sender
    dies after its message is matched, the receiver raises `CollectiveTimeoutError` with the sender's rank. The receiver
    raises it in the wait for a request, in the next call, or in ``check()``. Before the match MPI waits without a
    limit. If two ranks name different lengths or tags to kernels, the next call or ``check()`` raises `PeerError`.

    On a communicator of GPUs a rendezvous header may also arrive for a host array. So there `Irecv` and `Recv_init` of
    a host array return requests of this package. All other requests of host arrays are MPI's.
    """

    _messages: Messages
    _in_stream_order: Callable[..., None]

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Send ``buf`` to rank ``dest``. Return when MPI has taken the message, or its header for a device array.

        ``buf`` is an array, or ``[array, count, type]``. A device array is copied on ``stream``, by default the current
        stream of its library, and later work there may overwrite it. ``algorithm`` is "auto" (MPI matches) or "stream"
        (kernels match; the receiver passes it, too). Raises `InvalidUsageError` for wrong arguments.

            following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            request = comm.Irecv(y := cp.empty(8), source=previous)
            comm.Send(cp.ones(8), dest=following, tag=7)
            request.Wait()
        """
        if (
            type(buf) is ndarray
            # The middle condition repeats the first half of is_host_view, because a call takes longer.
            and ((base := buf.base) is None or (type(base) is ndarray and base.base is None) or is_host_view(buf))
            and stream is None
            and algorithm == "auto"
        ):
            try:
                _send(self, buf, dest, tag)
                return
            except host_calls.REFUSALS:
                pass  # MPI has no type for the elements, so they go as bytes below
        self._transfer(_send, (buf, dest, tag), None, stream, algorithm)

    Ssend = _sender(sending(MPI.Intracomm.Ssend), "Send ``buf``; return when a receive has matched it; see mpi4py.")
    Rsend = _sender(sending(MPI.Intracomm.Rsend), "Send ``buf`` to a rank that has posted its receive; see mpi4py.")
    Bsend = _sender(MPI.Intracomm.Bsend, "Send ``buf`` through the buffer of `Attach_buffer`; see mpi4py.")

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> None:
        """Receive into ``buf``, which has room for the message or more. Return when the message is matched.

        A host array then holds the data. A device array holds it in the order of ``stream``, by default the current
        stream of its library. ``algorithm`` is as in `Send`. ``status`` gets source, tag and count. Raises
        `MPI.Exception` with ``MPI.ERR_TRUNCATE`` for a longer message, and `InvalidUsageError` for wrong arguments.
        MPI waits for a match without a limit.

            request = comm.Isend(cp.ones(8), dest=(comm.rank + 1) % comm.size)
            y, status = cp.empty(8), MPI.Status()
            comm.Recv(y, source=MPI.ANY_SOURCE, status=status)
            request.Wait()
        """
        messages = self._messages
        if (
            type(buf) is ndarray
            # The middle condition repeats the first half of is_host_view, because a call takes longer.
            and ((base := buf.base) is None or (type(base) is ndarray and base.base is None) or is_host_view(buf))
            and stream is None
            and algorithm == "auto"
        ):
            try:
                if not messages.by_rendezvous:
                    recv(self, buf, source, tag, status)
                    return
                if not messages.unexpected.queued:
                    messages.receive_host_array(buf, lambda spec, seen: recv(self, spec, source, tag, seen), status)
                    return
            except host_calls.REFUSALS:
                pass  # as bytes below
        self._transfer(recv, None, (buf, source, tag), stream, algorithm, status)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> None:
        """Send one buffer and receive into another, at once, so that ranks in a ring do not wait for each other.

        Order, ``stream``, ``algorithm`` and errors are as in `Send` and `Recv`. `MPI.PROC_NULL` leaves one side out.

            following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            x, y = cp.full(8, comm.rank), cp.empty(8, int)
            comm.Sendrecv(x, following, 0, y, previous, 0)
        """
        if (
            type(sendbuf) is type(recvbuf) is ndarray
            and (sendbuf.base is None or is_host_view(sendbuf))
            and (recvbuf.base is None or is_host_view(recvbuf))
            and stream is None
            and algorithm == "auto"
            and not (messages := self._messages).unexpected.queued
        ):
            try:
                if not messages.by_rendezvous:
                    sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
                    return
                messages.receive_host_array(
                    recvbuf,
                    lambda spec, seen: sendrecv(self, sendbuf, dest, sendtag, spec, source, recvtag, seen),
                    status,
                    "recvbuf",
                )
                return
            except host_calls.REFUSALS:
                pass  # as bytes below
        if algorithm == "auto" and self._messages.exchange_device_arrays(
            sendbuf, dest, sendtag, recvbuf, source, recvtag, status, stream
        ):
            return
        send, receive = (sendbuf, dest, sendtag), (recvbuf, source, recvtag)
        self._transfer(sendrecv, send, receive, stream, algorithm, status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Any = None,
    ) -> None:
        """Send ``buf`` and receive into it; see mpi4py."""
        self._replace(sendrecv_replace, (buf, dest, sendtag), (source, recvtag), stream, status)

    Isend = _sender(
        _isend,
        "Start to send ``buf``; return the request. Keep ``buf`` as it is until ``Wait``, or ``Test`` that is true.\n\n"
        "Arguments and ``stream`` are as in `Send`.",
    )
    Issend = _sender(MPI.Intracomm.Issend, "Start to send ``buf``; complete when a receive has matched it; see mpi4py.")
    Ibsend = _sender(MPI.Intracomm.Ibsend, "Start to send ``buf`` through the buffer of `Attach_buffer`; see mpi4py.")
    Irsend = _sender(MPI.Intracomm.Irsend, "Start to send ``buf`` to a rank that has posted its receive; see mpi4py.")

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Request:
        """Start to receive into ``buf``; return the request. After ``Wait`` the host and all streams may use ``buf``.

        Arguments, ``stream`` and errors are as in `Recv`.
        """
        if (
            type(buf) is ndarray
            and (buf.base is None or is_host_view(buf))
            and stream is None
            and not (messages := self._messages).unexpected.queued
        ):
            try:
                if messages.by_rendezvous:
                    return messages.start_receive_host_array(buf, source, tag)
                return _irecv(self, buf, source, tag)
            except host_calls.REFUSALS:
                pass  # as bytes below
        request: MPI.Request = self._transfer(_irecv, None, (buf, source, tag), stream)
        return request

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        stream: Any = None,
    ) -> MPI.Request:
        """Start to send one buffer and receive into another; see mpi4py."""
        send, receive = (sendbuf, dest, sendtag), (recvbuf, source, recvtag)
        request: MPI.Request = self._transfer(MPI.Intracomm.Isendrecv, send, receive, stream)
        return request

    def Isendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        *,
        stream: Any = None,
    ) -> MPI.Request:
        """Start to send ``buf`` and receive into it; see mpi4py."""
        sent, envelope = (buf, dest, sendtag), (source, recvtag)
        request: MPI.Request = self._replace(MPI.Intracomm.Isendrecv_replace, sent, envelope, stream)
        return request

    Send_init = _sender(MPI.Intracomm.Send_init, "Create a persistent `Send`; see mpi4py.")
    Ssend_init = _sender(MPI.Intracomm.Ssend_init, "Create a persistent `Ssend`; see mpi4py.")
    Bsend_init = _sender(MPI.Intracomm.Bsend_init, "Create a persistent `Bsend`; see mpi4py.")
    Rsend_init = _sender(MPI.Intracomm.Rsend_init, "Create a persistent `Rsend`; see mpi4py.")

    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Prequest:
        """Create a persistent `Recv`; see mpi4py."""
        request: MPI.Prequest = self._transfer(MPI.Intracomm.Recv_init, None, (buf, source, tag), stream)
        return request

    def _transfer(
        self,
        by_mpi: Callable[..., Any],
        send: End | None,
        receive: End | None,
        stream: Any,
        algorithm: str = "auto",
        *status: MPI.Status | None,
    ) -> Any:
        """Send a buffer, receive into another, or both: by kernels, by MPI's method ``by_mpi``, or by a rendezvous.

        MPI gets the buffers if all of them lie in host memory. A nonblocking or persistent call returns its request.
        """
        operation = by_mpi.__name__.capitalize()  # `recv` and `sendrecv` of `doctor_rows` begin with a small letter
        messages, sent, received = self._messages, None, None
        if algorithm != "auto":
            algorithm = "stream" if algorithm == "one_shot" else algorithm  # the alias
            if algorithm not in _ALGORITHMS:
                raise InvalidUsageError(f"{operation}: algorithm={algorithm!r}: use one of {', '.join(_ALGORITHMS)}")
            if not messages.on_gpu:
                raise _for_device_arrays(operation, algorithm)
            if algorithm == "stream":
                return self._in_stream_order(operation, stream, send, receive, *status)
        if send is not None:
            buf, dest, tag = send
            buf, sent = messages.read(operation, buf, stream, dest, "buf" if receive is None else "sendbuf")
            send = buf, dest, tag
        if receive is not None:
            buf, source, recvtag = receive
            argument = "buf" if send is None else "recvbuf"
            buf, received = messages.read(operation, buf, stream, source, argument, receives=True, other_end=sent)
            receive = buf, source, recvtag
        first = sent or received
        if first is None or first.stream is None:
            refuse_stream(operation, stream)
            # A buffer that is None, beside MPI.PROC_NULL, may stand for either kind of array.
            if algorithm != "auto" and all(side is None or side[0] is not None for side in (send, receive)):
                raise _for_device_arrays(operation, algorithm)
        if first is None:
            receives = None if receive is None else 3 if send else 0
            return host_calls.call(by_mpi, self, *(send or ()), *(receive or ()), *status, receives=receives)
        if first.captured and algorithm == "auto" and operation in _IN_STREAM_ORDER:
            return self._in_stream_order(operation, stream, send, receive, *status)
        if operation.endswith("_init"):
            start = getattr(MPI.Intracomm, f"I{operation.removesuffix('_init').lower()}")
            # Each start reads the buffer again, because the stream may capture a graph then.
            return PersistentRequest.of(lambda: self._transfer(start, send, receive, stream))
        starts = operation[0] == "I"
        if receive is None:
            assert sent is not None
            return (messages.start_send if starts else messages.send)(by_mpi, sent, dest, tag)
        if send is None:
            assert received is not None
            queue = messages.unexpected
            if starts:
                return messages.start_receive(received, partial(queue.irecv_into, source, recvtag))
            return messages.receive(received, partial(queue.recv_into, source, recvtag), *status)
        if sent is None or received is None:
            from mpicomm.messages.reader import host_endpoint

            sent = sent or host_endpoint(operation, send[0], False, "sendbuf")
            received = received or host_endpoint(operation, receive[0], True, "recvbuf")
        exchange = messages.start_exchange if starts else messages.exchange
        return exchange(sent, dest, tag, received, (source, recvtag), *status)

    def _replace(
        self, by_mpi: Callable[..., Any], send: End, envelope: tuple[int, int], stream: Any, *status: MPI.Status | None
    ) -> Any:
        """Send a buffer and receive into it. ``envelope`` is the source and the tag of the received message."""
        (buf, dest, tag), messages, end = send, self._messages, None
        is_host = type(buf) is ndarray and stream is None and (buf.base is None or is_host_view(buf))
        if messages.by_rendezvous or not is_host:
            operation = by_mpi.__name__
            buf, end = messages.read(operation, buf, stream, dest, other_peer=envelope[0], receives=True)
            if end is None or not end.on_device:
                refuse_stream(operation, stream)
        if end is None:
            return host_calls.call(by_mpi, self, buf, dest, tag, *envelope, *status, receives=0)
        exchange = messages.exchange if by_mpi is sendrecv_replace else messages.start_exchange
        return exchange(end, dest, tag, end, envelope, *status, replace=True)


def _for_device_arrays(operation: str, algorithm: str) -> InvalidUsageError:
    return InvalidUsageError(f'{operation}: algorithm="{algorithm}" is for device arrays: use "auto"')
