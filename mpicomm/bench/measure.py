"""Measures a case on all contenders: checks the result of each, then times them in turns, round by round.

If calls vary, a contender has a list of variations of the case, and makes the next one in each call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.contenders import Contender, Contenders, PeerFailureError, together
from mpicomm.bench.content import Content
from mpicomm.bench.machine import Call, CallTimes, Machine, time_calls
from mpicomm.bench.operations import BARRIER, Case, CaseBuffers

_SEED = 48
_STEP_NBYTES = 512  # PyTorch and CuPy place arrays of GPUs at multiples of it
_PLACES = 64
ROOM_NBYTES = _STEP_NBYTES * _PLACES
"""The bytes that an array for all variations has in addition to the largest case."""


@dataclass(frozen=True)
class Variation:
    """A call on blocks of ``block`` elements. Its buffers begin ``shift`` bytes into their arrays.

    Such calls come from a program with changing batches and an allocator that places arrays anew.
    """

    block: int
    shift: int


def draw(largest: int, wanted: int) -> list[Variation]:
    """Return ``wanted`` different variations of blocks of at most ``largest`` elements, or all that exist.

    Blocks have more than half of ``largest``, so that each call has the algorithm and the geometry of the largest.
    Every rank draws the same variations.
    """
    smallest = largest // 2 + 1
    possible = (largest - smallest + 1) * _PLACES
    drawn = np.random.default_rng([_SEED, largest]).choice(possible, min(wanted, possible), replace=False)
    return [Variation(smallest + number // _PLACES, number % _PLACES * _STEP_NBYTES) for number in drawn.tolist()]


def mean_share(largest: int) -> float:
    """Return the mean block of all variations, divided by ``largest``."""
    return (largest // 2 + 1 + largest) / 2 / largest


T = TypeVar("T")
_CHECKED = 8  # variations in each check, because a call may go wrong only after a call of another size


@dataclass(frozen=True)
class Outcome:
    """The result of a contender for a case. A time is the slowest rank's in a round, and the median of the rounds."""

    time_us: float
    issue_us: float | None
    """The time for which a call held the caller; None for calls of a graph."""
    wrong: int | None
    """The wrong elements on all ranks; None without a check."""
    eager: str
    """Why calls were issued one by one although the user asked for graphs; else empty."""
    way: str
    """The name of the way, if the library has several."""


@dataclass(frozen=True)
class Effort:
    """The number of times that a contender runs each case."""

    iterations: int
    warmups: int
    checks: int
    rounds: int
    graphs: bool
    vary: bool = False
    """Whether each call is another variation of the case."""

    @property
    def checked_calls(self) -> int:
        """The number of checked calls of a contender."""
        return self.checks * (_CHECKED if self.vary else 1)

    @property
    def calls(self) -> int:
        """The number of all calls of a contender."""
        return self.checked_calls + self.warmups + self.iterations * self.rounds


@dataclass(frozen=True)
class _Scene:
    """A case, or a variation of it, and the buffers of a contender for it."""

    case: Case
    buffers: CaseBuffers


@dataclass
class _Runner:
    """A way of a contender to carry the case out, ready for timing."""

    contender: Contender
    way: str
    calls: list[Call]
    """One call for each scene."""
    scenes: list[_Scene]
    call: Call
    """The timed call. If calls vary, it makes the next call each time."""
    wrong: int | None = None
    graph: Any = None
    eager: str = ""
    rounds: list[CallTimes] = field(default_factory=list)


