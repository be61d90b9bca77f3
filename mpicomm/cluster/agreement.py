"""Agreement of ranks over MPI while they set something up, and how ranks find the other ranks of their node.

`Group.exchange` carries every collective step of set-up and teardown. So no rank waits in a collective for a rank that
has failed: either every rank gets the results of all ranks, or every rank raises the same error.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from mpicomm import environment
from mpicomm.activity.page import page
from mpicomm.activity.ranks import ranks_as_text
from mpicomm.devices.descriptor import way_out
from mpicomm.errors import (
    CollectiveTimeoutError,
    HandleError,
    InvalidUsageError,
    MpicommError,
    PeerError,
    equal_error,
    name_ranks,
)
from mpicomm.log import TRACE, logger
from mpicomm.waiting import wait_until

T = TypeVar("T")

GRACE_S = 0.5  # the other ranks wait this much longer than the first rank, because its answer names the missing rank


class _Outcome(NamedTuple):
    """The part of a rank in an exchange: its result, or its error. Ranks send it as a tuple, which pickles faster."""

    step: str
    value: Any = None
    error: MpicommError | None = None


_Answer = list[_Outcome] | CollectiveTimeoutError


class Group:
    """Ranks that set things up together, with a deadline for each step.

    ``comm`` is private to mpicomm, so no rank mistakes a message of the user for a message of mpicomm. ``ranks`` are
    the ranks of ``comm`` that belong to the group, in order. Errors name ranks of ``comm``.

    A timeout makes the group `broken`, because its ranks have come to different steps. Every later exchange raises
    `CollectiveTimeoutError` at once. A Ctrl-C in an exchange breaks the group on the interrupted rank, with
    `PeerError`.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], timeout_s: float, *, tag: int = 0) -> None:
        self._comm = comm
        self._tag = tag
        self.ranks = tuple(ranks)
        self.timeout_s = timeout_s
        self.rank = self.ranks.index(comm.rank)
        self.size = len(self.ranks)
        self.broken: CollectiveTimeoutError | PeerError | None = None
        self.are_apart = False
        """Whether the ranks made different calls in the last exchange, so that some rank has left the call."""
        self.absence_reason: Callable[[Sequence[int]], str] = lambda ranks: ""
        """Says why ranks that still run may not come; "" if nothing is known. An error ends with this text."""
        self.patience: Callable[[], bool] = lambda: False
        """Says, after the time of an exchange is over, whether to wait as long once more."""

    def subgroup(self, ranks: Sequence[int], *, tag: int) -> Group:
        """Return a group of some of these ranks; local. ``tag`` keeps the messages of the two groups apart."""
        return Group(self._comm, ranks, self.timeout_s, tag=tag)

    def exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        """Run ``produce`` on every rank and return all results in group order. Collective, blocking.

        If ``produce`` raises on any rank, every rank raises an error of the same class. Its text names the ranks that
        failed, and the step, too, except in an `InvalidUsageError`. On the ranks that failed, the original error is the
        ``__cause__``.

        Ranks that call with different ``step`` get a `PeerError`. If a rank does not call within ``timeout_s`` seconds,
        the other ranks raise `CollectiveTimeoutError`. If a Ctrl-C takes a rank out of this exchange, the other ranks
        raise `CollectiveTimeoutError` in the next exchange.
        """
        self.require_whole(step)
        with page().step(step, self._in_world):
            return self._exchange(step, produce)

    @cached_property
    def _in_world(self) -> str:
        return ranks_in_world(self._comm, self.ranks)

    def _exchange(self, step: str, produce: Callable[[], T]) -> list[T]:
        cause: Exception | None = None
        start, limit_s = time.monotonic(), self.timeout_s
        try:
            mine = _Outcome(step, produce())
        except Exception as error:
            if self.broken is not None:
                raise  # an exchange inside `produce` broke the group, so the ranks do not meet in this exchange
            cause = error
            mine = _Outcome(step, error=_portable(error))
            # `produce` may have waited for a peer that is gone. All waits together keep the deadline. Half of the time
            # is left in any case, because other ranks may still be busy. If an inner exchange has found a rank missing,
            # half of the grace is left, so that with the grace of `_ask` a rank is less than a second late.
            late = error.ranks if isinstance(error, CollectiveTimeoutError) else None
            least_s = limit_s / 2 if late is None else GRACE_S / 2
            limit_s = max(limit_s - (time.monotonic() - start), least_s)
            if late and self.rank != 0 and self.ranks[0] in late:
                limit_s = -GRACE_S  # the first rank has had its time, and without it no rank gets an answer
        self.require_whole(step)  # an exchange inside `produce` may have failed in a clean-up, which raises nothing
        logger.log(TRACE, "exchange %r in ranks %s: %s", step, self.ranks, mine.error or "done here")
        outcomes = self._gather_and_share(mine, limit_s)
        failure = self._judge(outcomes)
        if failure is not None:
            raise failure from cause
        return [outcome.value for outcome in outcomes]

    def require_whole(self, what: object) -> None:
        """Raise if the group is broken, or if this process is a forked child of its process; local and cheap."""
        if is_forked:
            require_own_process(what)
        if self.broken is not None:
            reason = "timeout" if isinstance(self.broken, CollectiveTimeoutError) else "error"
            raise type(self.broken)(
                f"{what}: this communicator is unusable since an earlier {reason} ({self.broken}); create another",
                ranks=self.broken.ranks,
            )

    def progress(self) -> None:
        """Let MPI advance pending communication, such as collectives that peers wait for; local, does not block.

        A rank that waits for shared memory to change calls this, because MPI makes progress only inside its calls.
        Without the call, that rank and a peer in a nonblocking call of MPI could wait for each other.
        """
        self._comm.iprobe(self._comm.rank, self._tag)

    def agree(self, step: str, act: Callable[[], object]) -> None:
        """Run ``act`` on every rank. If all ranks succeed, all ranks return; else all raise as in `exchange`."""

        def produce() -> None:
            act()

        self.exchange(step, produce)

    def barrier(self, step: str) -> None:
        """Return when every rank has called it, or raise as in `exchange`."""
        self.exchange(step, lambda: None)

    def _judge(self, outcomes: list[_Outcome]) -> MpicommError | None:
        """Return the error that all ranks raise. It depends only on the outcomes, so all ranks compute the same one."""
        different = self._different(dict(zip(self.ranks, outcomes, strict=True)))
        self.are_apart = bool(different)
        if different:
            return PeerError(different, ranks=self.ranks)
        failed = {
            rank: outcome.error for rank, outcome in zip(self.ranks, outcomes, strict=True) if outcome.error is not None
        }
        if not failed:
            return None
        reasons: dict[str, list[int]] = {}
        for rank, error in failed.items():
            reasons.setdefault(str(error), []).append(rank)
        text = "; ".join(f"{name_ranks(ranks)}: {reason}" for reason, ranks in reasons.items())
        # If an error names ranks, such as the late rank of a timeout, these are at fault, else the ranks that raised.
        at_fault = sorted({culprit for rank, error in failed.items() for culprit in error.ranks or (rank,)})
        first = next(iter(failed.values()))
        # An argument or a variable is wrong at every step, so the step would only mislead.
        said = text if isinstance(first, InvalidUsageError) else f"{outcomes[0].step} failed on {text}"
        return first.like(said, at_fault)

    def _different(self, outcomes: dict[int, _Outcome]) -> str:
        """Return the steps of ranks in words, "" if all ranks are in the same step."""
        if len({outcome.step for outcome in outcomes.values()}) == 1:
            return ""
        said = "; ".join(f"rank {rank}: {outcomes[rank].step}" for rank in sorted(outcomes))
        return f"ranks called different things: {said}"

    def _gather_and_share(self, mine: _Outcome, limit_s: float) -> list[_Outcome]:
        """All-gather over a star: the first rank hears all ranks, so it can name a missing rank, and answers all.

        One tag is enough, because messages of two exchanges never meet. No rank begins the next exchange before the
        first rank has answered this exchange, and the first rank answers after it has heard all ranks.
        """
        if self.size == 1:
            return [mine]
        requests: list[MPI.Request] = []
        try:
            answer = self._hear(mine, limit_s, requests) if self.rank == 0 else self._ask(mine, limit_s, requests)
            if isinstance(answer, list) and not wait_until(lambda: MPI.Request.Testall(requests), self.timeout_s):
                answer = CollectiveTimeoutError(f"{mine.step}: a peer stopped receiving", ranks=self.ranks)
        except BaseException as error:
            # The usual cause is KeyboardInterrupt. This rank does not know which messages it has sent and read. It must
            # not take a message of this exchange for a message of the next, so the group is broken on this rank. The
            # other ranks miss this rank in their next exchange. This rank sends them nothing: if this exchange is their
            # last, the message would arrive in another communicator to which MPI gives the same number.
            rank = self.ranks[self.rank]
            text = f"rank {rank} left in the middle of {mine.step}: {type(error).__name__}"
            self.broken = PeerError(text, ranks=[rank])
            abandoned.extend(requests)
            raise
        if isinstance(answer, list):
            return answer
        # Sends to a rank that is gone never complete. Their requests keep their buffers, so the requests stay.
        abandoned.extend(requests)
        self.broken = answer
        # A new error, because the traceback of `self.broken` would keep the frames, and the mapped memory in them.
        raise CollectiveTimeoutError(str(answer), ranks=answer.ranks)

    def _hear(self, mine: _Outcome, limit_s: float, requests: list[MPI.Request]) -> _Answer:
        """Play the first rank: hear the outcomes of the other ranks, and send all outcomes to all ranks."""
        heard = {self.ranks[0]: mine}

        def hear() -> bool:
            # Each rank by name, because a rank outside this group may be in an exchange of another subgroup.
            for rank in self.ranks:
                if rank not in heard and (message := self._comm.improbe(rank, self._tag)):
                    heard[rank] = _Outcome(*message.recv())
            return len(heard) == self.size

        # This message tells ranks that may have come long before: the first rank is here, and their deadlines restart.
        requests += [self._send(None, rank) for rank in self.ranks[1:]]
        answer: _Answer
        if self._wait(hear, limit_s):
            answer = [heard[rank] for rank in self.ranks]
        else:
            missing = [rank for rank in self.ranks if rank not in heard]
            late = did_not_arrive(mine.step, missing, self.timeout_s, self.absence_reason(missing))
            different = self._different(heard)
            answer = CollectiveTimeoutError(f"{late}; {different}", ranks=late.ranks) if different else late
        # A missing rank gets the answer, too, so that it raises at once if it comes late.
        told = list(map(tuple, answer)) if isinstance(answer, list) else answer
        requests += [self._send(told, rank) for rank in self.ranks[1:]]
        return answer

    def _ask(self, mine: _Outcome, limit_s: float, requests: list[MPI.Request]) -> _Answer:
        """Play another rank: send its outcome to the first rank, and return the answer."""
        first = self.ranks[0]
        said: list[Any] = []  # messages of the first rank: None after it has come, then the answer
        requests.append(self._send(tuple(mine), first))

        def listen() -> bool:
            if message := self._comm.improbe(first, self._tag):
                said.append(message.recv())
                return True
            return False

        if self._wait(listen, limit_s + GRACE_S) and self._wait(listen, limit_s + GRACE_S):
            answer: list[tuple[Any, ...]] | CollectiveTimeoutError = said[1]
            if isinstance(answer, list):
                return [_Outcome(*each) for each in answer]
            here = self.ranks[self.rank]
            came_late = f"; this is rank {here}, which came later" if here in answer.ranks else ""
            return CollectiveTimeoutError(f"{answer}{came_late}", ranks=answer.ranks)
        return did_not_arrive(mine.step, [first], self.timeout_s, self.absence_reason([first]))

    def _send(self, message: object, rank: int) -> MPI.Request:
        """Send without waiting. If MPI knows that the rank is dead, send nothing: its silence names it."""
        try:
            return self._comm.isend(message, rank, self._tag)
        except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
            logger.info("cannot send to rank %d: %s", rank, error)
            return MPI.REQUEST_NULL

    def _wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        return wait_until(ready, limit_s) or (self.patience() and wait_until(ready, limit_s))


