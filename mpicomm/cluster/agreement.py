"""Agreement of ranks over MPI: in set-up and teardown, and before calls in which MPI would wait without a limit.

Each collective step of set-up and teardown is a `Group.allgather`. So no rank waits in a collective for a rank that has
failed: either every rank gets the results of all ranks, or every rank raises the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from mpicomm.activity.page import page
from mpicomm.cluster import process
from mpicomm.cluster.monitored_barrier import GRACE_S, abandoned, missing_ranks_error
from mpicomm.cluster.process import ranks_in_world, require_own_process
from mpicomm.devices.handle import limit_hint
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


def require_same(what: str, values: Sequence[object], ranks: Sequence[int] | None = None) -> None:
    """Raise `InvalidUsageError` if the ``values`` that ``ranks`` passed as ``what`` differ. None is for all ranks."""
    if len(set(values)) > 1:
        listed = ", ".join(f"{value} on rank {rank}" for rank, value in zip(ranks or count(), values, strict=False))
        raise InvalidUsageError(f"{what} differs between ranks: {listed}: pass the same on all ranks")


def broken_by(error: BaseException, step: str, rank: int) -> CollectiveTimeoutError | PeerError:
    """Return the error of later calls on ``rank``, on which ``error`` has ended ``step``."""
    if isinstance(error, CollectiveTimeoutError):
        return equal_error(error)  # without the frames of `error`, and the mapped memory in them
    return PeerError(f"rank {rank} left in the middle of {step}: {type(error).__name__}", ranks=[rank])


class _Outcome(NamedTuple):
    """What a rank contributes to an allgather: its result, or its error. It travels as a tuple, for speed."""

    step: str
    value: Any = None
    error: MpicommError | None = None


class _GaveUp(NamedTuple):
    """What a rank sends in place of its outcome, and the first rank in place of the outcomes of all."""

    error: CollectiveTimeoutError
    in_earlier_call: bool = False


class Group:
    """Ranks that set things up together, with a deadline for each step.

    ``comm`` is private to mpicomm, so no rank mistakes a message of the user for a message of mpicomm. ``ranks`` are
    the ranks of ``comm`` that belong to the group, in order. Errors name ranks of ``comm``.

    A timeout makes the group `broken`, because its ranks have come to different steps. Every later call raises
    `CollectiveTimeoutError` at once. A Ctrl-C in an allgather breaks the group on the interrupted rank, with
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
        self.calls_differed = False
        """Whether the ranks made different calls in the last allgather, so that some rank has left the call."""
        self.aborted = False
        """Whether the group is broken because a rank has called `abort`."""
        self.absence_reason: Callable[[Sequence[int]], str] = lambda ranks: ""
        """Returns why ranks that still run may not come; "" if nothing is known. An error ends with this text."""
        self.extend_deadline: Callable[[], bool] = lambda: False
        """Returns, after the deadline of an allgather, whether to wait as long once more."""

    def subgroup(self, ranks: Sequence[int], *, tag: int) -> Group:
        """Return a group of some of these ranks; local. ``tag`` keeps the messages of the two groups apart."""
        return Group(self._comm, ranks, self.timeout_s, tag=tag)

    def allgather(self, step: str, produce: Callable[[], T]) -> list[T]:
        """Run ``produce`` on every rank and return all results in group order. Collective, blocking.

        If ``produce`` raises on any rank, every rank raises an error of the same class. Its text names the ranks that
        failed, and the step, too, except in an `InvalidUsageError`. On the ranks that failed, the original error is the
        ``__cause__``.

        Ranks that call with different ``step`` get a `PeerError`. If a rank does not call within ``timeout_s`` seconds,
        the other ranks raise `CollectiveTimeoutError`. If a Ctrl-C takes a rank out of this call, the other ranks
        raise `CollectiveTimeoutError` in their next call.
        """
        self.require_intact(step)
        with page().step(step, self._in_world):
            return self._allgather(step, produce)

    @cached_property
    def _in_world(self) -> str:
        return ranks_in_world(self._comm, self.ranks)

    def _allgather(self, step: str, produce: Callable[[], T]) -> list[T]:
        cause: Exception | None = None
        start, limit_s = time.monotonic(), self.timeout_s
        try:
            own = _Outcome(step, produce())
        except Exception as error:
            if self.broken is not None:
                raise  # an allgather inside `produce` broke the group, so the ranks do not meet in this one
            cause = error
            # The class, text and ranks of the error, which MPI can send to other ranks.
            hint = limit_hint(error.errno) if isinstance(error, OSError) else ""
            sent = equal_error(error) if isinstance(error, MpicommError) else None
            own = _Outcome(step, error=sent or HandleError(f"{type(error).__name__}: {error}{hint}"))
            # `produce` may have waited for a peer that is gone. All waits together keep the deadline. Half of the time
            # is left in any case, because other ranks may still be busy. If an inner allgather has found a rank
            # missing, half of the grace is left, so that with the grace of `_report` a rank is less than a second late.
            late = error.ranks if isinstance(error, CollectiveTimeoutError) else None
            least_s = limit_s / 2 if late is None else GRACE_S / 2
            limit_s = max(limit_s - (time.monotonic() - start), least_s)
            if late and self.rank != 0 and self.ranks[0] in late:
                limit_s = -GRACE_S  # the first rank has had its time, and without it no rank gets an answer
        self.require_intact(step)  # an allgather inside `produce` may have failed in a clean-up, which raises nothing
        logger.log(TRACE, "allgather %r in ranks %s: %s", step, self.ranks, own.error or "done here")
        outcomes = self._gather_and_scatter(own, limit_s)
        failure = self._common_error(outcomes)
        if failure is not None:
            raise failure from cause
        return [outcome.value for outcome in outcomes]

    def require_intact(self, what: object) -> None:
        """Raise if the group is broken, or if this process is a forked child of its process; local and cheap."""
        if process.is_forked:
            require_own_process(what)
        if self.broken is not None:
            reason = "timeout" if isinstance(self.broken, CollectiveTimeoutError) else "error"
            raise type(self.broken)(
                f"{what}: this communicator is unusable since an earlier {reason} ({self.broken}); create another",
                ranks=self.broken.ranks,
            )

    def progress(self) -> None:
        """Let MPI progress pending communication, such as collectives that peers wait for; local, does not block.

        A rank that polls shared memory calls this, because MPI makes progress only inside its calls. Otherwise that
        rank and a peer in a nonblocking call of MPI could wait for each other.
        """
        self._comm.iprobe(self._comm.rank, self._tag)

    def agree(self, step: str, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank, and return its result of this rank. If one fails, all raise as in `allgather`."""
        results: list[T] = []
        self.allgather(step, lambda: results.append(act()))
        return results[0]

    def barrier(self, step: str) -> None:
        """Return when every rank has called it, or raise as in `allgather`."""
        self.allgather(step, lambda: None)

    def compare(self, step: str, produce: Callable[[], str]) -> None:
        """Run ``produce`` on every rank, and return if it returns the same text on all ranks. Collective, blocking.

        Raises as `allgather`, and `InvalidUsageError` with all texts if they differ. A rank on which ``produce`` raises
        an error that is not mpicomm's raises that error itself, and the others raise `PeerError`.
        """
        foreign: list[Exception] = []

        def produce_text() -> str:
            try:
                return produce()
            except MpicommError:
                raise
            except Exception as error:
                foreign.append(error)
                raise PeerError(f"{type(error).__name__}: {error}") from error

        try:
            texts = self.allgather(step, produce_text)
        except PeerError:
            if foreign:
                raise foreign[0] from None
            raise
        require_same(f"{step}: the call", texts, self.ranks)

    def _common_error(self, outcomes: list[_Outcome]) -> MpicommError | None:
        """Return the error that all ranks raise. It depends only on the outcomes, so all ranks compute the same one."""
        by_rank = dict(zip(self.ranks, outcomes, strict=True))
        different = _different_steps(by_rank)
        self.calls_differed = different != ""
        if different:
            return PeerError(different, ranks=self.ranks)
        failed = {rank: outcome.error for rank, outcome in by_rank.items() if outcome.error is not None}
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
        prefix = "" if isinstance(first, InvalidUsageError) else f"{outcomes[0].step} failed on "
        return first.like(prefix + text, at_fault)

    def _gather_and_scatter(self, own: _Outcome, limit_s: float) -> list[_Outcome]:
        """All-gather over a star: the first rank gathers the outcomes, so it can name a missing rank, and answers all.

        A rank sends its outcome only after the call of the first rank. If the call does not come in time, the rank
        sends that it gave up. So a first rank that comes late learns that the others have left. If ranks sent their
        outcomes unasked, it would take them for ranks that are here.

        One tag is enough, because messages of two allgathers never meet. No rank begins the next one before the first
        rank has answered this one, and the first rank answers after it has received all outcomes.
        """
        if self.size == 1:
            return [own]
        sends: list[MPI.Request] = []
        try:
            answer = self._collect(own, limit_s, sends) if self.rank == 0 else self._report(own, limit_s, sends)
            if isinstance(answer, _GaveUp):
                error, self.aborted = answer
                here = self.ranks[self.rank]
                late = f"; this is rank {here}, which came later" if here in error.ranks else ""
                raise CollectiveTimeoutError(f"{error}{late}", ranks=error.ranks)
            if not wait_until(lambda: MPI.Request.Testall(sends), self.timeout_s):
                raise CollectiveTimeoutError(f"{own.step}: a peer stopped receiving", ranks=self.ranks)
        except BaseException as error:
            # Sends to a rank that is gone never complete. Their requests keep their buffers, so the requests stay.
            abandoned.extend(sends)
            # After a Ctrl-C this rank does not know which messages it has sent and received, and must not take a
            # message of this call for a message of the next. The other ranks miss this rank in their next call. It
            # sends them nothing: if this call was their last, the message would arrive in another communicator to
            # which MPI gives the same number.
            self.broken = broken_by(error, own.step, self.ranks[self.rank])
            raise
        return answer

    def _collect(self, own: _Outcome, limit_s: float, sends: list[MPI.Request]) -> list[_Outcome] | _GaveUp:
        """Play the first rank: call the other ranks, receive their outcomes, and send all outcomes to all ranks."""
        others = self.ranks[1:]
        outcomes = {self.ranks[0]: own}
        gave_up: list[_GaveUp] = []

        def receive() -> bool:
            # Each rank by name, because a rank outside this group may be in an allgather of another subgroup.
            for rank in others:
                if rank not in outcomes and (message := self._comm.improbe(rank, self._tag)):
                    content = message.recv()
                    if isinstance(content, _GaveUp):
                        gave_up.append(content)
                        return True
                    outcomes[rank] = _Outcome(*content)
            return len(outcomes) == self.size

        sends += [self._send(None, rank) for rank in others]
        complete = self._wait(receive, limit_s)
        answer: list[_Outcome] | _GaveUp
        if gave_up:
            answer = gave_up[0]
        elif complete:
            answer = [outcomes[rank] for rank in self.ranks]
        else:
            missing = [rank for rank in others if rank not in outcomes]
            late = missing_ranks_error(own.step, missing, self.timeout_s, self.absence_reason(missing))
            different = _different_steps(outcomes)
            answer = _GaveUp(CollectiveTimeoutError(f"{late}; {different}", ranks=late.ranks) if different else late)
        # A missing rank gets the answer, too, so that it raises at once if it comes late.
        content = answer if isinstance(answer, _GaveUp) else list(map(tuple, answer))
        sends += [self._send(content, rank) for rank in others]
        return answer

    def _report(self, own: _Outcome, limit_s: float, sends: list[MPI.Request]) -> list[_Outcome] | _GaveUp:
        """Play another rank: wait for the call of the first rank, send it the outcome, and return its answer."""
        first = self.ranks[0]
        received: list[Any] = []  # from the first rank: None as its call, then the answer

        def receive() -> bool:
            if message := self._comm.improbe(first, self._tag):
                received.append(message.recv())
                return True
            return False

        called = self._wait(receive, limit_s + GRACE_S)
        if called:
            sends.append(self._send(tuple(own), first))
            if self._wait(receive, limit_s + GRACE_S):
                answer: list[tuple[Any, ...]] | _GaveUp = received[1]
                return answer if isinstance(answer, _GaveUp) else [_Outcome(*each) for each in answer]
        gave_up = _GaveUp(missing_ranks_error(own.step, [first], self.timeout_s, self.absence_reason([first])))
        if not called:
            sends.append(self._send(gave_up, first))
        return gave_up

    def abort(self, error: CollectiveTimeoutError) -> None:
        """Break the group after ``error`` has ended a call outside of it. Local, does not block.

        The other ranks need not wait for this rank then: their next allgather raises ``error``.
        """
        if self.broken is None:
            self.broken, gave_up = equal_error(error), _GaveUp(equal_error(error), in_earlier_call=True)
            messages = [(content, rank) for content in (None, gave_up) for rank in self.ranks[1:]]
            for content, rank in messages if self.rank == 0 else [(gave_up, self.ranks[0])]:
                abandoned.append(self._send(content, rank))

    def _send(self, content: object, rank: int) -> MPI.Request:
        """Send without waiting. If MPI knows that the rank is dead, send nothing: its silence names it."""
        try:
            return self._comm.isend(content, rank, self._tag)
        except MPI.Exception as error:  # MPI raises for a rank of another node if the connection is gone
            logger.info("cannot send to rank %d: %s", rank, error)
            return MPI.REQUEST_NULL

    def _wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        return wait_until(ready, limit_s) or (self.extend_deadline() and wait_until(ready, limit_s))


def _different_steps(outcomes: dict[int, _Outcome]) -> str:
    """Return the steps of ranks in words, "" if all ranks are in the same step."""
    if len({outcome.step for outcome in outcomes.values()}) == 1:
        return ""
    steps = "; ".join(f"rank {rank}: {outcomes[rank].step}" for rank in sorted(outcomes))
    return f"ranks called different things: {steps}"
