"""Roll calls: all ranks of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank calls the other ranks, hears a word of each of them, and tells all words to all. A rank
that has given up before the call says so. So a first rank that comes late does not take ranks that have left for ranks
that are here. An exchange of a `Group` does the same with results and errors, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, name_ranks
from mpicomm.log import logger
from mpicomm.waiting import wait_until, without_sleep

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank

_HERE, _LEFT = 1, 2  # words of a rank; 0 stands for a rank that has said nothing
_CALL = b"\0"


def did_not_arrive(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[object] = []
"""Requests that may never complete. MPI may still write to their buffers, so the requests stay and keep them."""


class _ByCollectives:
    """Carries the words of all ranks of ``comm`` by collectives of MPI.

    ``comm`` may belong to the user, whose receives may take any message. With a separate count for each rank MPICH and
    Open MPI send each word straight to its rank, and not along a tree.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.index, self.ranks = comm.rank, range(comm.size)

    def tell(self, text: bytes) -> list[MPI.Request]:
        """Send ``text`` from the first rank to each other rank."""
        size = len(self.ranks)
        return [self._comm.Iscatterv([text * size, [len(text)] * size, MPI.BYTE], MPI.IN_PLACE)]

    def listen(self, text: bytearray) -> MPI.Request:
        """Receive the first rank's text."""
        return self._comm.Iscatterv(None, [text, MPI.BYTE])

    def hear(self, words: bytearray) -> list[MPI.Request]:
        """Receive the words of all ranks on the first rank."""
        return [self._comm.Igatherv(MPI.IN_PLACE, [words, [1] * len(self.ranks), MPI.BYTE])]

    def say(self, word: int) -> MPI.Request:
        """Send this rank's word to the first rank."""
        return self._comm.Igatherv([bytes((word,)), MPI.BYTE], None)


class ByMessages:
    """Carries the words of ``ranks`` by messages, as `_ByCollectives`, but in a third of the time.

    Only mpicomm uses ``comm``, and ``tag`` only this object.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> None:
        self._comm, self._tag = comm, tag
        self.index, self.ranks = ranks.index(comm.rank), ranks

    def tell(self, text: bytes) -> list[MPI.Request]:
        return [self._send(text, rank) for rank in self.ranks[1:]]

    def listen(self, text: bytearray) -> MPI.Request:
        return self._comm.Irecv([text, MPI.BYTE], self.ranks[0], self._tag)

    def hear(self, words: bytearray) -> list[MPI.Request]:
        places = memoryview(words)
        return [
            self._comm.Irecv([places[index : index + 1], MPI.BYTE], rank, self._tag)
            for index, rank in enumerate(self.ranks)
            if index
        ]

    def say(self, word: int) -> MPI.Request:
        return self._send(bytes((word,)), self.ranks[0])

    def _send(self, text: bytes, rank: int) -> MPI.Request:
        """Send without waiting. If MPI knows that the rank is dead, send nothing: its silence names it."""
        try:
            return self._comm.Isend([text, MPI.BYTE], rank, self._tag)
        except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
            logger.info("cannot send to rank %d: %s", rank, error)
            return MPI.REQUEST_NULL


def roll_call(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
    carrier: ByMessages | None = None,
) -> None:
    """Return when all ranks of ``comm`` have called it, or those of ``carrier``. Collective over them, blocking.

    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so the same ranks can call again. After an error words of this call may remain in the communicator of
    ``carrier``, so nobody frees it.

    The error may be imprecise: without the first rank no rank hears of the others, so the error names only the first
    rank, also if more ranks are missing.
    """
    require_own_process(step)
    by = carrier or _ByCollectives(comm)
    everyone, size = by.ranks, len(by.ranks)
    if size == 1:
        return
    words = bytearray(size)
    pending: list[MPI.Request] = []  # in the end the last one completes last, so it is asked first
    sent: list[MPI.Request] = []

    def wait(ready: Callable[[], bool], limit_s: float) -> bool:
        if without_sleep(ready):
            return True
        with page().step(step, ranks_in_world(comm, everyone)):
            return wait_until(ready, limit_s)

    def all_done() -> bool:
        while pending and pending[-1].Test():
            pending.pop()
        return not pending

    try:
        if by.index == 0:
            words[0] = _HERE
            sent += by.tell(_CALL)
            pending += by.hear(words)
            # This waits for the words alone. MPI may report an error for a send to a dead rank, and its error would
            # take the place of the error that names the silent rank.
            wait(all_done, timeout_s)
            said = bytes(words)  # some may not have arrived
            pending += (*sent, *by.tell(said))
            if said.count(_HERE) == size:
                wait(all_done, timeout_s)
        else:
            call = by.listen(bytearray(1))
            pending.append(call)
            called = wait(call.Test, timeout_s + GRACE_S)
            pending.append(by.say(_HERE if called else _LEFT))
            pending.append(by.listen(words))
            answered = called and wait(all_done, timeout_s + GRACE_S)
            said = bytes(words) if answered else b"\0" + bytes((_HERE,)) * (size - 1)
        if said.count(_HERE) != size:
            # If a rank has left, the first rank was late; else the silent ranks are late.
            missing = [everyone[0]] if _LEFT in said else [everyone[at] for at, word in enumerate(said) if not word]
            way_out = absence_reason(missing) or "let every rank make this call, or raise timeout_s="
            raise did_not_arrive(step, missing, timeout_s, way_out)
    except BaseException:  # also after a Ctrl-C
        abandoned.extend((*sent, *pending))
        raise


def private_copy(
    comm: MPI.Intracomm,
    step: str,
    timeout_s: float,
    absence_reason: Callable[[Sequence[int]], str] = lambda ranks: "",
) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `roll_call` does. If a rank dies after the roll call, the other ranks hang in MPI, because MPI has no
    nonblocking `Split`.
    """
    roll_call(comm, step, timeout_s, absence_reason)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))
