"""What ranks agree on over MPI while they set something up, and how they find the ranks of their node.

Everything collective in set-up and teardown goes through `Group.exchange`, so that a rank that fails cannot leave
the others behind in a collective: either every rank gets every rank's result, or every rank raises the same error.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mpi4py import MPI

from mpicomm import environment
from mpicomm.errors import CollectiveTimeoutError, HandleError, InvalidUsageError, MpicommError, PeerError
from mpicomm.log import TRACE, logger
from mpicomm.waiting import wait_until

T = TypeVar("T")

_GRACE_S = 0.5  # how much longer the others wait than the root, whose message names the rank that is missing


@dataclass(frozen=True)
class _Outcome:
    """One rank's part of an exchange: its result, or why it has none."""

    step: str
    value: Any = None
    error: MpicommError | None = None


_Answer = list[_Outcome] | CollectiveTimeoutError


class Group:
    """Ranks that set things up together, with a deadline on everything they do.

    ``comm`` is private to mpicomm, so no message of the user's can be taken for one of its. ``ranks`` are the ranks of
    ``comm`` that belong to the group, in order; errors name ranks of ``comm``. After a timeout the group is `broken`:
    its ranks no longer agree on where they are, and every later exchange raises `CollectiveTimeoutError` at once. On a
    rank that was interrupted in the middle of an exchange it is broken too, with `PeerError`.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], timeout_s: float, *, tag: int = 0) -> None:
        self._comm = comm
        self._tag = tag
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.rank = self.ranks.index(comm.rank)
        self.size = len(self.ranks)
        self.broken: CollectiveTimeoutError | PeerError | None = None

    def subgroup(self, ranks: Sequence[int], *, tag: int) -> Group:
        """Return the group of some of these ranks; local. ``tag`` keeps its messages apart from this group's."""
        return Group(self._comm, ranks, self.timeout_s, tag=tag)

    def exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        """Run ``produce`` on every rank and return all results in group order. Collective, blocking.

        If it raises on any rank, every rank raises an error of the same class and text that names those ranks; the
        original is its ``__cause__`` where it happened. Ranks that call with different ``step`` get a `PeerError`,
        a rank that does not call within ``timeout_s`` seconds makes the others raise `CollectiveTimeoutError`, and so
        does in the next exchange one that is interrupted in the middle of this one.
        """
        self.require_whole(step)
        cause: Exception | None = None
        start, limit_s = time.monotonic(), self.timeout_s
        try:
            mine = _Outcome(step, produce())
        except Exception as error:
            if self.broken is not None:
                raise  # an exchange inside this one ran out of time: nobody would come to this one
            cause = error
            mine = _Outcome(step, error=_portable(error))
            # It may have failed because a peer is gone, for which it has waited: all waits together keep the deadline.
            # Others may still be busy, but for those whom an exchange inside this one has found missing.
            least_s = _GRACE_S if isinstance(error, CollectiveTimeoutError) else limit_s / 2
            limit_s = max(limit_s - (time.monotonic() - start), least_s)
        self.require_whole(step)  # an exchange inside this one may have failed in a clean-up, which keeps it silent
        logger.log(TRACE, "exchange %r in ranks %s: %s", step, self.ranks, mine.error or "done here")
        outcomes = self._gather_and_share(mine, limit_s)
        failure = self._judge(outcomes)
        if failure is not None:
            raise failure from cause
        return [outcome.value for outcome in outcomes]

    def require_whole(self, what: str) -> None:
        """Raise if the group is broken, or belongs to the process this one was forked from; local and cheap."""
        if _forked:
            require_own_process(what)
        if self.broken is not None:
            reason = "timeout" if isinstance(self.broken, CollectiveTimeoutError) else "error"
            raise type(self.broken)(
                f"{what}: this communicator is unusable since an earlier {reason} ({self.broken}); create another",
                ranks=self.broken.ranks,
            )

    def progress(self) -> None:
        """Let MPI go on with what is under way, such as collectives that peers wait for; local, does not block.

        MPI promises progress only to who calls it: a rank that waits for shared memory to change has to, or it and a
        peer that waits for its part of a nonblocking call wait for each other.
        """
        self._comm.iprobe(self._comm.rank, self._tag)

    def agree(self, step: str, act: Callable[[], object]) -> None:
        """Run ``act`` on every rank; all return when all have succeeded, or all raise as in `exchange`."""

        def produce() -> None:
            act()

        self.exchange(step, produce)

    def barrier(self, step: str) -> None:
        """Return when every rank has called it, or raise as in `exchange`."""
        self.exchange(step, lambda: None)

    def _judge(self, outcomes: list[_Outcome]) -> MpicommError | None:
        """Return the error that all ranks raise; a pure function of the outcomes, so it is the same everywhere."""
        steps = {outcome.step for outcome in outcomes}
        if len(steps) > 1:
            said = "; ".join(f"rank {rank}: {outcome.step}" for rank, outcome in zip(self.ranks, outcomes, strict=True))
            return PeerError(f"ranks called different things: {said}", ranks=self.ranks)
        failed = {
            rank: outcome.error for rank, outcome in zip(self.ranks, outcomes, strict=True) if outcome.error is not None
        }
        if not failed:
            return None
        reasons: dict[str, list[int]] = {}
        for rank, error in failed.items():
            reasons.setdefault(str(error), []).append(rank)
        text = "; ".join(f"{_names(ranks)}: {reason}" for reason, ranks in reasons.items())
        # At fault are the ranks an error names, such as the one a timeout waited for, else those it happened on.
        at_fault = sorted({culprit for rank, error in failed.items() for culprit in error.ranks or (rank,)})
        return type(next(iter(failed.values())))(f"{outcomes[0].step} failed on {text}", ranks=at_fault)

    def _gather_and_share(self, mine: _Outcome, limit_s: float) -> list[_Outcome]:
        """All-gather over a star: the first rank hears everybody, so it can tell who is missing, and tells everybody.

        A rank cannot begin the next exchange before the first rank has answered this one, which it does when it has
        heard all; so messages of two exchanges never meet, and one tag is enough.
        """
        if self.size == 1:
            return [mine]
        requests: list[MPI.Request] = []
        try:
            answer = self._hear(mine, limit_s, requests) if self.rank == 0 else self._ask(mine, limit_s, requests)
            if isinstance(answer, list) and not wait_until(lambda: MPI.Request.Testall(requests), self.timeout_s):
                answer = CollectiveTimeoutError(f"{mine.step}: a peer stopped receiving", ranks=self.ranks)
        except BaseException as error:
            # Above all KeyboardInterrupt. What this rank has sent and read is not known any more: it must not take what
            # belongs to this exchange for the next one. The others are told nothing, but miss it then: if this was the
            # last exchange of theirs, a message would end up in whatever communicator MPI gives the number of this one.
            rank = self.ranks[self.rank]
            text = f"rank {rank} left in the middle of {mine.step}: {type(error).__name__}"
            self.broken = PeerError(text, ranks=[rank])
            _abandoned.extend(requests)
            raise
        if isinstance(answer, list):
            return answer
        # Sends to a rank that is gone never complete; mpi4py keeps their buffers with the requests.
        _abandoned.extend(requests)
        self.broken = answer
        # Not the same one: with its traceback the group would keep what lies in the frames, mapped memory above all.
        raise CollectiveTimeoutError(str(answer), ranks=answer.ranks)

    def _hear(self, mine: _Outcome, limit_s: float, requests: list[MPI.Request]) -> _Answer:
        """Take the first rank's part: hear what the others have to say, and tell them all of it."""
        heard = {self.ranks[0]: mine}
        status = MPI.Status()

        def hear() -> bool:
            while message := self._comm.improbe(MPI.ANY_SOURCE, self._tag, status):
                heard[status.source] = message.recv()
            return len(heard) == self.size

        # This rank is here: the others, who may have come long before, now wait as long as it does.
        requests += [self._comm.isend(None, rank, self._tag) for rank in self.ranks[1:]]
        answer: _Answer
        if wait_until(hear, limit_s):
            answer = [heard[rank] for rank in self.ranks]
        else:
            missing = [rank for rank in self.ranks if rank not in heard]
            answer = _did_not_arrive(mine.step, missing, self.timeout_s)
        # The missing rank gets the answer too: should it arrive late, it learns at once what happened.
        requests += [self._comm.isend(answer, rank, self._tag) for rank in self.ranks[1:]]
        return answer

    def _ask(self, mine: _Outcome, limit_s: float, requests: list[MPI.Request]) -> _Answer:
        """Take another rank's part: tell the first rank, and return what it answers."""
        first = self.ranks[0]
        said: list[Any] = []  # None as soon as the first rank is here, then what it has heard
        requests.append(self._comm.isend(mine, first, self._tag))

        def listen() -> bool:
            if message := self._comm.improbe(first, self._tag):
                said.append(message.recv())
                return True
            return False

        if wait_until(listen, limit_s + _GRACE_S) and wait_until(listen, limit_s + _GRACE_S):
            answer: _Answer = said[1]
            return answer
        return _did_not_arrive(mine.step, [first], self.timeout_s)


