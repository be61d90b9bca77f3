"""Measures calls of libraries in turns: checks the results of each, then times all of them round by round.

A `Machine` is the processor of the arrays, host or GPU, and times calls on it. Its times are in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpicomm.api.communicator import Communicator

Call = Callable[[], object]


class CallTimes(NamedTuple):
    """The time of a call, and the time for which it held the caller. The second is None for calls of a graph."""

    complete: float
    issue: float | None = None


class Machine:
    """One rank's processor, here the host: calls block, the wall clock times them, and there are no graphs."""

    xp: Any = np
    """The array library."""
    stream: Any = None
    """The stream of the calls; None on the host."""

    def current(self) -> AbstractContextManager[object]:
        """Return a ``with`` block in which array expressions go to the stream, too."""
        return nullcontext()

    def finish(self) -> None:
        """Wait for the stream."""

    def capture(self, call: Call, count: int) -> Any:
        """Capture ``count`` calls into a CUDA graph, for `launch` and `time_graph`. Return None without graphs."""
        return None

    def launch(self, graph: Any) -> None:
        """Launch a graph on the stream."""
        raise NotImplementedError

    def time_graph(self, graph: Any) -> CallTimes:
        """Return the time of one call of a graph."""
        raise NotImplementedError

    def time_calls(self, call: Call, count: int) -> CallTimes:
        """Time ``count`` calls that the host issues one by one. Return the share of one call."""
        start = time.perf_counter()
        for _ in range(count):
            call()
        issued = time.perf_counter()
        self.finish()
        finished = time.perf_counter()
        return CallTimes((finished - start) / count, (issued - start) / count)


class GpuMachine(Machine):
    """A GPU: calls go to one stream, which waits for no other stream, and CUDA events time them."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def current(self) -> Any:
        return self.stream

    def finish(self) -> None:
        self.stream.synchronize()

    def capture(self, call: Call, count: int) -> Any:
        self.stream.begin_capture()
        try:
            for _ in range(count):
                call()
        except BaseException:
            # A stream that still captures is of no use. The error of `end_capture` adds nothing to the raised error.
            with suppress(RuntimeError):
                self.stream.end_capture()
            raise
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        return graph, count

    def launch(self, graph: Any) -> None:
        captured, _ = graph
        captured.launch(self.stream)

    def time_graph(self, graph: Any) -> CallTimes:
        """Time the second of two launches in a row.

        In the first launch the ranks meet, and meanwhile the host enqueues the rest. So the timed launch starts on all
        GPUs at once and waits for no host.
        """
        captured, count = graph
        captured.launch(self.stream)
        self._start.record(self.stream)
        captured.launch(self.stream)
        self._stop.record(self.stream)
        self._stop.synchronize()
        milliseconds: float = self.xp.cuda.get_elapsed_time(self._start, self._stop)
        return CallTimes(milliseconds / 1e3 / count)


def machine_of(comm: Communicator) -> Machine:
    """Return the machine with the arrays of a communicator."""
    return Machine() if comm.device == "cpu" else GpuMachine()


T = TypeVar("T")


class LibraryError(Exception):
    """Why a library cannot run a case, or that it has failed on some rank."""


def collective_try(comm: Communicator, step: Callable[[], T]) -> T:
    """Take a step on all ranks. If it fails on one rank, raise `LibraryError` on all ranks. Collective.

    This does not help ranks that wait, within the step, for a rank on which the step fails.
    """
    result: Any = None
    try:
        result, failure = step(), None
    except LibraryError as error:
        failure = str(error)
    except Exception as error:  # another library may raise any class
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failures = comm.allgather(failure)
    rank = next((rank for rank, text in enumerate(failures) if text is not None), None)
    if rank is None:
        checked: T = result
        return checked
    everybody = all(text is not None for text in failures)
    raise LibraryError(failures[rank] if everybody else f"rank {rank}: {failures[rank]}")


@dataclass(frozen=True)
class Outcome:
    """The result of a library for a case. A time is the slowest rank's in a round, and the median of the rounds."""

    time_us: float
    issue_us: float | None
    """The time for which a call held the caller; None for calls of a graph."""
    wrong: int | None
    """The wrong elements on all ranks; None without a check."""
    eager: str
    """Why calls were issued one by one although the user asked for graphs; else empty."""
    way: str
    """The name of the call, if the library has several for a case."""
    spread: float = 0.0
    """The slowest round minus the fastest one, divided by the median."""


class CheckedCall(NamedTuple):
    """A call whose result is checked."""

    write: Call
    """Writes the input, and makes the memory of the result wrong."""
    call: Call
    count_wrong: Callable[[], int]
    """Returns the wrong elements on this rank."""


class Measured(NamedTuple):
    """The outcomes by library, and the reasons of the libraries that failed."""

    outcomes: Mapping[str, Outcome]
    failures: Mapping[str, str]


