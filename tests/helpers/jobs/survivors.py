"""Calls of the ranks that survive another rank: a program of a job makes them, and the test that starts it reads them.

Each rank leaves a line of JSON per call in the file ``rank-<r>`` of a directory, and then the file ``end-<r>``. Nothing
that starts MPI is imported here, because a rank has to fork before MPI starts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.helpers.jobs.pace import HANG_S, stretched

SLACK_S = 1.0  # a call may exceed its deadline by so much
KILLED = "killed"


@dataclass
class Call:
    """One call on one rank: the names of the error's classes, the most derived first, its text, the ranks it names."""

    name: str
    errors: list[str]
    text: str
    ranks: list[int]
    seconds: float

    def require_in_time(self, timeout_s: float, slack_s: float = SLACK_S) -> None:
        """Assert that it did not exceed its deadline."""
        assert self.seconds < timeout_s + stretched(slack_s), self

    def require_missing(self, timeout_s: float, rank: int, said: str) -> None:
        """Assert that it raised in time, and named the rank."""
        self.require_in_time(timeout_s)
        assert self.errors[:1] == ["CollectiveTimeoutError"] and self.ranks == [rank] and said in self.text, self


def make_calls(
    results: Path, rank: int, calls: Sequence[tuple[str, Callable[[], object]]], *, again: Sequence[str] = ()
) -> None:
    """Make calls, those named in ``again`` until they raise; leave their outcomes."""
    with (results / f"rank-{rank}").open("w", buffering=1) as file:
        for name, call in calls:
            errors: list[str] = []
            text, ranks = "", []
            while True:
                start = time.monotonic()
                try:
                    call()
                except Exception as error:
                    errors, text = [each.__name__ for each in type(error).__mro__], str(error)
                    ranks = list(getattr(error, "ranks", ()))
                if errors or name not in again:
                    break
            file.write(json.dumps(asdict(Call(name, errors, text, ranks, time.monotonic() - start))) + "\n")
    (results / f"end-{rank}").touch()


def calls_of(results: Path, rank: int) -> list[Call]:
    """Return the calls of a rank."""
    return [Call(**json.loads(line)) for line in (results / f"rank-{rank}").read_text().splitlines()]


def await_files(*files: Path) -> None:
    """Wait until all files are there."""
    deadline = time.monotonic() + HANG_S
    while missing := [file for file in files if not file.exists()]:
        assert time.monotonic() < deadline, f"there is no {missing[0]}"
        time.sleep(0.01)


def end_job(results: Path, rank: int, survivors: int) -> None:
    """Let the launcher end when the first ``survivors`` ranks have made their calls."""
    if rank == 0:
        await_files(*(results / f"end-{each}" for each in range(survivors)))
        (results / "done").touch()


def run_in_child(main: Callable[..., None], results: str, *arguments: object) -> None:
    """Run the program of a rank; the launcher does not learn of its death, and MPI_Finalize waits for no other rank."""
    begin_in_child(Path(results))
    main(Path(results), *arguments)
    os._exit(0)


def begin_in_child(results: Path) -> None:
    """Return in a child, before MPI starts; the parent, which the launcher watches, lives until all ranks are done.

    The ranks are done when ``results`` has the file `done`. The parent leaves the file `KILLED` there when a signal has
    killed the child, and the kernel has closed its connections.
    """
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        (results / KILLED).touch()
    elif os.WEXITSTATUS(status) != 0:
        os._exit(1)  # this ends the job
    while not (results / "done").exists():
        time.sleep(0.02)
    os._exit(0)