def _did_not_arrive(step: str, ranks: list[int], timeout_s: float) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"{step}: {_names(ranks)} did not arrive within {timeout_s:g} s", ranks=ranks)


_abandoned: list[MPI.Request] = []


def duplicate(comm: MPI.Intracomm, step: str, timeout_s: float) -> MPI.Intracomm:
    """Return a duplicate of ``comm``. Collective; raises `CollectiveTimeoutError` where not all ranks come in time.

    Which ones is not known: `Group` names them, but it needs the duplicate.
    """
    require_own_process(step)
    copy, request = comm.Idup()
    if not wait_until(request.Test, timeout_s):
        _abandoned.append(request)
        raise CollectiveTimeoutError(f"{step}: not all ranks arrived within {timeout_s:g} s")
    return copy


def meet(comm: MPI.Intracomm, step: str, timeout_s: float) -> None:
    """Return when all ranks of ``comm`` have called it. Collective; raises `CollectiveTimeoutError` as `duplicate`."""
    require_own_process(step)
    request = comm.Ibarrier()
    if not wait_until(request.Test, timeout_s):
        _abandoned.append(request)
        raise CollectiveTimeoutError(f"{step}: not all ranks arrived within {timeout_s:g} s")


def _portable(error: Exception) -> MpicommError:
    """Return the error as one of mpicomm's that can be sent to the other ranks: class, text, ranks, nothing else."""
    if isinstance(error, MpicommError):
        return type(error)(str(error), ranks=error.ranks)
    return HandleError(f"{type(error).__name__}: {error}")


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def node_key() -> str:
    """Return a text that is equal for ranks that can be expected to reach each other's memory.

    MPICOMM_HOSTID, or the kernel's boot id with the network namespace: descriptors travel over abstract sockets, which
    live in one. Host names say nothing: containers of one host have several, cloned machines share one.
    """
    given = environment.host_id()
    if given is not None:
        return f"MPICOMM_HOSTID={given}"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').readlink()}"


