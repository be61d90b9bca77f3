"""The unexpected queue: messages that probes have taken from MPI, and that no call has received yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from mpi4py import MPI

from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader
from mpicomm.mpi.doctor_rows import mprobe, probe, recv

_lock = threading.Lock()  # so that no thread receives the message of another thread


def unpack(packed: memoryview, spec: Any) -> None:
    """Unpack bytes into a buffer specification. Raises `MPI.Exception` for more bytes than the buffer takes."""
    with _lock:
        _self_comm().Sendrecv([packed, packed.nbytes, MPI.PACKED], 0, 0, spec, 0, 0)


@cache  # the caller has the lock
def _self_comm() -> MPI.Intracomm:
    # This is a duplicate, because the program itself may receive on MPI.COMM_SELF, which may be a Communicator.
    return MPI.Intracomm(MPI.COMM_SELF).Dup()


FillSource = Callable[[MPI.Status], None]
"""Writes the source and the tag of a message into a status."""
ReceiveInto = Callable[[Any, MPI.Status], None]
"""Receives a message into a buffer specification, as MPI's Recv does, and fills the status."""
StartReceiveInto = Callable[[Any], tuple[MPI.Request, FillSource | None]]
"""Starts to receive, as MPI's Irecv does. The function that it returns corrects the status of the request."""


class MatchedMessage(MPI.Message):
    """A matched message of a communicator on GPUs. A host array or a device array can receive it."""

    _messages: Any
    """The `Messages` of the communicator."""
    source: int
    tag: int
    _nbytes: int
    """The length of the data."""
    _carried_nbytes: int
    """The length of the message that MPI has. For a rendezvous header this is less than the data."""
    _resend: MPI.Request | None
    """The send of this process to itself, which has to live until the message is received."""

    @classmethod
    def of(cls, messages: Any, message: MPI.Message, status: MPI.Status, secret: bytes | None) -> MatchedMessage:
        """Wrap a message of MPI's. ``status`` is the status of its probe."""
        source, tag, nbytes = status.source, status.tag, status.Get_count(MPI.BYTE)
        resend = None
        if nbytes == HEADER_NBYTES and secret is not None:
            # The length may be the length of a rendezvous header. MPI shows the content of a message only to a receive.
            # So this receives the message, sends it to this process itself, and matches it again.
            content = bytearray(HEADER_NBYTES)
            message.Recv([content, HEADER_NBYTES, MPI.PACKED])
            header = RendezvousHeader.unpack(content, secret)
            nbytes = nbytes if header is None else header.nbytes
            with _lock:
                resend = _self_comm().Isend([content, HEADER_NBYTES, MPI.PACKED], 0, 0)
                message = _self_comm().Mprobe(0, 0)
        self = cls(message)
        self._messages, self._nbytes, self._resend = messages, nbytes, resend
        self._carried_nbytes = nbytes if resend is None else HEADER_NBYTES
        self.source, self.tag = source, tag
        return self

    def fill_status(self, status: MPI.Status | None) -> None:
        """Fill a status as a probe of this message does."""
        if status is not None:
            self._fill_source(status)
            status.Set_elements(MPI.BYTE, self._nbytes)

    def _fill_source(self, status: MPI.Status) -> None:
        # MPI names this process as the source of a message that it has sent to itself.
        status.Set_source(self.source)
        status.Set_tag(self.tag)

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive the message; see mpi4py. Device arrays are as in ``Communicator.Recv``."""
        self._messages.receive_matched(self, buf, status)

    def Irecv(self, buf: Any) -> MPI.Request:
        """Start to receive the message; see mpi4py. Device arrays are as in ``Communicator.Irecv``."""
        request: MPI.Request = self._messages.start_receive_matched(self, buf)
        return request

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive a message of a Python object; see mpi4py."""
        return MPI.pickle.loads(self._pickled(MPI.Status() if status is None else status))

    def irecv(self) -> MPI.Request:
        """Start to receive a message of a Python object; see mpi4py."""
        pickled = self._pickled(MPI.Status())
        with _lock:  # mpi4py's own request unpickles the object
            request = _self_comm().irecv(bytearray(len(pickled)), 0, 0)
            _self_comm().Send([pickled, MPI.PACKED], 0, 0)
            return request

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive data, or a rendezvous header: a `ReceiveInto`."""
        super().Recv(spec, status)
        self._fill_source(status)

    def irecv_into(self, spec: Any) -> tuple[MPI.Request, FillSource]:
        """Start to receive: a `StartReceiveInto`."""
        return super().Irecv(spec), self._fill_source

    def _pickled(self, status: MPI.Status) -> bytearray:
        pickled = bytearray(self._carried_nbytes)
        self.recv_into([pickled, MPI.PACKED], status)
        return pickled


class UnexpectedQueue:
    """The messages that probes have taken from MPI, in order, on one communicator. Receives search it before MPI.

    A probe takes a message of the length of a header from MPI, because only a receive shows its content.

    The queue also holds all older messages of the same source. Without them, a receive of any tag would find the newer
    message here first, and that message would overtake them.
    """

    def __init__(self, messages: Any, comm: MPI.Intracomm, secret: bytes | None) -> None:
        self._messages = messages
        self._comm = comm
        self._secret = secret
        # Two threads that receive must not take one message. A thread that receives must not replace the list while a
        # probe adds to it: the message would be lost. Of two probes none may add between the messages of the other.
        self._lock = threading.Lock()
        self.queued: list[MatchedMessage] = []
        """The messages in order."""

    def take(self, source: int, tag: int) -> MatchedMessage | None:
        """Remove and return the first message that matches, or return None."""
        if not self.queued:
            return None
        with self._lock:
            found = self._find(source, tag)
            if found is not None:
                self.queued = [matched for matched in self.queued if matched is not found]
        return found

    def recv_into(self, source: int, tag: int, spec: Any, status: MPI.Status) -> None:
        """Receive the next message of this source and tag, from the queue or from MPI."""
        matched = self.take(source, tag)
        if matched is None:
            recv(self._comm, spec, source, tag, status)
        else:
            matched.recv_into(spec, status)

    def irecv_into(self, source: int, tag: int, spec: Any) -> tuple[MPI.Request, FillSource | None]:
        """Start to receive the next message of this source and tag, from the queue or from MPI."""
        matched = self.take(source, tag)
        if matched is None:
            return MPI.Intracomm.Irecv(self._comm, spec, source, tag), None
        return matched.irecv_into(spec)

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
                    self.queued.append(MatchedMessage.of(self._messages, message, first, self._secret))
                    if first.tag == seen.tag:
                        break
                found = self._find(source, tag)  # None if another thread has received the message in the meantime
        found.fill_status(status)
        return True

    def match(self, source: int, tag: int, status: MPI.Status | None, *, wait: bool) -> MatchedMessage | None:
        """Match a message as MPI's Mprobe and Improbe do."""
        matched = self.take(source, tag)
        if matched is None:
            seen = MPI.Status()
            match = mprobe if wait else MPI.Intracomm.Improbe
            message = match(self._comm, source, tag, seen)
            if message is None:
                return None
            matched = MatchedMessage.of(self._messages, message, seen, self._secret)
        matched.fill_status(status)
        return matched

    def _find(self, source: int, tag: int) -> MatchedMessage | None:
        for matched in self.queued:
            if source in (matched.source, MPI.ANY_SOURCE) and tag in (matched.tag, MPI.ANY_TAG):
                return matched
        return None
