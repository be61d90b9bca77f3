"""The waits in a running job: pure functions from the ranks at two moments to sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from mpicomm import errors
from mpicomm.activity.layout import ranks_as_text
from mpicomm.activity.reading import BlockedMessage, RankCalls, Step
from mpicomm.doctor.running import Job, Rank

_BUSY = 0.5  # the part of a core above which a process counts as busy
_PREPOSITIONS = {"receive": "from", "send": "to"}
_MOST_NAMED = 8  # ranks in one sentence, and ranks with a sentence of their own
_WAY_OUT = (
    "end the job, and make all collective calls on all ranks in one order, with device arrays on every rank or on no "
    "rank"
)


class RankWait(NamedTuple):
    """A rank, or several ranks, for which other ranks wait."""

    text: str
    seconds: float
    """The length of the wait, at least."""
    known: bool
    """Whether ``seconds`` is the time since the wait began.

    Otherwise it is the time for which the doctor has looked.
    """
    pids: tuple[int, ...]
    """The processes of the ranks that wait for no other rank themselves, as far as calls of mpicomm show."""
    is_first: bool
    """Whether all of the ranks wait for no other rank, so that other waits may come from this one."""


class Line(NamedTuple):
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
    does: str
    """The state of the process, as the kernel says."""


@dataclass(frozen=True)
class _Member:
    rank: Rank
    calls: RankCalls
    stays: bool
    """Whether it has begun no call of the communicator since the first look."""
    blocked: tuple[BlockedMessage, ...]
    """The messages in which it has been since the first look."""

    def peer(self, message: BlockedMessage) -> str:
        who = f"rank {message.peer}" if 0 <= message.peer < self.calls.size else "any rank"
        return f"{who} (tag {message.tag})" if message.tag >= 0 else who

    def end(self, message: BlockedMessage) -> str:
        """Return a message's other end, with the communicator."""
        return f"{_PREPOSITIONS[message.name]} {self.peer(message)} of {self.calls.name}"