class Measuring:
    """Measures cases. All methods are collective."""

    def __init__(
        self, comm: Communicator, machine: Machine, content: Content, contenders: Contenders, effort: Effort
    ) -> None:
        self._comm = comm
        self._machine = machine
        self._content = content
        self._contenders = contenders
        self._effort = effort

    def run(self, case: Case) -> tuple[dict[str, Outcome], dict[str, str]]:
        """Measure a case. Return the outcomes by contender, and the reasons of contenders without one."""
        runners: list[_Runner] = []
        silent: dict[str, str] = {}

        def attempt(runner: _Runner, step: Callable[[_Runner, Case], None]) -> None:
            try:
                step(runner, case)
            except PeerFailureError as failure:
                silent[runner.contender.name] = f"{runner.way} {failure}".lstrip()
                runners.remove(runner)

        for contender in self._contenders.present:
            try:
                runners += self._runners(contender, case)
            except PeerFailureError as failure:
                silent[contender.name] = str(failure)
        for runner in list(runners):
            attempt(runner, self._make_ready)
        for _ in range(self._effort.rounds):
            for runner in list(runners):
                attempt(runner, self._time)
        return self._outcomes(runners), silent

    def _runners(self, contender: Contender, case: Case) -> list[_Runner]:
        """Return a runner for each way of a contender. Raises `PeerFailureError`."""
        scenes = [_Scene(case, contender.buffers(case))]
        if self._effort.vary:
            cases = [(replace(case, block=one.block), one.shift) for one in draw(case.block, self._effort.calls)]
            scenes = [_Scene(one, contender.buffers(one, shift)) for one, shift in cases]
        prepared = self._step(contender, lambda: [contender.peer.prepare(one.case, one.buffers) for one in scenes])
        runners = []
        for way in prepared[0]:
            calls = [ways[way] for ways in prepared]
            runners.append(_Runner(contender, way, calls, scenes, _in_turn(calls, self._effort.checked_calls)))
        return runners

    def _step(self, contender: Contender, step: Callable[[], T]) -> T:
        """Take a step on all ranks, and let them wait for each other. A failure of mpicomm itself ends the run."""
        if not contender.own:
            return together(self._comm, step)
        result = step()
        self._comm.check(self._machine.stream)
        self._comm.barrier()
        return result

    def _make_ready(self, runner: _Runner, case: Case) -> None:
        """Check the results of a runner, warm it up, and capture it."""
        effort = self._effort
        checks = effort.checked_calls if case.operation is not BARRIER else 0
        for scene, call in islice(cycle(zip(runner.scenes, runner.calls, strict=True)), checks):
            self._check(runner, scene, call)
        self._step(runner.contender, lambda: self._repeat(runner.call, effort.warmups))
        if effort.graphs:
            self._capture(runner)
        if runner.graph is not None and runner.contender.own and checks and not case.in_place:
            self._check(runner, runner.scenes[0], lambda: self._machine.launch(runner.graph))

    def _check(self, runner: _Runner, scene: _Scene, call: Call) -> None:
        def write() -> None:
            if self._effort.vary:  # a call that reads at the last call's addresses must not find the same data
                with self._machine.current():
                    self._content.poison(runner.contender.first[: scene.case.nbytes + ROOM_NBYTES])
            self._write(scene)

        self._step(runner.contender, write)

        def run_and_compare() -> int:
            self._repeat(call, 1)
            with self._machine.current():
                contender = runner.contender
                exact, error = contender.peer.exact, contender.error
                return self._content.count_wrong(scene.case, scene.buffers, exact=exact, error=error)

        runner.wrong = (runner.wrong or 0) + self._step(runner.contender, run_and_compare)

    def _write(self, scene: _Scene) -> None:
        with self._machine.current():
            self._content.prepare(scene.case, scene.buffers)
        self._machine.finish()

    def _repeat(self, call: Call, count: int) -> None:
        for _ in range(count):
            call()
        self._machine.finish()

    def _capture(self, runner: _Runner) -> None:
        """Capture the calls, on all ranks or on none."""
        if not runner.contender.peer.capturable:
            runner.eager = "it cannot be captured"
            return
        try:
            runner.graph = together(self._comm, lambda: self._machine.capture(runner.call, self._effort.iterations))
        except PeerFailureError as failure:
            runner.eager = str(failure)

    def _time(self, runner: _Runner, case: Case) -> None:
        if case.operation.reduces:
            # The data is fresh, because sums in place grow with every call, and PyTorch's two-shot changes its input.
            self._step(runner.contender, lambda: self._write(_Scene(case, runner.contender.buffers(case))))

        def timed() -> CallTimes:
            if runner.graph is not None:
                return self._machine.time_graph(runner.graph)
            return time_calls(self._machine, runner.call, self._effort.iterations)

        runner.rounds.append(self._step(runner.contender, timed))

    def _outcomes(self, runners: Sequence[_Runner]) -> dict[str, Outcome]:
        """Return the outcome of each contender's fastest way, over all ranks."""
        of_all = self._comm.allgather([(runner.rounds, runner.wrong) for runner in runners])
        outcomes: dict[str, Outcome] = {}
        for index, runner in enumerate(runners):
            rounds = list(zip(*(of_rank[index][0] for of_rank in of_all), strict=True))
            complete = statistics.median(max(times.complete for times in ranks) for ranks in rounds)
            issues = [[times.issue for times in ranks if times.issue is not None] for ranks in rounds]
            issue = statistics.median(map(max, issues)) * 1e6 if all(issues) else None
            wrong = None if runner.wrong is None else sum(of_rank[index][1] for of_rank in of_all)
            outcome = Outcome(complete * 1e6, issue, wrong, runner.eager, runner.way)
            name = runner.contender.name
            if name in outcomes:
                best = min(outcomes[name], outcome, key=lambda one: one.time_us)
                # The wrong elements of every way count, even if the table shows another way.
                wrongs = [one.wrong for one in (outcomes[name], outcome) if one.wrong is not None]
                outcome = Outcome(best.time_us, best.issue_us, max(wrongs, default=None), best.eager, best.way)
            outcomes[name] = outcome
        return outcomes


def _in_turn(calls: Sequence[Call], start: int) -> Call:
    """Return a call that makes the next call of ``calls`` each time, and begins with number ``start``."""
    if len(calls) == 1:
        return calls[0]
    turns = islice(cycle(calls), start, None)
    return lambda: next(turns)()
