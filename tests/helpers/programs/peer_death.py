"""Ranks that die, stop or fail at random lines of mpicomm: which error do the others get, and in time?

`mpiexec -n N python -m tests.helpers.programs.peer_death RESULTS [--trials K] [--kills M] [--seed S] [--timeout T]
[--device D] [--step NAME] [--hosts N]`

In each trial all ranks except the victim take the same steps, from the making of a communicator to its `Free`. The
trial draws a step, and one of the lines that mpicomm runs in it. At that line the victim stops (SIGSTOP) until the
others are done, or it raises, as a Ctrl-C does. In the last M trials the victim dies (SIGKILL, or an exit without a
word), and the others go on without it. A survivor must get an error within T + 1 seconds, free its communicator, keep
nothing of it, and go on with another one. A victim that lives on must keep nothing either. Each rank writes a line of
JSON per trial into RESULTS, which peer_death_jobs.py reads.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.faults.interrupts import Trap, interrupts_raise
from tests.helpers.faults.leaks import collect_only_new_objects, nothing_leaks
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.jobs.survivors import begin_in_child

if TYPE_CHECKING:
    import mpicomm

SLACK_S = 1.0  # a survivor may exceed the deadline by so much
RESUMED = ("stop", "raise", "interrupt")
FOR_GOOD = ("kill", "exit")


class Injected(Exception):
    """The error that a victim raises."""


@dataclass
class Outcome:
    """One rank's view of one trial."""

    trial: int
    how: str
    victim: int
    step: str
    line: str = ""
    error: str = ""
    error_step: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Play:
    """The steps of one trial on one rank."""

    def __init__(self, parent: Any, device: str, timeout_s: float) -> None:
        self._parent, self._device, self._timeout_s = parent, device, timeout_s
        self.comm: mpicomm.Communicator | None = None
        self.steps: dict[str, Callable[[], object]] = {
            "create": self._create,
            "zeros": lambda: setattr(self, "_array", self._made.zeros(1000, "f4")),
            "first collective": lambda: self._allreduce(5, "one_shot"),
            "one_shot": lambda: self._allreduce(300_000, "one_shot"),
            "two_shot": lambda: self._allreduce(300_000, "two_shot"),
            **({} if device == "cpu" else {"copy_engine": self._copies, "window": self._window}),
            "Bcast": self._bcast,
            "shared_event": lambda: self._made.shared_event(),
            "signals": self._signals,
            # On GPUs the best kind of handle is of memory that cannot come back.
            **(
                {"suspend": lambda: self._made.suspend(), "resume": lambda: self._made.resume()}
                if device == "cpu"
                else {}
            ),
            "close": lambda: self._array.close(),
            "Free": lambda: self._made.Free(),
        }

    @property
    def _made(self) -> mpicomm.Communicator:
        assert self.comm is not None
        return self.comm

    def _create(self) -> None:
        import mpicomm

        device = "cpu" if self._device == "cpu" else "auto"
        self.comm = mpicomm.Communicator(self._parent, device=device, timeout_s=self._timeout_s)

    def _buffer(self, count: int) -> Any:
        # Not above, because it starts MPI, before which the rank forks.
        from tests.helpers.rigs.communicators import array_module

        with array_module(self._made) as xp:
            return xp.ones(count, "f4")

    def _allreduce(self, count: int, algorithm: str) -> None:
        from mpi4py import MPI

        self._made.Allreduce(MPI.IN_PLACE, self._buffer(count), algorithm=algorithm)
        self._made.check()  # raises the error of a GPU

    def _copies(self) -> None:
        """Keep copies in flight for longer than it takes to enqueue more of them."""
        from mpi4py import MPI

        buffer = self._buffer(1 << 24)
        for _ in range(4):
            self._made.Allreduce(MPI.IN_PLACE, buffer, algorithm="copy_engine")
        self._made.check()

    def _bcast(self) -> None:
        self._made.Bcast(self._buffer(1 << 20), algorithm="one_shot")
        self._made.check()

    def _signals(self) -> None:
        from tests.helpers.rigs.communicators import node_ranks

        comm, array = self._made, self._array
        near = node_ranks(array)  # of the host
        place = near.index(comm.rank)
        following, previous = near[(place + 1) % len(near)], near[place - 1]
        array.put(array.local, following)
        array.signal(following)
        array.wait_signal(previous)
        comm.check()

    def _window(self) -> None:
        import mpicomm

        if self._made.num_nodes == 1:  # a window of device memory has ranks of one node
            win = mpicomm.Win.Allocate(64, comm=self._made, place="device")
            win.Fence()
            win.Fence()
            self._made.check()
            win.Free()

    _array: mpicomm.SymmetricArray


