"""The point-to-point calls of a Communicator: on host arrays MPI's, on device arrays matched by MPI, moved by GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mpi4py import MPI

from mpicomm.api.host_only import require_host
from mpicomm.errors import InvalidUsageError
from mpicomm.messages.calls import Messages
from mpicomm.messages.in_stream_order import InStreamOrder
from mpicomm.mpi.location import is_on_device, refuse_stream
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest, Work

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
        # Of the host's small messages one more call would be a fifth of the time.
        if (algorithm != "auto" or self._messages.on_gpu) and self._is_in_stream_order("Send", algorithm, stream, buf):
            self._in_stream_order.exchange("Send", stream, send=(buf, dest, tag))
        else:
            self._send("Send", super().Send, buf, dest, tag, stream)

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        self._send("Ssend", super().Ssend, buf, dest, tag, stream)

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        self._send("Rsend", super().Rsend, buf, dest, tag, stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        self._send("Bsend", super().Bsend, buf, dest, tag, stream)

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
        if (algorithm != "auto" or messages.on_gpu) and self._is_in_stream_order("Recv", algorithm, stream, buf):
            self._in_stream_order.exchange("Recv", stream, receive=(buf, source, tag), status=status)
        elif messages.described or is_on_device(buf):
            messages.receive("Recv", messages.taking(source, tag), buf, status, stream)
        else:
            refuse_stream("Recv", stream)
            super().Recv(buf, source, tag, status)

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
        """Send one buffer and receive into another; see mpi4py."""
        messages = self._messages
        if (algorithm != "auto" or messages.on_gpu) and self._is_in_stream_order(
            "Sendrecv", algorithm, stream, sendbuf, recvbuf
        ):
            self._in_stream_order.exchange(
                "Sendrecv", stream, (sendbuf, dest, sendtag), (recvbuf, source, recvtag), status
            )
        elif messages.described or is_on_device(sendbuf) or is_on_device(recvbuf):
            receive = messages.taking(source, recvtag)
            messages.exchange("Sendrecv", (sendbuf, dest, sendtag), receive, recvbuf, status, stream)
        else:
            refuse_stream("Sendrecv", stream)
            super().Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)

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
        if messages.described or is_on_device(buf):
            receive = messages.taking(source, recvtag)
            messages.exchange("Sendrecv_replace", (buf, dest, sendtag), receive, buf, status, stream, replace=True)
        else:
            refuse_stream("Sendrecv_replace", stream)
            super().Sendrecv_replace(buf, dest, sendtag, source, recvtag, status)

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; see mpi4py."""
        return self._start_send("Isend", super().Isend, buf, dest, tag, stream)

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; see mpi4py."""
        return self._start_send("Issend", super().Issend, buf, dest, tag, stream)

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Request:
        """Start to receive into ``buf``; see mpi4py."""
        messages = self._messages
        if messages.described or is_on_device(buf):
            return messages.start_receive("Irecv", messages.beginning(source, tag), buf, stream)
        refuse_stream("Irecv", stream)
        return super().Irecv(buf, source, tag)

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
        messages = self._messages
        if messages.described or is_on_device(sendbuf) or is_on_device(recvbuf):
            return self._start_exchange("Isendrecv", (sendbuf, dest, sendtag), (recvbuf, source, recvtag), stream)
        refuse_stream("Isendrecv", stream)
        return super().Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag)

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Ibsend", buf)
        return super().Ibsend(buf, dest, tag)

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Irsend", buf)
        return super().Irsend(buf, dest, tag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Prequest:
        """As mpi4py's, on host arrays alone."""
        require_host("Send_init", buf)
        return super().Send_init(buf, dest, tag)

    def Recv_init(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MPI.Prequest:
        """As mpi4py's, on host arrays alone."""
        require_host("Recv_init", buf)
        messages = self._messages
        if not messages.described:
            return super().Recv_init(buf, source, tag)

        def begin() -> Work:
            receive = messages.beginning(source, tag)
            return cast(DeferredRequest, messages.start_receive("Recv_init", receive, buf, None, always=True)).work

        return PersistentRequest.of(begin)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Bsend_init", buf)
        return super().Bsend_init(buf, dest, tag)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Ssend_init", buf)
        return super().Ssend_init(buf, dest, tag)

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Rsend_init", buf)
        return super().Rsend_init(buf, dest, tag)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG
    ) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Isendrecv_replace", buf)
        if not self._messages.described:
            return super().Isendrecv_replace(buf, dest, sendtag, source, recvtag)
        return self._start_exchange(
            "Isendrecv_replace", (buf, dest, sendtag), (buf, source, recvtag), None, replace=True
        )

    def Alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """As mpi4py's, on host arrays alone."""
        require_host("Alltoallw", sendbuf, recvbuf)
        return super().Alltoallw(sendbuf, recvbuf)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> MPI.Request:
        """As mpi4py's, on host arrays alone."""
        require_host("Ialltoallw", sendbuf, recvbuf)
        return super().Ialltoallw(sendbuf, recvbuf)

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> MPI.Prequest:
        """As mpi4py's, on host arrays alone."""
        require_host("Alltoallw_init", sendbuf, recvbuf)
        return super().Alltoallw_init(sendbuf, recvbuf, info)

    def Psend_init(
        self, buf: Any, partitions: int, dest: int, tag: int = 0, info: MPI.Info = MPI.INFO_NULL
    ) -> MPI.Prequest:
        """As mpi4py's, on host arrays alone."""
        require_host("Psend_init", buf)
        return super().Psend_init(buf, partitions, dest, tag, info)

    def Precv_init(
        self,
        buf: Any,
        partitions: int,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        info: MPI.Info = MPI.INFO_NULL,
    ) -> MPI.Prequest:
        """As mpi4py's, on host arrays alone."""
        require_host("Precv_init", buf)
        return super().Precv_init(buf, partitions, source, tag, info)

    def Attach_buffer(self, buf: Any) -> None:
        """As mpi4py's, with host memory alone."""
        if not isinstance(buf, int):  # MPI.BUFFER_AUTOMATIC
            require_host("Attach_buffer", buf)
        return super().Attach_buffer(buf)

    def _is_in_stream_order(self, operation: str, algorithm: str, stream: Any, *buffers: Any) -> bool:
        """Whether kernels match the message of a call, and not MPI; local."""
        if algorithm == "auto":
            return self._messages.in_capture(operation, stream, *buffers)
        if algorithm not in _ALGORITHMS:
            raise InvalidUsageError(f"{operation}: algorithm={algorithm!r}: use one of {', '.join(_ALGORITHMS)}")
        if algorithm == "one_shot" and self._messages.on_gpu:
            return True  # host arrays are refused where they are read, which those of known calls are not
        if not self._messages.on_gpu or not any(is_on_device(buf) or buf is None for buf in buffers):
            raise InvalidUsageError(f'{operation}: algorithm="{algorithm}" is for device arrays: use "auto"')
        return False

    def _send(self, operation: str, send: Callable[..., None], buf: Any, dest: int, tag: int, stream: Any) -> None:
        if is_on_device(buf):
            self._messages.send(operation, send, buf, dest, tag, stream)
        else:
            refuse_stream(operation, stream)
            send(buf, dest, tag)

    def _start_send(
        self, operation: str, send: Callable[..., MPI.Request], buf: Any, dest: int, tag: int, stream: Any
    ) -> MPI.Request:
        if is_on_device(buf):
            return self._messages.start_send(operation, send, buf, dest, tag, stream)
        refuse_stream(operation, stream)
        return send(buf, dest, tag)

    def _start_exchange(
        self,
        operation: str,
        send: tuple[Any, int, int],
        receive: tuple[Any, int, int],
        stream: Any,
        *,
        replace: bool = False,
    ) -> MPI.Request:
        """Start to send a buffer to a rank with a tag, and to receive one from a rank with a tag."""
        sendbuf, dest, sendtag = send
        recvbuf, source, recvtag = receive
        on_host = stream if is_on_device(recvbuf) or not is_on_device(sendbuf) else None
        sending = self._start_send(
            operation, super().Isend, sendbuf, dest, sendtag, stream if is_on_device(sendbuf) else None
        )
        begin = self._messages.beginning(source, recvtag)
        return self._messages.start_receive(
            operation, begin, recvbuf, on_host, always=True, replace=replace, before=sending.Test
        )