class Look:
    """A job at two moments: ``before`` has its ranks some time earlier, by process number."""

    def __init__(self, job: Job, before: Mapping[int, Rank]) -> None:
        self._job = job
        self._before = before
        self._communicators: dict[int, dict[int, _Member]] = {}
        self._of_rank: dict[int, list[_Member]] = {}
        for rank in job.ranks:
            was = before.get(rank.process.pid)
            earlier = {calls.key: calls for calls in was.activity.communicators} if was is not None else {}
            for calls in rank.activity.communicators:
                then = earlier.get(calls.key)
                blocked = tuple(message for message in calls.messages if then and message in then.messages)
                member = _Member(rank, calls, then is not None and then.made == calls.made, blocked)
                self._communicators.setdefault(calls.key, {})[calls.rank] = member
                self._of_rank.setdefault(rank.process.pid, []).append(member)

    def waits(self) -> list[RankWait]:
        """Return all waits. Waits that may cause the others come first, and among equals the longest."""
        found = [*self._for_steps()]
        for members in self._communicators.values():
            found += [*self._for_collectives(members), *self._for_messages(members)]
        return sorted(found, key=lambda wait: (not wait.is_first, -wait.seconds))

    def lines(self) -> list[Line]:
        """Return a line for each rank of each communicator with calls. Ranks that wait come first."""
        found = []
        for rank in self._job.ranks:
            step = self._lasting_step(rank)
            if step is not None:
                missing, where = self._missing(rank, step), f"ranks {ranks_as_text(step.world_ranks)} of MPI.COMM_WORLD"
                who = rank.activity.world_rank, rank.process.pid
                since_s, names = _seconds(rank, step.since_ns), _named(missing) if missing else ""
                found.append(Line(where, *who, step.text, 0, since_s, names, self._says(rank)))
        for members in self._communicators.values():
            found += self._lines_of(members)
        # The lines of one communicator follow each other. A communicator with trouble comes first.
        troubled = {line.communicator for line in found if line.waits_for}
        return sorted(found, key=lambda line: (line.communicator not in troubled, line.communicator, line.rank))

    def _lines_of(self, members: Mapping[int, _Member]) -> Iterator[Line]:
        mutual = [member.calls.rank for member in _disordered(members)]
        late = mutual or _behind(members)
        used = any(member.calls.made for member in members.values())
        for member in members.values():
            rank, calls = member.rank, member.calls
            if not (used or calls.messages):
                continue
            call, number = calls.last or ("a call" if calls.made else "none yet"), calls.made
            seconds = None if calls.since_ns is None else _seconds(rank, calls.since_ns)
            others = [other for other in late if other != calls.rank]
            waits_for, does = _named(others) if others and (mutual or calls.rank not in late) else "", self._says(rank)
            for message in member.blocked:
                call, number, seconds, waits_for = message.name, message.number, None, member.peer(message)
            if not waits_for and calls.on_gpu and calls.since_ns is not None:
                does = f"has enqueued it, and {does}"
            who = calls.name, calls.rank, rank.process.pid
            yield Line(*who, call, number, seconds, waits_for, does)

    def _for_steps(self) -> Iterator[RankWait]:
        by_place = {(rank.world, rank.activity.world_rank): rank for rank in self._job.ranks}
        steps: dict[tuple[int, str, tuple[int, ...]], list[tuple[Rank, Step]]] = {}
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
            late, unseen = [], []
            for number in missing:
                rank_there, process = by_place.get((world, number)), self._job.unseen.get((world, number))
                if rank_there is not None:
                    late.append(rank_there)
                    said = f"Rank {number} {self._does(rank_there)}"
                elif process is not None:
                    unseen.append(process.pid)
                    said = f"Rank {number}, process {process.pid}, has not begun to make a Communicator"
                else:
                    said = f"Rank {number} has no process on this machine: it has ended, or runs on another node"
                if len(sentences) <= _MOST_NAMED:
                    sentences.append(said)
            seconds = max(_seconds(rank, step.since_ns) for rank, step in waiting)
            yield self._wait(sentences, seconds, True, late, unseen)

    def _for_collectives(self, members: Mapping[int, _Member]) -> Iterator[RankWait]:
        most = max(member.calls.made for member in members.values())
        ahead = [member for member in members.values() if member.calls.made == most]
        name = ahead[0].calls.name
        names = {member.calls.last.partition("(")[0] for member in ahead if member.calls.last}
        late: list[_Member] = []
        described: list[_Member] = []
        if disordered := _disordered(members):
            late = disordered
            orders = "; ".join(
                f"rank {calls.rank}: {calls.last} by MPI, its call {calls.by_mpi} by MPI, after {_others(calls)}"
                for calls in (member.calls for member in disordered)
            )
            said = f"ranks called different things of {name}: {orders}. MPI cannot end such waits: {_WAY_OUT}"
        elif behind := _behind(members):
            late = described = [members[index] for index in behind]
            have = f"{_named(behind)} {'is behind: it has' if len(late) == 1 else 'are behind: they have'}"
            made = _span({member.calls.made for member in late})
            others = _span({member.calls.made for index, member in members.items() if index not in behind})
            last = "; ".join(sorted({member.calls.last for member in ahead if member.calls.last}))
            said = f"{have} made {made} call{'s' * (made != '1')} of {name}, the others {others} ({last})"
        elif len(names) > 1 and all(member.stays for member in ahead):
            called = "; ".join(f"rank {member.calls.rank}: {member.calls.last}" for member in ahead)
            said = f"ranks called different things as number {most} of {name}: {called}"
        else:
            return
        times = [_seconds(member.rank, since) for member in ahead if (since := member.calls.since_ns) is not None]
        seconds = max(times) if times else self._watched_s(ahead[0].rank)
        sentences = [said, *map(self._at, described[:_MOST_NAMED])]
        yield self._wait(sentences, seconds, bool(times), [member.rank for member in late])

    def _for_messages(self, members: Mapping[int, _Member]) -> Iterator[RankWait]:
        for member in members.values():
            rank, calls = member.rank, member.calls
            for message in member.blocked:
                peers = [members[message.peer]] if message.peer in members else []
                said = f"rank {calls.rank} waits in a {message.name} {member.end(message)}"
                sentences = [said, *map(self._at, peers)]
                yield self._wait(sentences, self._watched_s(rank), False, [peer.rank for peer in peers])

    def _lasting_step(self, rank: Rank) -> Step | None:
        earlier, step = self._before.get(rank.process.pid), rank.activity.step
        return step if earlier is not None and earlier.activity.step == step else None

    def _missing(self, rank: Rank, step: Step) -> list[int]:
        """Return the ranks of MPI.COMM_WORLD that should be in a step, and are not."""
        others = [(other, other.activity.step) for other in self._job.ranks if other.world == rank.world]
        same = (step.text, step.world_ranks)
        here = {other.activity.world_rank for other, at in others if at and (at.text, at.world_ranks) == same}
        return [each for each in step.world_ranks if each >= 0 and each not in here]

    def _watched_s(self, rank: Rank) -> float:
        return _seconds(rank, self._before.get(rank.process.pid, rank).time_ns)

    def _wait(
        self, sentences: Sequence[str], seconds: float, known: bool, late: Sequence[Rank], unseen: Sequence[int] = ()
    ) -> RankWait:
        idle = [rank.process.pid for rank in late if not self._known_wait(rank)]
        is_first = len(idle) == len(late) and bool(idle or unseen)
        return RankWait(". ".join(sentences), seconds, known, (*idle, *unseen), is_first)

    def _at(self, member: _Member) -> str:
        """Return a sentence on a rank for which others wait in a communicator."""
        calls, since = member.calls, ""
        if calls.since_ns is not None:
            ago_s = _seconds(member.rank, calls.since_ns)
            since = f", and has begun no collective call since {calls.last} {ago_s:.1f} s ago"
        return f"Rank {calls.rank} {self._does(member.rank)}{since}"

    def _does(self, rank: Rank) -> str:
        return f"(process {rank.process.pid}) {self._known_wait(rank) or self._says(rank)}"

    def _known_wait(self, rank: Rank) -> str:
        """Return the step or message of a rank since the first look, or "" for none."""
        step = self._lasting_step(rank)
        if step is not None:
            return f"is in {step.text!r}"
        for member in self._of_rank.get(rank.process.pid, ()):
            for message in member.blocked:
                return f"{message.name}s {member.end(message)}"
        return ""

    def _says(self, rank: Rank) -> str:
        process, earlier = rank.process, self._before.get(rank.process.pid)
        if process.state in "Tt":
            return "is stopped, by a signal or a debugger"
        busy = process.state == "R"
        if earlier is not None and rank.time_ns > earlier.time_ns:
            part = (process.cpu_s - earlier.process.cpu_s) / ((rank.time_ns - earlier.time_ns) / 1e9)
            busy = busy or part >= _BUSY
        if busy:
            return "computes or polls"  # MPI and CUDA poll in their waits
        return "sleeps" + (f" ({process.sleeps_in})" if process.sleeps_in else "")


