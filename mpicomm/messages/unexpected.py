"""The queue of unexpected messages: probes have taken them from MPI before a receive asked for them."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.messages.incoming import Correct, Receiver
from mpicomm.messages.matched import Matched
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.mpi.shown import mprobe, probe, recv


class UnexpectedQueue:
    """The messages that probes have taken from MPI, in order, on one communicator. Receives look here first.

    A probe takes a message of the length of a header, because only a receive can look into it.

    The queue also holds all older messages of the same source. Without them, a receive of any tag would find the newer
    message here first, and that message would overtake them.
    """

    def __init__(self, receiver: Receiver, comm: MPI.Intracomm, secret: bytes | None) -> None:
        self._receiver = receiver
        self._comm = comm
        self._secret = secret
        self.kept: list[Matched] = []
        """The messages in order."""

    def take(self, source: int, tag: int) -> Matched | None:
        """Remove and return the first message that matches, or return None."""
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
            self._take_up_to(seen.source, seen.tag)
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

    def _take_up_to(self, source: int, tag: int) -> None:
        """Take the messages of a source from MPI, up to the first message with that tag."""
        seen = MPI.Status()
        while message := MPI.Intracomm.Improbe(self._comm, source, MPI.ANY_TAG, seen):
            self.kept.append(Matched.of(self._receiver, message, seen, self._secret))
            if seen.tag == tag:
                return


class Posted:
    """A receive of a source and a tag. It looks into the queue when it begins, then asks MPI."""

    __slots__ = ("_comm", "_queue", "_source", "_tag")

    def __init__(self, queue: UnexpectedQueue, comm: MPI.Intracomm, source: int, tag: int) -> None:
        self._queue = queue
        self._comm = comm
        self._source = source
        self._tag = tag

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive as MPI's Recv does."""
        matched = self._queue.take(self._source, self._tag) if self._queue.kept else None
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