@dataclass
class Trial:
    """A call with which a library runs a case. A failure ends the run only if the library is mpicomm's ``own``."""

    name: str
    """The library."""
    call: Call
    """The timed call."""
    checks: Sequence[CheckedCall] = ()
    own: bool = True
    way: str = ""
    capturable: bool = True
    """Whether CUDA graphs can capture the call."""
    check_graph: bool = True
    """Whether the first check holds for the last call of a graph, too."""
    refresh: Call | None = None
    """Writes the input before each round."""
    wrong: int | None = None
    graph: Any = None
    eager: str = ""
    rounds: list[CallTimes] = field(default_factory=list)


class Measuring:
    """Measures trials: ``rounds`` of ``iterations`` calls each, after ``warmups``. All methods are collective."""

    def __init__(
        self, comm: Communicator, machine: Machine, *, iterations: int, warmups: int, rounds: int, graphs: bool
    ) -> None:
        self.comm, self.machine = comm, machine
        self.iterations, self.warmups, self.rounds, self.graphs = iterations, warmups, rounds, graphs

    @property
    def how(self) -> str:
        """How calls are timed, in words."""
        if self.graphs:
            return f"{self.rounds} launches of a graph of {self.iterations} calls"
        return f"{self.rounds} times {self.iterations} calls"

    def run(self, trials: Sequence[Trial], failures: Mapping[str, str] | None = None) -> Measured:
        """Measure the trials. The earlier ``failures`` of libraries are in the result, too."""
        ready, failures = list(trials), dict(failures or {})
        for step in (self._make_ready, *[self._time] * self.rounds):
            for trial in list(ready):
                try:
                    step(trial)
                except LibraryError as failure:
                    failures[trial.name] = f"{trial.way} {failure}".lstrip()
                    ready.remove(trial)
        return Measured(self._outcomes(ready), failures)

    def step(self, step: Callable[[], T], *, own: bool) -> T:
        """Take a step on all ranks, and let them wait for each other. A failure of mpicomm itself ends the run."""
        if not own:
            return collective_try(self.comm, step)
        result = step()
        self.comm.check(self.machine.stream)
        self.comm.barrier()
        return result

    def _make_ready(self, trial: Trial) -> None:
        for check in trial.checks:
            self._check(trial, check)
        self.step(lambda: self._repeat(trial.call, self.warmups), own=trial.own)
        if self.graphs and not trial.capturable:
            trial.eager = "it cannot be captured"
        elif self.graphs:
            try:  # to capture on all ranks or on none
                trial.graph = collective_try(self.comm, lambda: self.machine.capture(trial.call, self.iterations))
            except LibraryError as failure:
                trial.eager = str(failure)
        if trial.graph is not None and trial.own and trial.checks and trial.check_graph:
            self._check(trial, trial.checks[0]._replace(call=lambda: self.machine.launch(trial.graph)))

    def _check(self, trial: Trial, check: CheckedCall) -> None:
        self.step(lambda: self._write(check.write), own=trial.own)

        def run_and_compare() -> int:
            self._repeat(check.call, 1)
            with self.machine.current():
                return check.count_wrong()

        trial.wrong = (trial.wrong or 0) + self.step(run_and_compare, own=trial.own)

    def _write(self, write: Call) -> None:
        with self.machine.current():
            write()
        self.machine.finish()

    def _repeat(self, call: Call, count: int) -> None:
        for _ in range(count):
            call()
        self.machine.finish()

    def _time(self, trial: Trial) -> None:
        if trial.refresh is not None:
            refresh = trial.refresh
            self.step(lambda: self._write(refresh), own=trial.own)

        def timed() -> CallTimes:
            if trial.graph is not None:
                return self.machine.time_graph(trial.graph)
            return self.machine.time_calls(trial.call, self.iterations)

        trial.rounds.append(self.step(timed, own=trial.own))

    def _outcomes(self, trials: Sequence[Trial]) -> dict[str, Outcome]:
        """Return the outcome of each library's fastest call, over all ranks."""
        of_all = self.comm.allgather([(trial.rounds, trial.wrong) for trial in trials])
        outcomes: dict[str, Outcome] = {}
        for index, trial in enumerate(trials):
            rounds = list(zip(*(of_rank[index][0] for of_rank in of_all), strict=True))
            slowest = [max(times.complete for times in ranks) for ranks in rounds]
            complete = statistics.median(slowest)
            issues = [[times.issue for times in ranks if times.issue is not None] for ranks in rounds]
            issue = statistics.median(map(max, issues)) * 1e6 if all(issues) else None
            wrong = None if trial.wrong is None else sum(of_rank[index][1] for of_rank in of_all)
            spread = (max(slowest) - min(slowest)) / complete
            outcome = Outcome(complete * 1e6, issue, wrong, trial.eager, trial.way, spread)
            if trial.name in outcomes:
                both = (outcomes[trial.name], outcome)
                # The wrong elements of every call count, even if the table shows another call.
                wrongs = [each.wrong for each in both if each.wrong is not None]
                outcome = replace(min(both, key=lambda each: each.time_us), wrong=max(wrongs, default=None))
            outcomes[trial.name] = outcome
        return outcomes
