"""Roll calls: all ranks of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank calls the other ranks, hears a word of each of them, and tells all words to all. A rank
that has given up before the call says so. So a first rank that comes late does not take ranks that have left for ranks
that are here. An exchange of a `Group` does the same with results and errors, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, name_ranks
from mpicomm.log import logger
from mpicomm.waiting import wait_until, without_sleep

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank

_HERE, _LEFT = 1, 2  # words of a rank; 0 stands for a rank that has said nothing


def did_not_arrive(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[object] = []
"""Requests that may never complete, and objects with such requests. They stay, because MPI may still write to the
buffers of the requests."""


class _ByCollectives:
    """Carries the words of all ranks of ``comm`` in one roll call, by collectives of MPI.

    ``comm`` may belong to the user, whose receives may take any message. With a separate count for each rank MPICH and
    Open MPI send each word straight to its rank, and not along a tree.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self.index, self.ranks = comm.rank, range(comm.size)
        self.said, self.answer = bytearray(comm.size), bytearray(comm.size)  # as in `ByMessages`
        self._begun: list[MPI.Request] = []

    def call(self) -> list[MPI.Request]:
        return self._scatter(bytearray(1))

    def hear(self) -> list[MPI.Request]:
        counts = [1] * len(self.ranks)
        own: Any = [memoryview(self.said)[self.index :], 1, MPI.BYTE] if self.index else MPI.IN_PLACE
        self._begun.append(self._comm.Igatherv(own, None if self.index else [self.said, counts, MPI.BYTE]))
        return self._begun[-1:]

    def tell(self) -> list[MPI.Request]:
        return self._scatter(self.answer)

    def _scatter(self, text: bytearray) -> list[MPI.Request]:
        size = len(self.ranks)
        everywhere = None if self.index else [text * size, [len(text)] * size, MPI.BYTE]
        self._begun.append(self._comm.Iscatterv(everywhere, [text, MPI.BYTE] if self.index else MPI.IN_PLACE))
        return self._begun[-1:]


class ByMessages:
    """Carries the words of ``ranks`` in successive roll calls, by messages, in a small part of the time.

    Only mpicomm uses ``comm``, and ``tag`` only this object. ``call`` starts the call of the first rank, ``hear`` the
    words for it, and ``tell`` its answer to all. The requests are persistent, because MPI needs more time to prepare a
    message of a byte than to send it. After an error of `roll_call` some may never complete, so nobody uses or frees
    the object then.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> None:
        self.index, self.ranks = ranks.index(comm.rank), ranks
        self.said = bytearray(len(ranks))
        """The words that the first rank hears, where more may come at any time. Another rank has only its own."""
        self.answer = bytearray(len(ranks))
        """The words of all ranks, as the first rank tells them."""
        first = self.index == 0
        down, up = (comm.Send_init, comm.Recv_init) if first else (comm.Recv_init, comm.Send_init)
        peers = dict(enumerate(ranks[1:], 1)) if first else {self.index: ranks[0]}
        call, words = bytearray(1), memoryview(self.said)
        calls = [down([call, MPI.BYTE], peer, tag) for peer in peers.values()]
        said = [up([words[at : at + 1], MPI.BYTE], peer, tag) for at, peer in peers.items()]
        answers = [down([self.answer, MPI.BYTE], peer, tag) for peer in peers.values()]
        self._requests = (*calls, *said, *answers)
        self.call = partial(_started, calls, sends=first)
        self.hear = partial(_started, said, sends=not first)
        self.tell = partial(_started, answers, sends=first)

    def free(self) -> None:
        """Free the requests; local."""
        for request in self._requests:
            request.Free()


def _started(requests: list[MPI.Prequest], *, sends: bool) -> list[MPI.Prequest]:
    """Start requests, and return them. If MPI knows that a rank is dead, send it nothing: its silence names it."""
    for request in requests:
        try:
            request.Start()
        except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
            if not sends:  # the buffer still has the words of an earlier call, which would pass for an answer
                raise
            logger.info("cannot send to a rank: %s", error)
    return requests


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

    def wait(requests: Sequence[MPI.Request], limit_s: float) -> bool:
        for request in requests:
            if not (request.Test() or without_sleep(request.Test)):
                with page().step(step, ranks_in_world(comm, everyone)):
                    return wait_until(lambda: all(each.Test() for each in requests), limit_s)
        return True

    try:
        if by.index == 0:
            by.said[:] = bytes((_HERE, *bytes(size - 1)))
            calls = by.call()
            # This waits for the words alone. MPI may report an error for a send to a dead rank, and its error would
            # take the place of the error that names the silent rank.
            wait(by.hear(), timeout_s)
            by.answer[:] = said = bytes(by.said)  # some may not have arrived
            answers = by.tell()
            if 0 not in said and _LEFT not in said:
                wait(calls, timeout_s)
                wait(answers, timeout_s)
        else:
            called = wait(by.call(), timeout_s + GRACE_S)
            by.said[by.index] = _HERE if called else _LEFT
            words, answers = by.hear(), by.tell()
            answered = called and wait((*answers, *words), timeout_s + GRACE_S)
            said = bytes(by.answer) if answered else b"\0" + bytes((_HERE,)) * (size - 1)
        if 0 in said or _LEFT in said:
            # If a rank has left, the first rank was late; else the silent ranks are late.
            missing = [everyone[0]] if _LEFT in said else [everyone[at] for at, word in enumerate(said) if not word]
            way_out = absence_reason(missing) or "let every rank make this call, or raise timeout_s="
            raise did_not_arrive(step, missing, timeout_s, way_out)
    except BaseException:  # also after a Ctrl-C
        abandoned.append(by)
        raise


def private_copy(
    comm: MPI.Intracomm, step: str, timeout_s: float, absence_reason: Callable[[Sequence[int]], str] = lambda ranks: ""
) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `roll_call` does. If a rank dies after the roll call, the other ranks hang in MPI, because MPI has no
    nonblocking `Split`.
    """
    roll_call(comm, step, timeout_s, absence_reason)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))
