"""The point-to-point calls of a Communicator on device arrays: by MPI, on host copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.dispatcher import Collectives, is_on_device, refuse_stream
from mpicomm.guard import require_host


class PointToPoint(MPI.Intracomm):
    """mpi4py's point-to-point calls on arrays of the host or of a GPU.

    Host arrays are MPI's. A device array is copied to pinned host memory and goes to MPI from there, which matches by
    source and tag: blocking calls block the caller, requests complete when what arrives is on the device. ``stream``
    orders the copies, as for collectives. `SymmetricArray.put` and ``signal`` move data without that detour.
    """

    _collectives: Collectives

    def Send(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        send = super().Send
        self._blocking("Send", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Ssend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        send = super().Ssend
        self._blocking("Ssend", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Rsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        send = super().Rsend
        self._blocking("Rsend", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Bsend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``buf``; see mpi4py."""
        send = super().Bsend
        self._blocking("Bsend", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Recv(
        self,
        buf: Any,
        source: int = MPI.ANY_SOURCE,
        tag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
        *,
        stream: Any = None,
    ) -> None:
        """Receive into ``buf``; see mpi4py."""
        receive = super().Recv
        self._blocking("Recv", lambda spec: receive(spec, source, tag, status), [(buf, True, "buf")], stream)

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
    ) -> None:
        """Send one buffer and receive into another; see mpi4py."""
        both = super().Sendrecv
        self._blocking(
            "Sendrecv",
            lambda send, receive: both(send, dest, sendtag, receive, source, recvtag, status),
            [(sendbuf, False, "sendbuf"), (recvbuf, True, "recvbuf")],
            stream,
        )

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
        replace = super().Sendrecv_replace
        self._blocking(
            "Sendrecv_replace",
            lambda spec: replace(spec, dest, sendtag, source, recvtag, status),
            [(buf, True, "buf")],
            stream,
        )

    def Isend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; see mpi4py."""
        send = super().Isend
        return self._nonblocking("Isend", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Issend(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Request:
        """Start to send ``buf``; see mpi4py."""
        send = super().Issend
        return self._nonblocking("Issend", lambda spec: send(spec, dest, tag), [(buf, False, "buf")], stream)

    def Irecv(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Request:
        """Start to receive into ``buf``; see mpi4py."""
        receive = super().Irecv
        return self._nonblocking("Irecv", lambda spec: receive(spec, source, tag), [(buf, True, "buf")], stream)

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
        both = super().Isendrecv
        return self._nonblocking(
            "Isendrecv",
            lambda send, receive: both(send, dest, sendtag, receive, source, recvtag),
            [(sendbuf, False, "sendbuf"), (recvbuf, True, "recvbuf")],
            stream,
        )

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
        return super().Recv_init(buf, source, tag)

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
        return super().Isendrecv_replace(buf, dest, sendtag, source, recvtag)

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

    def _blocking(
        self, operation: str, call: Callable[..., None], buffers: list[tuple[Any, bool, str]], stream: Any
    ) -> None:
        if any(is_on_device(spec) for spec, _, _ in buffers):
            self._collectives.through_host(operation, call, buffers, stream)
        else:
            refuse_stream(operation, stream)
            call(*(spec for spec, _, _ in buffers))

    def _nonblocking(
        self, operation: str, call: Callable[..., MPI.Request], buffers: list[tuple[Any, bool, str]], stream: Any
    ) -> MPI.Request:
        if any(is_on_device(spec) for spec, _, _ in buffers):
            return self._collectives.start_through_host(operation, call, buffers, stream)
        refuse_stream(operation, stream)
        return call(*(spec for spec, _, _ in buffers))