def did_not_arrive(step: str, ranks: list[int], timeout_s: float, reason: str) -> CollectiveTimeoutError:
    """Return the error for ranks that are missing; ``reason`` may be ""."""
    text = f"{step}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s"
    return CollectiveTimeoutError(f"{text}: {reason or 'let every rank make this call'}", ranks=ranks)


abandoned: list[object] = []
"""Requests that may never complete. MPI may still write to their buffers, so the requests stay and keep them."""


def _portable(error: Exception) -> MpicommError:
    """Return the error as an `MpicommError` with its class, text and ranks, which MPI can send to other ranks."""
    if isinstance(error, MpicommError):
        return equal_error(error)
    return HandleError(f"{type(error).__name__}: {error}{way_out(error.errno) if isinstance(error, OSError) else ''}")


def node_key() -> str:
    """Return a text that is the same on ranks that presumably reach each other's memory.

    It is MPICOMM_HOSTID, or the boot id of the kernel with the network namespace. The namespace counts because
    descriptors travel over abstract sockets, which belong to a namespace. Host names say nothing: the containers of a
    host have different names, and cloned machines have the same name.
    """
    given = environment.host_id()
    if given is not None:
        return f"MPICOMM_HOSTID={given}"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').readlink()}"


def container_key() -> str:
    """Return a text that is the same on ranks of one container: its namespaces."""
    return "/".join(str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("user", "ipc", "pid", "mnt"))


