"""Roll calls: all ranks, or some ranks, of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank says that it is here. Other ranks may have come long before, and their deadlines restart.
Then the first rank hears the words of all ranks, and tells all ranks these words. So all ranks know alike who is there.
`Group` does the same with results and errors. A roll call is shorter, and needs no communicator of mpicomm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.agreement import GRACE_S, abandoned, did_not_arrive, ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.log import logger
from mpicomm.waiting import soon, wait_until


def duplicate(comm: MPI.Intracomm, step: str, timeout_s: float) -> MPI.Intracomm:
    """Return a duplicate of ``comm`` after all ranks have come. Collective, blocking; raises as `roll_call` does."""
    roll_call(comm, step, timeout_s)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        copy, request = comm.Idup()
        if not wait_until(request.Test, timeout_s):  # a rank has left since the roll call; only a `Group` could name it
            abandoned.append(request)
            raise CollectiveTimeoutError(f"{step}: not all ranks arrived within {timeout_s:g} s")
        return copy


def private_copy(comm: MPI.Intracomm, step: str, timeout_s: float) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` in their order, after all ranks have come. Collective, blocking.

    The copy has no attributes of the user: a duplicate would have them, and would call their copy and delete functions.
    Raises as `roll_call` does. If a rank dies after the roll call, the other ranks hang in MPI, because MPI has no
    nonblocking `Split`.
    """
    roll_call(comm, step, timeout_s)
    with page().step(step, ranks_in_world(comm, range(comm.size))):
        return cast(MPI.Intracomm, MPI.Intracomm(comm).Split(0, comm.rank))


_HERE, _LEFT = 1, 2  # words of a rank in a roll call; 0 stands for a rank that has said nothing
_PART_TAG = 4  # keeps the messages of parts apart from the messages of groups


def roll_call(comm: MPI.Intracomm, step: str, timeout_s: float) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking; see `RollCalls.take`."""
    RollCalls(comm).take(step, timeout_s)


class RollCalls:
    """The roll calls of a communicator of the user.

    ``comm`` belongs to the user, and a receive of the user may take any message. So the ranks speak through collectives
    of MPI that do not block, which no receive can take.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._ranks = range(comm.size)
        self._role: _Role | None = None

    def take(self, step: str, timeout_s: float) -> None:
        """Return when all ranks have called it. Collective, blocking.

        If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
        `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
        MPI, so the communicator stays usable.

        The error may be imprecise in two cases. Without the first rank no rank hears of the others, so the error names
        only the first rank, also if more ranks are missing. And MPI may send the words of ranks along a tree. Then the
        error may also name ranks whose words pass through the missing rank. MPICH and Open MPI send each word straight
        to the first rank.
        """
        require_own_process(step)
        if len(self._ranks) == 1:
            return
        role = self._role or _role_in_all(self.comm)
        self._role = None  # until it is over, because after an error MPI may still use the memory of the role
        try:
            _take(role, self.comm, self._ranks, step, timeout_s)
        except BaseException:  # also after a Ctrl-C
            role.end()
            raise
        self._role = role


class PartRollCalls:
    """Roll calls of some ranks of ``comm``, which is private to mpicomm, so that the ranks speak by messages."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._broken: CollectiveTimeoutError | PeerError | None = None
        self._ranks: Sequence[int] = ()
        self._role: _Role | None = None

    def take(self, ranks: Sequence[int], step: str, timeout_s: float) -> None:
        """Return when all ``ranks`` have called it, among them this rank. Collective over the ranks, blocking.

        Raises as `RollCalls.take` does. Later calls raise at once, because they could take the message of a late rank
        for a message of theirs.
        """
        require_own_process(step)
        if self._broken is not None:
            raise type(self._broken)(
                f"{step}: no group of ranks can meet since an earlier error ({self._broken}); create another "
                "communicator",
                ranks=self._broken.ranks,
            )
        if len(ranks) == 1:
            return
        if ranks != self._ranks:  # programs make groups of the same ranks again and again
            self._ranks, self._role = ranks, _role_in_part(self._comm, ranks)
        role = self._role
        assert role is not None
        try:
            _take(role, self._comm, ranks, step, timeout_s)
        except CollectiveTimeoutError as error:
            self._broken = CollectiveTimeoutError(str(error), ranks=error.ranks)  # without the frames of `error`
            raise
        except BaseException as error:
            rank = self._comm.rank
            self._broken = PeerError(f"rank {rank} left in the middle of {step}: {type(error).__name__}", ranks=[rank])
            raise
        finally:
            if self._broken is not None:
                role.end()


def _take(role: _Role, comm: MPI.Intracomm, ranks: Sequence[int], step: str, timeout_s: float) -> None:
    """Play a role until all ranks are here. Raises `CollectiveTimeoutError` with the missing ranks."""

    def wait(ready: Callable[[], bool], limit_s: float) -> bool:
        if soon(ready):
            return True
        with page().step(step, ranks_in_world(comm, ranks)):
            return wait_until(ready, limit_s)

    words = role.play(wait, timeout_s)
    if words != role.all_here:
        # If a rank has left, the first rank was late; else the silent ranks are late.
        missing = [ranks[0]] if _LEFT in words else [rank for rank, word in zip(ranks, words, strict=True) if not word]
        raise did_not_arrive(step, missing, timeout_s, "let every rank make this call, or raise timeout_s=")


_Wait = Callable[[Callable[[], bool], float], bool]


class _Requests(list[MPI.Request]):
    """Requests that are complete together."""

    def Test(self) -> bool:
        return all(request.Test() for request in self)


class _Move:
    """A movement of words between the first rank and the others: ``begin`` starts it."""

    def __init__(self, begin: Callable[[], MPI.Request | _Requests]) -> None:
        self._begin = begin
        self.request: MPI.Request | _Requests = _Requests()

    def start(self) -> None:
        """Start the movement."""
        self.request = self._begin()

    def end(self) -> None:
        """Keep the request if the movement is not complete, because MPI may still use its memory."""
        try:
            complete = self.request.Test()
        except MPI.Exception:  # MPI knows that a rank is gone, and the caller has an error that names the rank
            complete = False
        if not complete:
            abandoned.append(self.request)


class _Role:
    """The part of one rank in roll calls: three movements, which the ranks begin in one order.

    The movements read and write the same memory in every roll call.
    """

    def __init__(self, size: int, calling: _Move, hearing: _Move, telling: _Move) -> None:
        self.all_here = bytes([_HERE]) * size
        self._moves = calling, hearing, telling

    def play(self, wait: _Wait, timeout_s: float) -> bytes:
        """Return the word of each rank, as the first rank has heard it."""
        raise NotImplementedError

    def is_complete(self) -> bool:
        """Return whether this rank's movements are complete."""
        calling, hearing, telling = self._moves
        return telling.request.Test() and hearing.request.Test() and calling.request.Test()

    def end(self) -> None:
        """Keep the requests of movements that are not complete."""
        for move in self._moves:
            move.end()


