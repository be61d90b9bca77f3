"""The persistent point-to-point calls of a Communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from numpy import ndarray

from mpicomm.mpi import host_calls
from mpicomm.mpi.buffers import is_host_view
from mpicomm.mpi.location import refuse_stream
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest

if TYPE_CHECKING:
    from mpicomm.messages.calls import Messages

_bsend_init = MPI.Intracomm.Bsend_init
_recv_init = MPI.Intracomm.Recv_init
_rsend_init = MPI.Intracomm.Rsend_init
_send_init = MPI.Intracomm.Send_init
_ssend_init = MPI.Intracomm.Ssend_init
_ibsend = MPI.Intracomm.Ibsend
_irsend = MPI.Intracomm.Irsend
_isend = MPI.Intracomm.Isend
_issend = MPI.Intracomm.Issend


class PersistentMessages(MPI.Intracomm):
    """mpi4py's persistent sends and receives on arrays of the host or of a GPU. Local.

    On host arrays the request is MPI's, except if a receive may get the rendezvous header of a device array. On device
    arrays each ``Start`` does the work of the nonblocking call. ``stream`` orders the copies, as in `PointToPoint`.

    The calls raise the errors of the nonblocking calls.
    """

    _messages: Messages

    def Send_init(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Prequest:
        """Create a persistent `Send`; see mpi4py."""
        return self._prepare("Send_init", _send_init, _isend, buf, dest, tag, stream)

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Prequest:
        """Create a persistent `Ssend`; see mpi4py."""
        return self._prepare("Ssend_init", _ssend_init, _issend, buf, dest, tag, stream)

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Prequest:
        """Create a persistent `Bsend`; see mpi4py."""
        return self._prepare("Bsend_init", _bsend_init, _ibsend, buf, dest, tag, stream)

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0, *, stream: Any = None) -> MPI.Prequest:
        """Create a persistent `Rsend`; see mpi4py."""
        return self._prepare("Rsend_init", _rsend_init, _irsend, buf, dest, tag, stream)

    def Recv_init(
        self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, *, stream: Any = None
    ) -> MPI.Prequest:
        """Create a persistent `Recv`; see mpi4py."""
        messages = self._messages
        buf, received = messages.read("Recv_init", buf, stream, source, receives=True)
        if received is None or not received.on_device:
            refuse_stream("Recv_init", stream)
        if received is None:
            return _persistent(host_calls.call(_recv_init, self, buf, source, tag, writable=True))

        def begin() -> DeferredRequest:
            # The stream may capture a graph at this Start, so each Start reads the buffer again.
            _, end = messages.read("Recv_init", buf, stream, source, receives=True)
            assert end is not None
            return messages.start_receive(end, messages.posted(source, tag))

        return PersistentRequest.of(begin)

    def _prepare(
        self,
        operation: str,
        prepare: Callable[..., MPI.Request],
        start: Callable[..., MPI.Request],
        buf: Any,
        dest: int,
        tag: int,
        stream: Any,
    ) -> MPI.Prequest:
        messages = self._messages
        is_host = type(buf) is ndarray and (buf.base is None or is_host_view(buf))
        sent = None
        if not is_host:
            buf, sent = messages.read(operation, buf, stream, dest)
        if sent is None:
            refuse_stream(operation, stream)
            return _persistent(host_calls.call(prepare, self, buf, dest, tag))

        def begin() -> DeferredRequest:
            _, sent = messages.read(operation, buf, stream, dest)  # again, because the stream may capture a graph
            assert sent is not None
            return messages.start_send(start, sent, dest, tag)

        return PersistentRequest.of(begin)


def _persistent(request: MPI.Request) -> MPI.Prequest:
    assert isinstance(request, MPI.Prequest)  # mpi4py annotates Ssend_init and others less exactly
    return request
