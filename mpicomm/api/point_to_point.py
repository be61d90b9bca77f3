"""The point-to-point calls of a Communicator on arrays of the host or of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from mpicomm.api.host_only import require_host
from mpicomm.errors import InvalidUsageError
from mpicomm.messages.calls import Messages
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.in_stream_order import InStreamOrder
from mpicomm.mpi.location import refuse_stream
from mpicomm.mpi.requests import PersistentRequest, Work

# MPI's own, found once: `super()` takes a tenth of the time of a small call.
_bsend = MPI.Intracomm.Bsend
_irecv = MPI.Intracomm.Irecv
_isend = MPI.Intracomm.Isend
_isendrecv = MPI.Intracomm.Isendrecv
_isendrecv_replace = MPI.Intracomm.Isendrecv_replace
_issend = MPI.Intracomm.Issend
_recv = MPI.Intracomm.Recv
_recv_init = MPI.Intracomm.Recv_init
_rsend = MPI.Intracomm.Rsend
_send = MPI.Intracomm.Send
_sendrecv = MPI.Intracomm.Sendrecv
_sendrecv_replace = MPI.Intracomm.Sendrecv_replace
_ssend = MPI.Intracomm.Ssend

_ALGORITHMS = ("auto", "one_shot", "copy_engine")


class PointToPoint(MPI.Intracomm):
    """mpi4py's point-to-point calls on arrays of the host or of a GPU, in any mixture.

    MPI matches all messages, by source and tag. Between GPUs of one node whose memory is opened by IPC handles, it
    carries no more than a description of a device array of more than 32 KiB: the data is copied into memory of the
    sender's GPU, and from there by the receiver's, piece by piece. Smaller ones, those to other nodes, and those for
    which the sender has no memory left (of 1/64 of its GPU at most, until messages are received) go through pinned host
    memory and MPI.

    ``stream`` orders the copies, as for collectives. Local, as in MPI. `Send` and its kin block until MPI has taken the
    message, of a large one the description, so that it hardly ever waits for the receiver; `Ssend` does until it is
    matched. The array may be overwritten by later work of the stream. `Recv` and `Sendrecv` block until a message is
    matched; what arrives is there for later work of the stream (in host arrays, when they return). Requests are
    complete when the array may be used by anybody.

    With ``algorithm="one_shot"``, and by themselves while their stream captures a CUDA graph, `Send`, `Recv` and
    `Sendrecv` of device arrays do not meet MPI: kernels match the messages from one rank to another by their order,
    that of the two ranks' streams, and both ranks have to say so. They return once enqueued. The first such call of a
    communicator sets up memory, 16 MiB for each rank of a node, and is collective over the node. Of a message the two
    ranks must know the length, the source, and the tag unless it is `MPI.ANY_TAG`; where they differ, `PeerError` is
    raised by the next call, or ``check()``. `Send` holds up its stream until its message, but for the last 16 MiB of
    those to that rank, is received. So, as with NCCL, the ranks must come to these calls, and to collectives, in orders
    that go together: two ranks that both send first and then receive should use `Sendrecv`. With "copy_engine" MPI
    matches in any case, and a capture is refused.

    Raises `InvalidUsageError` and TypeError for bad arguments, `MPI.Exception` with ``MPI.ERR_TRUNCATE`` for a message
    that is longer than the buffer. Where a sender dies after its message was matched, `CollectiveTimeoutError` names
    it: raised by the wait for a request, else by the next call, or ``check()``. Before that MPI waits as it does.

    On a communicator of GPUs a receive into a host array, too, may meet a description. So there ``Irecv`` of an array
    of more than about a KiB returns a generalized request, and ``Recv_init`` one that `MPI.Prequest.Startall` does not
    know: call its ``Start``.
    """

    _messages: Messages
    _in_stream_order: InStreamOrder

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Send ``buf``; see mpi4py."""
        if type(buf) is ndarray and stream is None and algorithm == "auto":
            return _send(self, buf, dest, tag)
        if algorithm != "auto" and self._is_one_shot("Send", algorithm):
            return self._in_stream_order.exchange("Send", stream, send=(buf, dest, tag))
        sent = self._messages.sending("Send", buf, stream)
        if sent is None:
            _refuse_options("Send", stream, algorithm, buf)
            return _send(self, buf, dest, tag)
        if sent.captured and algorithm == "auto":
            return self._in_stream_order.exchange("Send", stream, send=(buf, dest, tag))
        return self._messages.send(_send, sent, dest, tag)

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``, and return when the receiver has matched it; see mpi4py."""
        self._blocking_send("Ssend", _ssend, buf, dest, tag, stream)

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf`` to a rank that has posted its receive; see mpi4py."""
        self._blocking_send("Rsend", _rsend, buf, dest, tag, stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf`` through the buffer of `Attach_buffer`; see mpi4py."""
        self._blocking_send("Bsend", _bsend, buf, dest, tag, stream)

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
        """Receive into ``buf``; see mpi4py."""
        messages = self._messages
        if type(buf) is ndarray and stream is None and algorithm == "auto":
            if messages.described:
                return messages.receive_array("Recv", buf, messages.posted(source, tag), status)
            return _recv(self, buf, source, tag, status)
        if algorithm != "auto" and self._is_one_shot("Recv", algorithm):
            return self._in_stream_order.exchange("Recv", stream, receive=(buf, source, tag), status=status)
        received = messages.receiving("Recv", buf, stream)
        if received is None or not received.on_device:
            _refuse_options("Recv", stream, algorithm, buf)
        if received is None:
            return _recv(self, buf, source, tag, status)
        if received.captured and algorithm == "auto":
            return self._in_stream_order.exchange("Recv", stream, receive=(buf, source, tag), status=status)
        return messages.receive(received, messages.posted(source, tag), status)

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
        """Send one buffer and receive into another; see mpi4py.

        Each buffer has its own stream where ``stream`` is None: the current one of the library it comes from.
        """
        messages = self._messages
        if (
            type(sendbuf) is type(recvbuf) is ndarray
            and stream is None
            and algorithm == "auto"
            and not messages.described
        ):
            return _sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        if algorithm != "auto" and self._is_one_shot("Sendrecv", algorithm):
            return self._in_stream_order.exchange(
                "Sendrecv", stream, (sendbuf, dest, sendtag), (recvbuf, source, recvtag), status
            )
        sent = messages.sending("Sendrecv", sendbuf, stream, "sendbuf")
        received = messages.receiving("Sendrecv", recvbuf, stream, "recvbuf")
        first = sent or received
        if (first is None or not first.on_device) and not (stream is None and algorithm == "auto"):
            _refuse_options("Sendrecv", stream, algorithm, sendbuf, recvbuf)
        if first is None:
            return _sendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
        if first.captured and algorithm == "auto":
            return self._in_stream_order.exchange(
                "Sendrecv", stream, (sendbuf, dest, sendtag), (recvbuf, source, recvtag), status
            )
        sent = sent or Endpoint("Sendrecv", sendbuf)
        received = received or Endpoint("Sendrecv", recvbuf)
        return messages.exchange(sent, dest, sendtag, received, messages.posted(source, recvtag), status)

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
        messages = self._messages
        if type(buf) is ndarray and stream is None and not messages.described:
            return _sendrecv_replace(self, buf, dest, sendtag, source, recvtag, status)
        both = messages.receiving("Sendrecv_replace", buf, stream)
        if both is None or not both.on_device:
            refuse_stream("Sendrecv_replace", stream)
        if both is None:
            return _sendrecv_replace(self, buf, dest, sendtag, source, recvtag, status)
        return messages.exchange(both, dest, sendtag, both, messages.posted(source, recvtag), status, replace=True)

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; see mpi4py."""
        return self._nonblocking_send("Isend", _isend, buf, dest, tag, stream)

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; the request is complete when the receiver has matched it; see mpi4py."""
        return self._nonblocking_send("Issend", _issend, buf, dest, tag, stream)

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Request:
        """Start to receive into ``buf``; see mpi4py."""
        messages = self._messages
        if type(buf) is ndarray and stream is None and not messages.described:
            return _irecv(self, buf, source, tag)
        received = messages.receiving("Irecv", buf, stream)
        if received is None or not received.on_device:
            refuse_stream("Irecv", stream)
        if received is None:
            return _irecv(self, buf, source, tag)
        return messages.start_receive(received, messages.posted(source, tag))

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
        """Start to send one buffer and receive into another; see mpi4py. Streams as in `Sendrecv`."""
        messages = self._messages
        if type(sendbuf) is type(recvbuf) is ndarray and stream is None and not messages.described:
            return _isendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag)
        sent = messages.sending("Isendrecv", sendbuf, stream, "sendbuf")
        received = messages.receiving("Isendrecv", recvbuf, stream, "recvbuf")
        first = sent or received
        if first is None or not first.on_device:
            refuse_stream("Isendrecv", stream)
        if first is None:
            return _isendrecv(self, sendbuf, dest, sendtag, recvbuf, source, recvtag)
        sent = sent or Endpoint("Isendrecv", sendbuf)
        received = received or Endpoint("Isendrecv", recvbuf)
        return messages.start_exchange(sent, dest, sendtag, received, messages.posted(source, recvtag))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG
    ) -> MPI.Request:
        """Start to send ``buf`` and receive into it; see mpi4py. It takes host arrays alone."""
        messages = self._messages
        require_host("Isendrecv_replace", buf)
        if not messages.described:
            return _isendrecv_replace(self, buf, dest, sendtag, source, recvtag)
        both = messages.receiving("Isendrecv_replace", buf, None)
        assert both is not None
        return messages.start_exchange(both, dest, sendtag, both, messages.posted(source, recvtag), replace=True)

    def Recv_init(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Prequest:
        """Create a persistent receive into ``buf``; see mpi4py. It takes host arrays alone."""
        messages = self._messages
        require_host("Recv_init", buf)
        if not messages.described:
            return _recv_init(self, buf, source, tag)

        def begin() -> Work:
            received = messages.receiving("Recv_init", buf, None)
            assert received is not None
            return messages.defer_receive(received, messages.posted(source, tag)).work

        return PersistentRequest.of(begin)

    def _blocking_send(
        self, operation: str, send: Callable[..., None], buf: Any, dest: int, tag: int, stream: Any
    ) -> None:
        sent = self._sending(operation, buf, stream)
        if sent is None:
            send(self, buf, dest, tag)
        else:
            self._messages.send(send, sent, dest, tag)

    def _nonblocking_send(
        self, operation: str, send: Callable[..., MPI.Request], buf: Any, dest: int, tag: int, stream: Any
    ) -> MPI.Request:
        sent = self._sending(operation, buf, stream)
        return send(self, buf, dest, tag) if sent is None else self._messages.start_send(send, sent, dest, tag)

    def _sending(self, operation: str, buf: Any, stream: Any) -> Endpoint | None:
        """Return the endpoint of a device array; None for host memory, which MPI sends."""
        sent = None if type(buf) is ndarray else self._messages.sending(operation, buf, stream)
        if sent is None:
            refuse_stream(operation, stream)
        return sent

    def _is_one_shot(self, operation: str, algorithm: str) -> bool:
        """Return whether kernels match the message of a call with ``algorithm=``."""
        if algorithm not in _ALGORITHMS:
            raise InvalidUsageError(f"{operation}: algorithm={algorithm!r}: use one of {', '.join(_ALGORITHMS)}")
        if not self._messages.on_gpu:
            raise _for_device_arrays(operation, algorithm)
        return algorithm == "one_shot"


def _refuse_options(operation: str, stream: Any, algorithm: str, *buffers: Any) -> None:
    """Raise for options of device arrays that are given with host arrays; one that is None may stand for either."""
    refuse_stream(operation, stream)
    if algorithm != "auto" and not any(buf is None for buf in buffers):
        raise _for_device_arrays(operation, algorithm)


def _for_device_arrays(operation: str, algorithm: str) -> InvalidUsageError:
    return InvalidUsageError(f'{operation}: algorithm="{algorithm}" is for device arrays: use "auto"')