class _FirstRank(_Role):
    """The role of the first rank. ``words`` has the word that each rank says, ``told`` all words for each rank."""

    def __init__(self, words: bytearray, told: bytearray, calling: _Move, hearing: _Move, telling: _Move) -> None:
        super().__init__(len(words), calling, hearing, telling)
        self._words, self._told = words, told
        self._nobody = bytes([_HERE]) + bytes(len(words) - 1)

    def play(self, wait: _Wait, timeout_s: float) -> bytes:
        calling, hearing, telling = self._moves
        self._words[:] = self._nobody
        calling.start()
        hearing.start()
        wait(hearing.request.Test, timeout_s)
        heard = bytes(self._words)  # the words that have arrived so far, also if some have not
        self._told[:] = heard * (len(self._told) // len(heard))
        telling.start()
        if heard == self.all_here:
            wait(self.is_complete, timeout_s)
        return heard


class _OtherRank(_Role):
    """The role of another rank. It says ``word``, and hears ``words``."""

    def __init__(self, word: bytearray, words: bytearray, calling: _Move, answering: _Move, listening: _Move) -> None:
        super().__init__(len(words), calling, answering, listening)
        self._word, self._words = word, words

    def play(self, wait: _Wait, timeout_s: float) -> bytes:
        calling, answering, listening = self._moves
        calling.start()
        called = wait(calling.request.Test, timeout_s + GRACE_S)
        self._word[0] = _HERE if called else _LEFT
        answering.start()
        listening.start()
        if called and wait(self.is_complete, timeout_s + GRACE_S):
            return bytes(self._words)
        return b"\0" + self.all_here[1:]


def _role_in_all(comm: MPI.Intracomm) -> _Role:
    """Return the role of this rank among all ranks of ``comm``, which moves words by collectives."""
    size = comm.size

    def scatter(send: Any, receive: Any) -> _Move:
        return _Move(partial(comm.Iscatterv, send, receive))

    def gather(send: Any, receive: Any) -> _Move:
        return _Move(partial(comm.Igatherv, send, receive))

    if comm.rank == 0:
        ones, words, told = [1] * size, bytearray(size), bytearray(size * size)
        return _FirstRank(
            words,
            told,
            scatter([bytes(size), ones, MPI.BYTE], MPI.IN_PLACE),
            gather(MPI.IN_PLACE, [words, ones, MPI.BYTE]),
            scatter([told, [size] * size, MPI.BYTE], MPI.IN_PLACE),
        )
    word, words = bytearray(1), bytearray(size)
    return _OtherRank(
        word,
        words,
        scatter(None, [bytearray(1), MPI.BYTE]),
        gather([word, MPI.BYTE], None),
        scatter(None, [words, MPI.BYTE]),
    )


def _role_in_part(comm: MPI.Intracomm, ranks: Sequence[int]) -> _Role:
    """Return the role of this rank among ``ranks`` of ``comm``, which moves words by messages."""

    def to(memory: bytearray, peers: Sequence[int]) -> _Move:
        return _Move(lambda: _Requests([_send(comm, memory, peer) for peer in peers]))

    first, *others = ranks
    size = len(ranks)
    if comm.rank == first:
        words, told = bytearray(size), bytearray(size)
        places = [memoryview(words)[place : place + 1] for place in range(1, size)]

        def hear() -> _Requests:
            return _Requests([comm.Irecv(place, peer, _PART_TAG) for place, peer in zip(places, others, strict=True)])

        return _FirstRank(words, told, to(bytearray(1), others), _Move(hear), to(told, others))
    call, word, words = bytearray(1), bytearray(1), bytearray(size)
    return _OtherRank(
        word,
        words,
        _Move(lambda: comm.Irecv(call, first, _PART_TAG)),
        to(word, [first]),
        _Move(lambda: comm.Irecv(words, first, _PART_TAG)),
    )


def _send(comm: MPI.Intracomm, memory: bytearray, rank: int) -> MPI.Request:
    """Send without waiting. If MPI knows that the rank is dead, send nothing: its silence names it."""
    try:
        return comm.Isend(memory, rank, _PART_TAG)
    except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
        logger.info("cannot send to rank %d: %s", rank, error)
        return MPI.REQUEST_NULL
