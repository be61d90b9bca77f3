"""Messages that were matched and not received yet: what Mprobe returns, and what Probe had to look into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicomm.messages.description import NBYTES, Description
from mpicomm.messages.myself import Content, match, start_unpickling

if TYPE_CHECKING:
    from mpicomm.messages.calls import Messages


class Matched(MPI.Message):
    """A message that was matched, on a communicator of GPUs; it is received into arrays of the host or of a GPU."""

    _messages: Messages
    source: int
    tag: int
    _nbytes: int
    _taken_nbytes: int  # less than `_nbytes` of a description
    _sent_again: MPI.Request | None

    @classmethod
    def of(cls, messages: Messages, message: MPI.Message, status: MPI.Status, secret: bytes | None) -> Matched:
        """Wrap a message of MPI's; ``status`` is that of its probe."""
        source, tag, nbytes = status.source, status.tag, status.Get_count(MPI.BYTE)
        again = None
        if nbytes == NBYTES and secret is not None:
            # MPI shows what is in a message to who receives it alone. It is sent once more, to this process itself.
            content = np.empty(NBYTES, np.uint8)
            message.Recv([content, NBYTES, MPI.PACKED])
            described = Description.unpack(content.tobytes(), secret)
            nbytes = nbytes if described is None else described.nbytes
            message, again = match(content)
        self = cls(message)
        self._messages, self._nbytes, self._sent_again = messages, nbytes, again
        self._taken_nbytes = nbytes if again is None else NBYTES
        self.source, self.tag = source, tag
        return self

    def describe(self, status: MPI.Status | None) -> None:
        """Let a status say what a probe of this message does."""
        if status is not None:
            self.correct(status)
            status.Set_elements(MPI.BYTE, self._nbytes)

    def correct(self, status: MPI.Status) -> None:
        """Let a status name the sender, also of a message that this process has sent to itself once more."""
        status.Set_source(self.source)
        status.Set_tag(self.tag)

    def Recv(self, buf: Any, status: MPI.Status | None = None) -> None:
        """Receive the message; see mpi4py. Device arrays as in ``Communicator.Recv``."""
        self._messages.receive("Message.Recv", self.take, buf, status, None)

    def Irecv(self, buf: Any) -> MPI.Request:
        """Start to receive the message; see mpi4py."""
        return self._messages.start_receive("Message.Irecv", self.begin, buf, None, always=True)

    def recv(self, status: MPI.Status | None = None) -> Any:
        """Receive a message of a Python object; see mpi4py."""
        return MPI.pickle.loads(self._content(MPI.Status() if status is None else status))

    def irecv(self) -> MPI.Request:
        """Start to receive a message of a Python object; see mpi4py."""
        return start_unpickling(self._content(MPI.Status()))

    def take(self, spec: Any, status: MPI.Status) -> None:
        """Receive, as MPI does."""
        super().Recv(spec, status)
        self.correct(status)

    def _content(self, status: MPI.Status) -> Content:
        content = np.empty(self._taken_nbytes, np.uint8)
        self.take([content, content.size, MPI.PACKED], status)
        return content

    def begin(self, spec: Any) -> tuple[MPI.Request, Matched]:
        """Start to receive, as MPI does; return the request, and what is to correct its status."""
        return super().Irecv(spec), self


class Stash:
    """Messages that a probe has matched to look into them, in order; receives have to look here first.

    Of every source with a message here, all older ones are here too: else a receive of any tag could overtake them.
    """

    def __init__(self, messages: Messages, comm: MPI.Intracomm, secret: bytes | None) -> None:
        self._messages = messages
        self._comm = comm
        self._secret = secret
        self._kept: list[Matched] = []

    def take(self, source: int, tag: int) -> Matched | None:
        """Return the first message that matches, which is then gone from here."""
        found = self._find(source, tag)
        if found is not None:
            self._kept = [kept for kept in self._kept if kept is not found]
        return found

    def probe(self, source: int, tag: int, status: MPI.Status | None, *, wait: bool) -> bool:
        """Look for a message as MPI's Probe and Iprobe do; the status has the count of what is described."""
        kept = self._find(source, tag)
        seen = MPI.Status() if status is None else status
        while kept is None:
            if wait:
                MPI.Intracomm.Probe(self._comm, source, tag, seen)
            elif not MPI.Intracomm.Iprobe(self._comm, source, tag, seen):
                return False
            if seen.Get_count(MPI.BYTE) != NBYTES:
                return True
            self._keep(seen.source, seen.tag)
            kept = self._find(source, tag)  # None where another thread was faster
        kept.describe(status)
        return True

    def match(self, source: int, tag: int, status: MPI.Status | None, *, wait: bool) -> Matched | None:
        """Return a message as MPI's Mprobe and Improbe do."""
        kept = self.take(source, tag)
        if kept is None:
            seen = MPI.Status()
            probe = MPI.Intracomm.Mprobe if wait else MPI.Intracomm.Improbe
            message = probe(self._comm, source, tag, seen)
            if message is None:
                return None
            kept = Matched.of(self._messages, message, seen, self._secret)
        kept.describe(status)
        return kept

    def _find(self, source: int, tag: int) -> Matched | None:
        for kept in self._kept:
            if source in (kept.source, MPI.ANY_SOURCE) and tag in (kept.tag, MPI.ANY_TAG):
                return kept
        return None

    def _keep(self, source: int, tag: int) -> None:
        """Take the messages of a source up to the first with that tag."""
        seen = MPI.Status()
        while message := MPI.Intracomm.Improbe(self._comm, source, MPI.ANY_TAG, seen):
            self._kept.append(Matched.of(self._messages, message, seen, self._secret))
            if seen.tag == tag:
                return