def world_rank() -> int:
    """Return the rank of this process in MPI.COMM_WORLD, which names the process in the log."""
    return MPI.COMM_WORLD.rank


def world_size() -> int:
    """Return how many ranks MPI.COMM_WORLD has."""
    return MPI.COMM_WORLD.size


def ranks_in_world(comm: MPI.Intracomm, ranks: Sequence[int]) -> str:
    """Return which ranks of MPI.COMM_WORLD these ranks of ``comm`` are, as `ranks_as_text` does. Local."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = group.Translate_ranks(ranks, world)
    group.Free()
    world.Free()
    return ranks_as_text(found)  # MPI.UNDEFINED, which stands for a process of another job, is negative


def process_number() -> int:
    """Return the number that tells this process from all others of its job: its rank in MPI.COMM_WORLD.

    A process that MPI has spawned has its private MPI.COMM_WORLD, and its parents have the same ranks in theirs. So
    the number of a spawned process is its process id.
    """
    return MPI.COMM_WORLD.rank if MPI.Comm.Get_parent() == MPI.COMM_NULL else os.getpid()


def group_by_node(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node; the nodes are in the order of their first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


is_forked = False
"""Whether this process is a forked child of an MPI process. All its communicators belong to the parent."""


def require_own_process(what: object) -> None:
    """Raise `InvalidUsageError` in a forked child of an MPI process; local and cheap.

    The child shares memory and its place in every queue with its parent. So peers would take the messages of the child
    for messages of the parent.
    """
    if is_forked:
        raise InvalidUsageError(
            f"{what}: this process was forked from an MPI process, to which the communicator belongs: use it there, or "
            'start processes another way (in multiprocessing, the method "spawn")'
        )


_is_initialized = MPI.Is_initialized  # `install` replaces it for programs that start MPI themselves


def _after_fork() -> None:
    global is_forked
    is_forked = _is_initialized()
    _at_finalize.clear()  # the parent releases its memory


os.register_at_fork(after_in_child=_after_fork)

_at_finalize: weakref.WeakSet[Any] = weakref.WeakSet()
_finalize_keyval = MPI.KEYVAL_INVALID


def release_before_finalize(owner: Any) -> None:
    """Call ``owner.release()`` before MPI_Finalize, unless ``owner`` is gone by then. Local.

    If the program calls MPI_Finalize, an attribute of MPI_COMM_SELF makes the call, because MPI_Finalize deletes these
    attributes before all else (MPI 4.1, section 11.2.4). Otherwise mpi4py calls MPI_Finalize after the interpreter has
    ended. No callback can run then, so atexit makes the call.
    """
    global _finalize_keyval
    if _finalize_keyval == MPI.KEYVAL_INVALID:
        _finalize_keyval = MPI.Comm.Create_keyval(delete_fn=_release_all)
        MPI.COMM_SELF.Set_attr(_finalize_keyval, None)
        atexit.register(_release_all)
    _at_finalize.add(owner)


def _release_all(*_: object) -> None:
    page().enter_last("MPI_Finalize")
    while _at_finalize:
        _at_finalize.pop().release()