class Trials:
    """All trials, on one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        from mpi4py import MPI

        import mpicomm

        self._mpi, self._mpicomm = MPI, mpicomm
        package = str(Path(mpicomm.__file__).parent)
        self._is_package: Callable[[str], bool] = lambda file: file.startswith(package)
        self._options = options
        self._rank = MPI.COMM_WORLD.rank
        self._alive = list(range(MPI.COMM_WORLD.size))
        self._together: Any = MPI.COMM_WORLD.Dup()
        self._pids = self._together.allgather(os.getpid())
        self._rng = np.random.default_rng(options.seed)
        self._log = (options.results / f"rank-{self._rank}").open("w", buffering=1)
        self._stacks = (options.results / f"stacks-{self._rank}").open("w")
        self._lines: list[dict[str, int]] = []

    def run(self) -> bool:
        """Count the lines of each step, then run all trials; return whether this rank is to say that they are over."""
        for first in self._first_play().steps.values():  # imports more, and allocates more for good
            first()
        counted = self._count()
        collect_only_new_objects()
        self._lines = self._together.allgather(counted)
        kills = min(self._options.kills, len(self._alive) - 1)
        for trial in range(self._options.trials + kills):
            ways: tuple[str, ...] = RESUMED if trial < self._options.trials else FOR_GOOD
            how = ways[int(self._rng.integers(len(ways)))]
            victim = self._alive[int(self._rng.integers(len(self._alive)))]
            steps = [name for name in self._lines[victim] if self._options.step in (name, "")]
            step = steps[int(self._rng.integers(len(steps)))]
            at = 1 + int(self._rng.random() * self._lines[victim][step])
            outcome = Outcome(trial, how, victim, step)
            faulthandler.dump_traceback_later(HANG_S / 2, file=self._stacks)
            if self._rank == victim:
                self._suffer(outcome, at)
            else:
                self._survive(outcome)
            self._log.write(json.dumps(asdict(outcome)) + "\n")
        self._meet(outcome)
        return self._rank == self._alive[0]

    def _first_play(self) -> Play:
        return Play(self._together, self._options.device, 20.0)

    def _count(self) -> dict[str, int]:
        lines = {}
        for name, step in self._first_play().steps.items():
            with Trap(self._is_package) as trap:
                step()
            lines[name] = trap.lines
        return lines

    def _suffer(self, outcome: Outcome, at: int) -> None:
        """Take the victim's part."""
        parent = self._together.Dup()
        self._together.Create_group(self._mpi.GROUP_EMPTY)

        def act() -> None:
            outcome.line = trap.where
            if outcome.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif outcome.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif outcome.how == "exit":
                os._exit(0)
            else:
                interrupt()

        trap = Trap(self._is_package, at, act)
        # The signal of a Ctrl-C raises it, so that mpicomm can hold it back as it holds back a Ctrl-C.
        raised = KeyboardInterrupt if outcome.how == "interrupt" else Injected
        try:
            with interrupts_raise(raised) as interrupt, nothing_leaks():
                self._break_off(outcome, parent, trap)
        except AssertionError as error:
            outcome.wrong.append(f"the victim: {error}")
        self._meet(outcome)

    def _break_off(self, outcome: Outcome, parent: Any, trap: Trap) -> None:
        """Take the steps until the trap goes off, and give up."""
        play = Play(parent, self._options.device, self._options.timeout)
        try:
            for name, step in play.steps.items():
                outcome.error_step = name
                if name == outcome.step:
                    with trap:
                        step()
                else:
                    step()
        except (Injected, KeyboardInterrupt, self._mpicomm.MpicommError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        if outcome.how in FOR_GOOD:  # it did not get as far as its line
            os._exit(0)
        self._free(play, outcome)

    def _survive(self, outcome: Outcome) -> None:
        """Take a survivor's part."""
        together = self._together
        survivors = [rank for rank in self._alive if rank != outcome.victim]
        parent = together.Dup()
        everyone = together.Get_group()
        group = everyone.Excl([self._alive.index(outcome.victim)])
        apart = together.Create_group(group)
        other = Play(apart, self._options.device, 20.0)
        other.steps["create"]()
        other.steps["first collective"]()

        try:
            with nothing_leaks():
                self._notice(outcome, parent)
        except AssertionError as error:
            outcome.wrong.append(str(error))
        for name in ("first collective", "zeros", "signals", "close", "Free"):
            try:
                other.steps[name]()
            except self._mpicomm.MpicommError as error:
                outcome.wrong.append(f"{name} of the survivors' own communicator: {error}")
        if outcome.how in RESUMED:
            self._meet(outcome, self._pids[outcome.victim] if self._rank == survivors[0] else None)
        else:
            self._alive, self._together = survivors, apart
        for each in (group, everyone):
            each.Free()

    def _notice(self, outcome: Outcome, parent: Any) -> None:
        """Take the steps until one raises."""
        play = Play(parent, self._options.device, self._options.timeout)
        for name, step in play.steps.items():
            start = time.monotonic()
            try:
                step()
            except self._mpicomm.MpicommError as error:
                outcome.error, outcome.error_step = f"{type(error).__name__}: {error}", name
                self._judge(outcome, error)
            seconds = time.monotonic() - start
            outcome.seconds = max(outcome.seconds, seconds)
            if seconds > self._options.timeout + stretched(SLACK_S):
                outcome.wrong.append(f"{name} took {seconds:.2f} s")
            if outcome.error:
                break
        self._free(play, outcome)

    def _judge(self, outcome: Outcome, error: mpicomm.MpicommError) -> None:
        """Check the error's class and its ranks."""
        late = isinstance(error, self._mpicomm.CollectiveTimeoutError)
        names = list(Play(None, self._options.device, 0.0).steps)
        begun, failed = names.index(outcome.step), names.index(outcome.error_step)
        if failed < begun:  # the victim was still well: only a busy machine can have made a rank late
            if not late and "in time" not in str(error):
                outcome.wrong.append(f"an error before a rank has failed: {error}")
            return
        if outcome.how not in ("raise", "interrupt") and not late:
            outcome.wrong.append("the victim is silent, which is no CollectiveTimeoutError")
        # A wait for a signal or for the signal of a fence names its peer, which may itself wait for the victim, or be
        # gone because of it. A duplicate of MPI's communicator cannot name the missing rank.
        indirect = any(begun <= names.index(waits) <= failed for waits in ("signals", "window") if waits in names)
        place = self._alive.index(outcome.victim)
        if self._options.hosts > 1 and outcome.how in ("raise", "interrupt"):
            # The victim comes to `Free`, and misses a rank of its host that still waits for it.
            indirect = True
        if late and error.ranks and not indirect and place not in error.ranks:
            outcome.wrong.append(f"{error.ranks} are named instead of {place}")

    def _free(self, play: Play, outcome: Outcome) -> None:
        """Free the communicator; `Free` may raise once, because a rank is missing."""
        from mpicomm.cluster.monitored_barrier import GRACE_S

        if play.comm is None:
            return
        for _ in range(3):
            start = time.monotonic()
            try:
                play.comm.Free()
            except self._mpicomm.MpicommError as error:
                said = str(error)
            else:
                said = ""
            seconds = time.monotonic() - start
            # On several hosts a rank may come to `Free` while a rank of its host is in a call that it has not made.
            limit_s = self._options.timeout * (1 + (self._options.hosts > 1)) + stretched(SLACK_S)
            # The deadline restarts when the first rank comes. Only a first rank that goes on may come late.
            if outcome.how in RESUMED and outcome.victim == self._alive[0]:
                limit_s += self._options.timeout + GRACE_S
            if seconds > limit_s:
                outcome.wrong.append(f"Free took {seconds:.2f} s")
            if not said:
                return
        outcome.wrong.append(f"Free goes on saying: {said}")

    def _meet(self, outcome: Outcome, wake: int | None = None) -> None:
        """Wait for all ranks. The rank with ``wake`` continues the victim again and again, because it may stop late."""
        request = self._together.Ibarrier()
        deadline = time.monotonic() + HANG_S
        while not request.Test():
            if wake is not None:
                os.kill(wake, signal.SIGCONT)
            if time.monotonic() > deadline:
                outcome.wrong.append("the others did not come back")
                self._log.write(json.dumps(asdict(outcome)) + "\n")
                os._exit(1)
            time.sleep(2e-3)


def main() -> None:
    """Run the trials, then end without MPI_Finalize, which would wait for the dead."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=0.3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hosts", type=int, default=1, help="the hosts that the ranks claim to be on")
    parser.add_argument("--step", default="", help="the step of all victims; any, if none is given")
    options = parser.parse_args()
    begin_in_child(options.results)
    if options.hosts > 1:
        os.environ["MPICOMM_HOSTID"] = f"host{int(os.environ['PMI_RANK']) % options.hosts}"
    try:
        if Trials(options).run():
            (options.results / "done").touch()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
