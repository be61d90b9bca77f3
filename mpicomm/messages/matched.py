"""Messages that MPI has matched, and that no call has received yet; the queue of those that probes have taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader
from mpicomm.mpi.doctor_rows import mprobe, probe, recv

Content = npt.NDArray[np.uint8]

_lock = threading.Lock()  # so that no thread receives the message of another thread


def unpack(content: Content, spec: Any) -> None:
    """Receive packed bytes into a buffer specification. Raises `MPI.Exception` for more bytes than the buffer takes."""
    with _lock:
        _self_comm().Sendrecv([content, content.size, MPI.PACKED], 0, 0, spec, 0, 0)


def match(content: Content) -> tuple[MPI.Message, MPI.Request]:
    """Return a matched message with that content, and the request of its send.

    The caller keeps the request until it receives.
    """
    with _lock:
        request = _self_comm().Isend([content, content.size, MPI.PACKED], 0, 0)
        return _self_comm().Mprobe(0, 0), request


def start_unpickling(content: Content) -> MPI.Request:
    """Return mpi4py's request for the Python object that is pickled in ``content``."""
    with _lock:
        request = _self_comm().irecv(bytearray(content.size), 0, 0)
        _self_comm().Send([content, content.size, MPI.PACKED], 0, 0)
        return request


@cache  # the caller has the lock
def _self_comm() -> MPI.Intracomm:
    # This is a duplicate, because the program itself may receive on MPI.COMM_SELF, which may be a Communicator.
    return MPI.Intracomm(MPI.COMM_SELF).Dup()


Correct = Callable[[MPI.Status], None]
"""A function that writes the source and the tag of a message into a status."""


class Matched(MPI.Message):
    """A matched message of a communicator on GPUs. An array of the host or of a GPU can receive it."""

    _receiver: Any
    """The `Messages` of the communicator."""
    source: int
    tag: int
    _nbytes: int
    """The length of the data."""
    _carried_nbytes: int
    """The length of the message that MPI has. For a rendezvous header this is less than the data."""
    _sent_again: MPI.Request | None

    @classmethod
    def of(cls, receiver: Any, message: MPI.Message, status: MPI.Status, secret: bytes | None) -> Matched:
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
        request: MPI.Request = self._receiver.start_receive_matched(self, buf)
        return request

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


class UnexpectedQueue:
    """The messages that probes have taken from MPI, in order, on one communicator. Receives look here first.

    A probe takes a message of the length of a header, because only a receive can look into it.

    The queue also holds all older messages of the same source. Without them, a receive of any tag would find the newer
    message here first, and that message would overtake them.
    """

    def __init__(self, receiver: Any, comm: MPI.Intracomm, secret: bytes | None) -> None:
        self._receiver = receiver
        self._comm = comm
        self._secret = secret
        # Two threads that receive must not take one message. A thread that receives must not replace the list while a
        # probe adds to it: the message would be lost. Of two probes none may add between the messages of the other.
        self._lock = threading.Lock()
        self.kept: list[Matched] = []
        """The messages in order."""

    def take(self, source: int, tag: int) -> Matched | None:
        """Remove and return the first message that matches, or return None."""
        if not self.kept:
            return None
        with self._lock:
            found = self._find(source, tag)
            if found is not None:
                self.kept = [matched for matched in self.kept if matched is not found]
        return found

    def probe(self, source: int, tag: int, status: MPI.Status | None, *, wait: bool) -> bool:
        """Probe as MPI's Probe and Iprobe do. The status has the length of the data, also for a rendezvous."""
        found = self._find(source, tag)
        seen = MPI.Status() if status is None else status
        while found is None:
            if wait:
                probe(self._comm, source, tag, seen)
            elif not MPI.Intracomm.Iprobe(self._comm, source, tag, seen):
                return False
            if seen.Get_count(MPI.BYTE) != HEADER_NBYTES:
                return True
            first = MPI.Status()
            with self._lock:
                while message := MPI.Intracomm.Improbe(self._comm, seen.source, MPI.ANY_TAG, first):
                    self.kept.append(Matched.of(self._receiver, message, first, self._secret))
                    if first.tag == seen.tag:
                        break
                found = self._find(source, tag)  # None if another thread has received the message in the meantime
        found.fill_status(status)
        return True

    def match(self, source: int, tag: int, status: MPI.Status | None, *, wait: bool) -> Matched | None:
        """Match a message as MPI's Mprobe and Improbe do."""
        matched = self.take(source, tag)
        if matched is None:
            seen = MPI.Status()
            look = mprobe if wait else MPI.Intracomm.Improbe
            message = look(self._comm, source, tag, seen)
            if message is None:
                return None
            matched = Matched.of(self._receiver, message, seen, self._secret)
        matched.fill_status(status)
        return matched

    def _find(self, source: int, tag: int) -> Matched | None:
        for matched in self.kept:
            if source in (matched.source, MPI.ANY_SOURCE) and tag in (matched.tag, MPI.ANY_TAG):
                return matched
        return None


# It is no named tuple, because every receive makes one, and a named tuple takes twice as long to make.
class Posted:
    """A receive of the next message of a source and a tag. It looks into the queue when it begins, then asks MPI."""

    __slots__ = ("_comm", "_queue", "_source", "_tag")

    def __init__(self, queue: UnexpectedQueue, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._queue = queue
        self._comm = comm
        self._source = source
        self._tag = tag

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive as MPI's Recv does."""
        matched = self._queue.take(self._source, self._tag)
        if matched is None:
            recv(self._comm, spec, self._source, self._tag, status)
        else:
            matched.recv_into(spec, status)

    def irecv_into(self, spec: Any) -> tuple[MPI.Request, Correct | None]:
        """Start to receive as MPI's Irecv does."""
        matched = self._queue.take(self._source, self._tag)
        if matched is None:
            return MPI.Intracomm.Irecv(self._comm, spec, self._source, self._tag), None
        return matched.irecv_into(spec)


Incoming = Posted | Matched
"""A message to receive: the next message of a source and a tag, or a message that a probe has matched."""