def _disordered(members: Mapping[int, _Member]) -> list[_Member]:
    """Return the ranks that wait in MPI for each other after calls in different orders; else an empty list.

    MPI does not carry out all calls, and ranks make both kinds of call in one order. So ranks with equally many calls
    by MPI have also made equally many other calls before. A rank with more calls by MPI than another rank has not made
    fewer of the other calls. MPI can neither notice such a wait nor end it.
    """
    waiting = [each for each in members.values() if each.stays and each.calls.last and each.calls.since_ns is None]
    for one, other in combinations([member.calls for member in waiting], 2):
        more, more_others = one.by_mpi - other.by_mpi, one.posts - other.posts
        if more * more_others < 0 or (more == 0 and more_others != 0):
            return waiting
    return []


def _behind(members: Mapping[int, _Member]) -> list[int]:
    """Return the ranks that have made fewer calls than another rank, and none since the first look."""
    most = max(member.calls.made for member in members.values())
    return sorted(index for index, member in members.items() if member.calls.made < most and member.stays)


def _seconds(rank: Rank, since_ns: int) -> float:
    return max(0.0, (rank.time_ns - since_ns) / 1e9)


def _named(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MOST_NAMED
    return errors.name_ranks(ranks[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _span(numbers: Collection[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}"


def _others(calls: RankCalls) -> str:
    last = f" (the last is {calls.last_post})" if calls.last_post else ""
    return f"{calls.posts} other call{'s' * (calls.posts != 1)}{last}"
