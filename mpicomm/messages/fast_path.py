"""`Send`, `Recv` and `Sendrecv` of plain arrays with few calls of Python, for the messages that programs repeat.

A message takes this way where one kernel copies it and its array is a `PlainArray`. A sender also needs an idle place
of that size in its outbox, and a receiver must have opened the sender's block. All other messages go through calls.py,
which also raises all errors of arguments. Both ways send the same descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.messages.description import DESCRIPTION_NBYTES
from mpicomm.messages.memory import MessageMemory
from mpicomm.messages.plain_array import PlainArray, read_both, read_plain
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.messages.unexpected import UnexpectedQueue
from mpicomm.mpi.shown import recv, sendrecv

Arrived = Any
"""False where nothing was done, True where the copy of the message is enqueued. Else the host memory to which MPI has
received the message, for `Messages.finish`."""

_byte, _packed = MPI.BYTE, MPI.PACKED
_LEAST_SPARE_NBYTES = 64 << 10


class FastPath:
    """The fast way of one communicator's messages; ``near`` are the ranks whose memory this rank opens. Local."""

    def __init__(
        self, comm: MPI.Intracomm, near: Collection[int], memory: MessageMemory, unexpected: UnexpectedQueue
    ) -> None:
        self._comm = comm
        self._near = near
        self._memory = memory
        self._unexpected = unexpected
        # Staging memory that holds nothing any more: as many arrays as threads receive at once. The system provides no
        # pages for the parts that no message has filled.
        self._spare: list[list[Any]] = []

    def send(self, send: Callable[..., Any], buf: Any, dest: int, tag: int, stream: Any) -> bool:
        """Send ``buf`` with ``send``, which blocks until MPI has taken the message. Return whether that was done."""
        rendezvous = self._memory.made
        if rendezvous is None or dest not in self._near:
            return False
        sent = read_plain(rendezvous.device, buf, stream)
        if sent is None:
            return False
        address, nbytes, ordered = sent
        place = rendezvous.take_place(nbytes)
        if place is None:
            return False
        # The copy is enqueued after MPI's call, so that the receiver works at the same time: its kernel waits for this
        # one. Until then this thread owes it to the stream, because nothing of another thread may come before it.
        threads = rendezvous.device.threads(ordered)
        threads.owe(rendezvous.fill, place, address, nbytes, ordered)
        try:
            send(self._comm, place.message, dest, tag)
        except Exception:  # MPI has refused the message
            if threads.forgive():
                rendezvous.put_back(place)
            else:
                rendezvous.give_back(place, ordered)
            raise
        except BaseException:
            threads.settle()  # a Ctrl-C may come after MPI has sent the message
            raise
        threads.settle()
        return True

    def receive(self, buf: Any, source: int, tag: int, status: MPI.Status, stream: Any) -> Arrived:
        """Receive into ``buf``, and fill ``status``."""
        rendezvous = self._memory.made
        if rendezvous is None or self._unexpected:
            return False
        received = read_plain(rendezvous.device, buf, stream)
        if received is None:
            return False
        staging = self._staging(received[1])
        recv(self._comm, staging, source, tag, status)
        return self._arrived(rendezvous, buf, received, staging, status)

    def exchange(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int,
        recvbuf: Any,
        source: int,
        recvtag: int,
        status: MPI.Status,
        stream: Any,
    ) -> Arrived:
        """Send ``sendbuf`` and receive into ``recvbuf``, and fill ``status``."""
        rendezvous = self._memory.made
        if rendezvous is None or self._unexpected or dest not in self._near:
            return False
        both = read_both(rendezvous.device, sendbuf, recvbuf, stream)
        if both is None:
            return False
        (address, nbytes, ordered), received = both
        place = rendezvous.take_place(nbytes)
        if place is None:
            return False
        # Before MPI's call, which returns when both messages are matched: what this rank receives may depend on what it
        # sends here.
        rendezvous.fill(place, address, nbytes, ordered)
        staging = self._staging(received[1])
        try:
            sendrecv(self._comm, place.message, dest, sendtag, staging, source, recvtag, status)
        except Exception as error:
            # MPI has refused the message, unless the other one was too long.
            if not isinstance(error, MPI.Exception) or error.Get_error_class() != MPI.ERR_TRUNCATE:
                rendezvous.give_back(place, ordered)
            raise
        return self._arrived(rendezvous, recvbuf, received, staging, status)

    def _staging(self, nbytes: int) -> list[Any]:
        """Return memory for a description, or for data that fills an array, as MPI takes it."""
        room = nbytes if nbytes > DESCRIPTION_NBYTES else DESCRIPTION_NBYTES
        staging = self._spare.pop() if self._spare else None
        if staging is None or staging[0].size < room:
            return [np.empty(max(room, _LEAST_SPARE_NBYTES), np.uint8), room, _packed]
        staging[1] = room
        return staging

    def _arrived(
        self, rendezvous: Rendezvous, buf: Any, received: PlainArray, staging: list[Any], status: MPI.Status
    ) -> Arrived:
        message, device = staging[0], rendezvous.device
        if status.Get_count(_byte) != DESCRIPTION_NBYTES or device.waits_beside(received[2], buf):
            return message
        if not rendezvous.receive_again(message, received, status):
            return message
        self._spare.append(staging)
        return True
