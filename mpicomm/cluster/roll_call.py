"""Roll calls: all ranks, or some ranks, of a communicator come to a call of MPI, or a missing rank is named.

In a roll call the first rank says that it is here. Other ranks may have come long before, and their deadlines restart.
Then the first rank hears the words of all ranks, and tells all ranks these words. So all ranks know alike who is there.
`Group` does the same with results and errors. A roll call is shorter, and needs no communicator of mpicomm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster.agreement import GRACE_S, abandoned, did_not_arrive, ranks_in_world, require_own_process
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.log import logger
from mpicomm.waiting import soon, wait_until

_HERE, _LEFT = 1, 2  # words of a rank in a roll call; 0 stands for a rank that has said nothing
_PART_TAG = 4  # keeps the messages of parts apart from the messages of groups


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


def roll_call(comm: MPI.Intracomm, step: str, timeout_s: float) -> None:
    """Return when all ranks of ``comm`` have called it. Collective, blocking.

    If a rank comes more than ``timeout_s`` seconds after the first rank or after another rank, the others raise
    `CollectiveTimeoutError` with its name. The late rank raises it, too. Then all ranks have made the same calls of
    MPI, so the communicator stays usable.

    The error may be imprecise in two cases. Without the first rank no rank hears of the others, so the error names
    only the first rank, also if more ranks are missing. And MPI may send the words of ranks along a tree. Then the
    error may also name ranks whose words pass through the missing rank. MPICH and Open MPI send each word straight
    to the first rank.
    """
    require_own_process(step)
    if comm.size > 1:
        _Collectives(comm, range(comm.size)).meet(step, timeout_s)


class PartRollCalls:
    """Roll calls of some ranks of ``comm``, which is private to mpicomm, so that the ranks speak by messages."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._broken: CollectiveTimeoutError | PeerError | None = None

    def take(self, ranks: Sequence[int], step: str, timeout_s: float) -> None:
        """Return when all ``ranks`` have called it, among them this rank. Collective over the ranks, blocking.

        Raises as `roll_call` does. Later calls raise at once, because they could take the message of a late rank for a
        message of theirs.
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
        try:
            _Messages(self._comm, ranks).meet(step, timeout_s)
        except CollectiveTimeoutError as error:
            self._broken = CollectiveTimeoutError(str(error), ranks=error.ranks)  # without the frames of `error`
            raise
        except BaseException as error:
            rank = self._comm.rank
            self._broken = PeerError(f"rank {rank} left in the middle of {step}: {type(error).__name__}", ranks=[rank])
            raise


_Wait = Callable[[list[MPI.Request], float], bool]


class _RollCall(ABC):
    """One roll call of ``ranks`` of ``comm``."""

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self._comm = comm
        self._ranks = ranks
        self._is_first = comm.rank == ranks[0]
        self._all_here = bytes([_HERE]) * len(ranks)
        self._requests: list[MPI.Request] = []

    @abstractmethod
    def _down(self, memory: bytes | bytearray) -> list[MPI.Request]:
        """Begin to send the memory from the first rank to each other rank. Return this rank's requests."""

    @abstractmethod
    def _up(self, memory: bytearray) -> list[MPI.Request]:
        """Begin to send a byte from each other rank to its place in the memory of the first rank; as `_down`."""

    def meet(self, step: str, timeout_s: float) -> None:
        """Return when all ranks are here. Raises `CollectiveTimeoutError` with the missing ranks."""

        def wait(requests: list[MPI.Request], limit_s: float) -> bool:
            ready = partial(MPI.Request.Testall, requests)
            if soon(ready):
                return True
            with page().step(step, ranks_in_world(self._comm, self._ranks)):
                return wait_until(ready, limit_s)

        try:
            words = self._hear(wait, timeout_s) if self._is_first else self._answer(wait, timeout_s + GRACE_S)
            if words != self._all_here:
                # If a rank has left, the first rank was late; else the silent ranks are late.
                silent = [rank for rank, word in zip(self._ranks, words, strict=True) if not word]
                missing = [self._ranks[0]] if _LEFT in words else silent
                raise did_not_arrive(step, missing, timeout_s, "let every rank make this call, or raise timeout_s=")
        except BaseException:  # also after a Ctrl-C
            abandoned.extend(self._requests)
            raise

    def _hear(self, wait: _Wait, limit_s: float) -> bytes:
        words = bytearray(len(self._ranks))
        words[0] = _HERE
        self._requests += self._down(bytes(1))
        hearing = self._up(words)
        self._requests += hearing
        # This waits for words alone. MPI may report an error for a send to a dead rank, and its error would take the
        # place of the error that names the silent rank.
        wait(hearing, limit_s)
        heard = bytes(words)  # some words may not have arrived
        self._requests += self._down(heard)
        if heard == self._all_here:
            wait(self._requests, limit_s)
        return heard

    def _answer(self, wait: _Wait, limit_s: float) -> bytes:
        words = bytearray(len(self._ranks))
        self._requests += self._down(bytearray(1))
        called = wait(self._requests, limit_s)
        self._requests += self._up(bytearray([_HERE if called else _LEFT]))
        self._requests += self._down(words)
        return bytes(words) if called and wait(self._requests, limit_s) else b"\0" + self._all_here[1:]


class _Collectives(_RollCall):
    """Speaks through collectives of MPI: ``comm`` may belong to the user, whose receives may take any message."""

    def _down(self, memory: bytes | bytearray) -> list[MPI.Request]:
        size, nbytes = len(self._ranks), len(memory)
        if self._is_first:
            return [self._comm.Iscatterv([memory * size, [nbytes] * size, MPI.BYTE], MPI.IN_PLACE)]
        return [self._comm.Iscatterv(None, [memory, MPI.BYTE])]

    def _up(self, memory: bytearray) -> list[MPI.Request]:
        if self._is_first:
            return [self._comm.Igatherv(MPI.IN_PLACE, [memory, [1] * len(memory), MPI.BYTE])]
        return [self._comm.Igatherv([memory, MPI.BYTE], None)]


class _Messages(_RollCall):
    """Speaks by messages in a communicator that is private to mpicomm."""

    def _down(self, memory: bytes | bytearray) -> list[MPI.Request]:
        if self._is_first:
            return [self._send(memory, rank) for rank in self._ranks[1:]]
        return [self._comm.Irecv(memory, self._ranks[0], _PART_TAG)]

    def _up(self, memory: bytearray) -> list[MPI.Request]:
        if self._is_first:
            places = memoryview(memory)
            others = enumerate(self._ranks[1:], 1)
            return [self._comm.Irecv(places[place : place + 1], rank, _PART_TAG) for place, rank in others]
        return [self._send(memory, self._ranks[0])]

    def _send(self, memory: bytes | bytearray, rank: int) -> MPI.Request:
        """Send without waiting. If MPI knows that the rank is dead, send nothing: its silence names it."""
        try:
            return self._comm.Isend(memory, rank, _PART_TAG)
        except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
            logger.info("cannot send to rank %d: %s", rank, error)
            return MPI.REQUEST_NULL
