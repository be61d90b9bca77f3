"""Who waits for whom in a running job: pure functions of two samples of its ranks, as sentences and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from mpicomm import errors
from mpicomm.activity.layout import ranks_as_text
from mpicomm.activity.reading import BlockedMessage, RankCalls, Step
from mpicomm.doctor.running import RunningJob, RunningRank

_BUSY = 0.5  # the part of a core above which a process counts as busy
_PREPOSITIONS = {"receive": "from", "send": "to"}
_MAX_NAMED = 8  # ranks in one sentence, and ranks with a sentence of their own
_REMEDY = (
    "end the job, and make all collective calls on all ranks in one order, with device arrays on every rank or on no "
    "rank"
)


class RankWait(NamedTuple):
    """A wait of ranks for other ranks."""

    text: str
    seconds: float
    exact: bool
    """Whether ``seconds`` is the time since the wait began. Otherwise it is only the time between the samples."""
    pids: tuple[int, ...]
    """The processes of the awaited ranks that wait for no other rank, as far as calls of mpicomm show."""
    is_root_cause: bool
    """Whether no awaited rank waits for another rank, so that other waits may come from this one."""


class TableRow(NamedTuple):
    """The state of one rank in one communicator."""

    communicator: str
    rank: int
    pid: int
    call: str
    number: int
    """The number of such calls that the rank has begun; 0 if they are not counted."""
    seconds: float | None
    """The time since the call or the wait began; None if it is not known."""
    waits_for: str
    process_state: str


@dataclass(frozen=True)
class _Member:
    """A rank as a member of one communicator."""

    rank: RunningRank
    calls: RankCalls
    is_stalled: bool
    """Whether it has begun no call of the communicator since the first sample."""
    blocked: tuple[BlockedMessage, ...]
    """The messages in which it has been since the first sample."""

    def peer(self, message: BlockedMessage) -> str:
        who = f"rank {message.peer}" if 0 <= message.peer < self.calls.size else "any rank"
        return f"{who} (tag {message.tag})" if message.tag >= 0 else who

    def peer_in_communicator(self, message: BlockedMessage) -> str:
        return f"{_PREPOSITIONS[message.name]} {self.peer(message)} of {self.calls.name}"


class WaitReport:
    """The waits in a job. ``before`` has an earlier sample of its ranks, by process number."""

    def __init__(self, job: RunningJob, before: Mapping[int, RunningRank]) -> None:
        self._job = job
        self._before = before
        self._communicators: dict[int, dict[int, _Member]] = {}
        self._waits_in: dict[int, str] = {}
        """The steps and messages in which ranks have waited since the first sample, by process number."""
        for rank in job.ranks:
            pid = rank.process.pid
            earlier = {calls.key: calls for calls in before[pid].activity.communicators} if pid in before else {}
            if step := self._lasting_step(rank):
                self._waits_in[pid] = f"is in {step.text!r}"
            for calls in rank.activity.communicators:
                then = earlier.get(calls.key)
                blocked = tuple(message for message in calls.messages if then and message in then.messages)
                member = _Member(rank, calls, then is not None and then.made == calls.made, blocked)
                self._communicators.setdefault(calls.key, {})[calls.rank] = member
                for message in blocked:
                    self._waits_in.setdefault(pid, f"{message.name}s {member.peer_in_communicator(message)}")

    def waits(self) -> list[RankWait]:
        """Return all waits: first the possible causes of the others, and among equals the longest first."""
        found = [*self._step_waits()]
        for members in self._communicators.values():
            found += [*self._collective_waits(members), *self._message_waits(members)]
        return sorted(found, key=lambda wait: (not wait.is_root_cause, -wait.seconds))

    def rows(self) -> list[TableRow]:
        """Return a row for each rank of each communicator with calls; communicators with waits come first."""
        found = []
        for rank in self._job.ranks:
            if step := self._lasting_step(rank):
                missing, where = self._missing(rank, step), f"ranks {ranks_as_text(step.world_ranks)} of MPI.COMM_WORLD"
                who = rank.activity.world_rank, rank.process.pid
                since_s, names = _seconds(rank, step.since_ns), _named(missing) if missing else ""
                found.append(TableRow(where, *who, step.text, 0, since_s, names, self._process_state(rank)))
        for members in self._communicators.values():
            found += self._communicator_rows(members)
        waiting = {row.communicator for row in found if row.waits_for}
        return sorted(found, key=lambda row: (row.communicator not in waiting, row.communicator, row.rank))

    def _communicator_rows(self, members: Mapping[int, _Member]) -> Iterator[TableRow]:
        mutual = [member.calls.rank for member in _out_of_order(members)]
        late = mutual or _behind(members)
        is_used = any(member.calls.made for member in members.values())
        for member in members.values():
            rank, calls = member.rank, member.calls
            if not (is_used or calls.messages):
                continue
            call, number = calls.last or ("a call" if calls.made else "none yet"), calls.made
            seconds = None if calls.since_ns is None else _seconds(rank, calls.since_ns)
            others = [other for other in late if other != calls.rank]
            waits_for = _named(others) if others and (mutual or calls.rank not in late) else ""
            for message in member.blocked:
                call, number, seconds, waits_for = message.name, message.number, None, member.peer(message)
            state = self._process_state(rank)
            if not waits_for and calls.on_gpu and calls.since_ns is not None:
                state = f"has enqueued it, and {state}"
            yield TableRow(calls.name, calls.rank, rank.process.pid, call, number, seconds, waits_for, state)

    def _step_waits(self) -> Iterator[RankWait]:
        ranks = {(rank.world, rank.activity.world_rank): rank for rank in self._job.ranks}
        steps: dict[tuple[int, str, tuple[int, ...]], list[tuple[RunningRank, Step]]] = {}
        for rank in self._job.ranks:
            if step := self._lasting_step(rank):
                steps.setdefault((rank.world, step.text, step.world_ranks), []).append((rank, step))
        for (world, name, _), waiting in steps.items():
            missing = self._missing(*waiting[0])
            if not missing:
                continue
            here = [rank.activity.world_rank for rank, _ in waiting]
            come, wait = "has" if len(missing) == 1 else "have", "waits" if len(here) == 1 else "wait"
            sentences = [f"{_named(missing)} of MPI.COMM_WORLD {come} not come: {_named(here)} {wait} in {name!r}"]
            late, uninitialized = [], []
            for number in missing:
                rank_there, process = ranks.get((world, number)), self._job.uninitialized.get((world, number))
                if rank_there is not None:
                    late.append(rank_there)
                    sentence = f"Rank {number} {self._process_and_wait(rank_there)}"
                elif process is not None:
                    uninitialized.append(process.pid)
                    sentence = f"Rank {number}, process {process.pid}, has not begun to make a Communicator"
                else:
                    sentence = f"Rank {number} has no process on this machine: it has ended, or runs on another node"
                if len(sentences) <= _MAX_NAMED:
                    sentences.append(sentence)
            seconds = max(_seconds(rank, step.since_ns) for rank, step in waiting)
            yield self._wait(sentences, seconds, True, late, uninitialized)

    def _collective_waits(self, members: Mapping[int, _Member]) -> Iterator[RankWait]:
        most = max(member.calls.made for member in members.values())
        ahead = [member for member in members.values() if member.calls.made == most]
        name = ahead[0].calls.name
        late = _out_of_order(members)
        sentences: list[str] = []
        if late:
            orders = []
            for calls in (member.calls for member in late):
                last = f" (the last is {calls.last_post})" if calls.last_post else ""
                others = f"{calls.posts} other call{'s' * (calls.posts != 1)}{last}"
                orders.append(f"rank {calls.rank}: {calls.last} by MPI, its call {calls.by_mpi} by MPI, after {others}")
            text = f"ranks called different things of {name}: {'; '.join(orders)}. MPI cannot end such waits: {_REMEDY}"
        elif behind := _behind(members):
            late = [members[index] for index in behind]
            sentences = [self._late_sentence(member) for member in late[:_MAX_NAMED]]
            have = f"{_named(behind)} {'is behind: it has' if len(late) == 1 else 'are behind: they have'}"
            made = _span({member.calls.made for member in late})
            others = _span({member.calls.made for index, member in members.items() if index not in behind})
            last = "; ".join(sorted({member.calls.last for member in ahead if member.calls.last}))
            text = f"{have} made {made} call{'s' * (made != '1')} of {name}, the others {others} ({last})"
        else:
            operations = {member.calls.last.partition("(")[0] for member in ahead if member.calls.last}
            if len(operations) < 2 or not all(member.is_stalled for member in ahead):
                return
            called = "; ".join(f"rank {member.calls.rank}: {member.calls.last}" for member in ahead)
            text = f"ranks called different things as number {most} of {name}: {called}"
        times = [_seconds(member.rank, since) for member in ahead if (since := member.calls.since_ns) is not None]
        seconds = max(times) if times else self._sampled_s(ahead[0].rank)
        yield self._wait([text, *sentences], seconds, bool(times), [member.rank for member in late])

    def _message_waits(self, members: Mapping[int, _Member]) -> Iterator[RankWait]:
        for member in members.values():
            rank, calls = member.rank, member.calls
            for message in member.blocked:
                peers = [members[message.peer]] if message.peer in members else []
                text = f"rank {calls.rank} waits in a {message.name} {member.peer_in_communicator(message)}"
                sentences = [text, *map(self._late_sentence, peers)]
                yield self._wait(sentences, self._sampled_s(rank), False, [peer.rank for peer in peers])

    def _lasting_step(self, rank: RunningRank) -> Step | None:
        """Return the step in which a rank has been since the first sample."""
        earlier, step = self._before.get(rank.process.pid), rank.activity.step
        return step if earlier is not None and earlier.activity.step == step else None

    def _missing(self, rank: RunningRank, step: Step) -> list[int]:
        """Return the ranks of MPI.COMM_WORLD that should be in a step, and are not."""
        others = [(other, other.activity.step) for other in self._job.ranks if other.world == rank.world]
        same = (step.text, step.world_ranks)
        here = {other.activity.world_rank for other, at in others if at and (at.text, at.world_ranks) == same}
        return [each for each in step.world_ranks if each >= 0 and each not in here]

    def _sampled_s(self, rank: RunningRank) -> float:
        return _seconds(rank, self._before.get(rank.process.pid, rank).time_ns)

    def _wait(
        self,
        sentences: Sequence[str],
        seconds: float,
        exact: bool,
        late: Sequence[RunningRank],
        uninitialized: Sequence[int] = (),
    ) -> RankWait:
        idle = [rank.process.pid for rank in late if rank.process.pid not in self._waits_in]
        is_root_cause = len(idle) == len(late) and bool(idle or uninitialized)
        return RankWait(". ".join(sentences), seconds, exact, (*idle, *uninitialized), is_root_cause)

    def _late_sentence(self, member: _Member) -> str:
        """Return a sentence on a rank for which others wait in a communicator."""
        calls, since = member.calls, ""
        if calls.since_ns is not None:
            ago_s = _seconds(member.rank, calls.since_ns)
            since = f", and has begun no collective call since {calls.last} {ago_s:.1f} s ago"
        return f"Rank {calls.rank} {self._process_and_wait(member.rank)}{since}"

    def _process_and_wait(self, rank: RunningRank) -> str:
        pid = rank.process.pid
        return f"(process {pid}) {self._waits_in.get(pid) or self._process_state(rank)}"

    def _process_state(self, rank: RunningRank) -> str:
        process, earlier = rank.process, self._before.get(rank.process.pid)
        if process.state in "Tt":
            return "is stopped, by a signal or a debugger"
        is_busy = process.state == "R"
        if earlier is not None and rank.time_ns > earlier.time_ns:
            part = (process.cpu_s - earlier.process.cpu_s) / ((rank.time_ns - earlier.time_ns) / 1e9)
            is_busy = is_busy or part >= _BUSY
        if is_busy:
            return "computes or polls"  # MPI and CUDA poll in their waits
        return "sleeps" + (f" ({process.sleeps_in})" if process.sleeps_in else "")


def _out_of_order(members: Mapping[int, _Member]) -> list[_Member]:
    """Return the ranks that wait in MPI for each other after calls in different orders; else an empty list.

    Some calls are not by MPI, and ranks make both kinds of call in one order. So ranks with equally many calls by MPI
    have also made equally many other calls before. A rank with more calls by MPI than another rank has not made
    fewer of the other calls. MPI can neither notice such a wait nor end it.
    """
    waiting = [each for each in members.values() if each.is_stalled and each.calls.last and each.calls.since_ns is None]
    for one, other in combinations([member.calls for member in waiting], 2):
        more, more_others = one.by_mpi - other.by_mpi, one.posts - other.posts
        if more * more_others < 0 or (more == 0 and more_others != 0):
            return waiting
    return []


def _behind(members: Mapping[int, _Member]) -> list[int]:
    """Return the ranks that have made fewer calls than another rank, and none since the first sample."""
    most = max(member.calls.made for member in members.values())
    return sorted(index for index, member in members.items() if member.calls.made < most and member.is_stalled)


def _seconds(rank: RunningRank, since_ns: int) -> float:
    return max(0.0, (rank.time_ns - since_ns) / 1e9)


def _named(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MAX_NAMED
    return errors.name_ranks(ranks[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _span(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"