def world_rank() -> int:
    """Return this process's rank in MPI.COMM_WORLD, by which the log knows it."""
    return MPI.COMM_WORLD.rank


def group_by_node(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, nodes in the order of their first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


_forked = False


def forked() -> bool:
    """Return whether this process was forked from one that uses MPI, whose communicators are then not its own."""
    return _forked


def require_own_process(what: str) -> None:
    """Raise `InvalidUsageError` in a process that was forked from one that uses MPI; local and cheap.

    It shares memory and the place in every queue with its parent: whatever it sent would be taken for its parent's.
    """
    if _forked:
        raise InvalidUsageError(
            f"{what}: this process was forked from an MPI process, to which the communicator belongs: use it there, or "
            'start processes another way (in multiprocessing, the method "spawn")'
        )


def _after_fork() -> None:
    global _forked
    _forked = MPI.Is_initialized()
    _at_finalize.clear()  # what there is to give back is the parent's


os.register_at_fork(after_in_child=_after_fork)

_at_finalize: weakref.WeakSet[Any] = weakref.WeakSet()
_finalize_keyval = MPI.KEYVAL_INVALID


def release_before_finalize(owner: Any) -> None:
    """Call ``owner.release()`` before MPI_Finalize, unless it is gone by then. Local.

    MPI deletes the attributes of MPI_COMM_SELF first of all in MPI_Finalize (MPI 4.1, section 11.2.4): that is for a
    program that calls it. mpi4py calls it when the interpreter is gone and no callback can run: that is for atexit.
    """
    global _finalize_keyval
    if _finalize_keyval == MPI.KEYVAL_INVALID:
        _finalize_keyval = MPI.Comm.Create_keyval(delete_fn=_release_all)
        MPI.COMM_SELF.Set_attr(_finalize_keyval, None)
        atexit.register(_release_all)
    _at_finalize.add(owner)


def _release_all(*_: object) -> None:
    while _at_finalize:
        _at_finalize.pop().release()
