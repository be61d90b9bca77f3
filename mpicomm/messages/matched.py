"""Messages that `Mprobe` and `Improbe` return: MPI has matched them, and no call has received them yet."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.messages.incoming import Correct, Receiver
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader
from mpicomm.messages.self_messages import Content, match, start_unpickling


class Matched(MPI.Message):
    """A matched message of a communicator on GPUs. An array of the host or of a GPU can receive it."""

    _receiver: Receiver
    source: int
    tag: int
    _nbytes: int
    """The length of the data."""
    _carried_nbytes: int
    """The length of the message that MPI has. For a rendezvous header this is less than the data."""
    _sent_again: MPI.Request | None

    @classmethod
    def of(cls, receiver: Receiver, message: MPI.Message, status: MPI.Status, secret: bytes | None) -> Matched:
        """Wrap a message of MPI's. ``status`` is the status of its probe."""
        source, tag, nbytes = status.source, status.tag, status.Get_count(MPI.BYTE)
        again = None
        if nbytes == HEADER_NBYTES and secret is not None:
            # The length may be the length of a rendezvous header. MPI shows the content of a message only to a receive.
            # So this receives the message, sends it once more to this process, and matches it again.
            content = np.empty(HEADER_NBYTES, np.uint8)
            message.Recv([content, HEADER_NBYTES, MPI.PACKED])
            header = RendezvousHeader.unpack(content.tobytes(), secret)
            nbytes = nbytes if header is None else header.nbytes
            message, again = match(content)
        self = cls(message)
        self._receiver, self._nbytes, self._sent_again = receiver, nbytes, again
        self._carried_nbytes = nbytes if again is None else HEADER_NBYTES
        self.source, self.tag = source, tag
        return self

    def fill_status(self, status: MPI.Status | None) -> None:
        """Fill a status as a probe of this message does."""
        if status is not None:
            self.correct(status)
            status.Set_elements(MPI.BYTE, self._nbytes)

    def correct(self, status: MPI.Status) -> None:
        """Write the sender into a status, because MPI names this process if it has sent the message once more."""
        status.Set_source(self.source)
        status.Set_tag(self.tag)

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive the message; see mpi4py. Device arrays are as in ``Communicator.Recv``."""
        self._receiver.receive_matched(self, buf, status)

    def Irecv(self, buf: Any) -> MPI.Request:
        """Start to receive the message; see mpi4py. Device arrays are as in ``Communicator.Irecv``."""
        return self._receiver.start_receive_matched(self, buf)

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive a message of a Python object; see mpi4py."""
        return MPI.pickle.loads(self._content(MPI.Status() if status is None else status))

    def irecv(self) -> MPI.Request:
        """Start to receive a message of a Python object; see mpi4py."""
        return start_unpickling(self._content(MPI.Status()))

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive as MPI's Recv does: data, or a rendezvous header."""
        super().Recv(spec, status)
        self.correct(status)

    def irecv_into(self, spec: Any) -> tuple[MPI.Request, Correct]:
        """Start to receive as MPI's Irecv does. `correct` is for the status of the request."""
        return super().Irecv(spec), self.correct

    def _content(self, status: MPI.Status) -> Content:
        content = np.empty(self._carried_nbytes, np.uint8)
        self.recv_into([content, content.size, MPI.PACKED], status)
        return content
