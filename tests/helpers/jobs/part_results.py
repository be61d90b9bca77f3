"""A pytest plugin that writes down how far a part of `scripts/test` is: ``pytest -p ... --results FILE``.

At the end FILE gets the numbers of tests that passed, failed and were skipped, and the reasons for failures and skips.
FILE.progress gets the numbers of tests and of those that are over, and which test has run since when.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NO_TESTS = 5  # pytest's exit code if whole files were skipped
# What `causes` shows of a part.
FAILURES_NAMED, LAST_LINES, LINE_LENGTH = 10, 15, 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write how many tests passed, failed and were skipped")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--results") and not hasattr(config, "workerinput"):  # the process that starts workers reports
        config.pluginmanager.register(_Progress(config))


class _Progress:
    """Counts the tests, also those of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._total = self._over = 0
        self._running: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._total = len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items) or self._total

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.time()
        if file := self._config.getoption("--results"):  # ranks other than the first one write nothing
            slow, since = min(self._running.items(), key=lambda one: one[1])
            made = Path(f"{file}.new")
            made.write_text(json.dumps({"total": self._total, "over": self._over, "runs": slow, "since": since}))
            made.replace(f"{file}.progress")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._over += 1
        self._running.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if file := config.getoption("--results"):
        stats = terminalreporter.stats
        passed = len(stats.get("passed", ())) + len(stats.get("xfailed", ()))
        failed = [_failure(report) for name in ("failed", "error") for report in stats.get(name, ())]
        skipped = Counter(_reason(report) for report in stats.get("skipped", ()))
        Path(file).write_text(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))


def _failure(report: Any) -> str:
    lines = report.longreprtext.splitlines() or [""]
    error = next((line.removeprefix("E").strip() for line in lines if line.startswith("E  ")), lines[-1])
    return f"{report.nodeid}: {error}"


def _reason(report: Any) -> str:
    _, _, said = report.longrepr
    return str(said).removeprefix("Skipped: ")


@dataclass(frozen=True)
class Part:
    """The result of a part of the tests; ``passed`` is None if the part does not count tests.

    ``took`` is the time in seconds, and that of the processor, also in the processes that it started. ``why`` are lines
    about why it failed.
    """

    name: str
    took: tuple[int, int]
    failed: bool
    passed: int | None
    skipped: dict[str, int]
    why: list[str] = field(default_factory=list)

    @property
    def ran(self) -> bool:
        """Whether any test ran."""
        return self.failed or self.passed != 0

    @property
    def why_skipped(self) -> str:
        """The reasons for skipped tests."""
        return "; ".join(self.skipped)

    def lines(self) -> list[str]:
        """Return lines for a reader."""
        if not self.ran:
            return [f"{self.name}: skipped, {self.why_skipped}"]
        counted = "" if self.passed is None else f", {self.passed} tests passed"
        seconds, processor_s = self.took
        return [
            f"{self.name}: {'FAILED' if self.failed else 'passed'} in {seconds} s ({processor_s} s of CPU){counted}",
            *(f"    {count} skipped: {reason}" for reason, count in self.skipped.items()),
        ]


def part(name: str, code: int, took: tuple[int, int], results: Path | None, output: str = "") -> Part:
    """Return the result of a part from its exit code; ``results`` is None for a program that is not pytest.

    A part that passed but has no results has failed.
    """
    if results is None:
        return Part(name, took, code != 0, None, {}, _end_of(code, output))
    if not results.exists():
        at = Path(f"{results}.progress")
        running = [f"it ended in {json.loads(at.read_text())['runs']}"] if at.exists() else []
        return Part(name, took, True, 0, {}, [*running, *_end_of(code, output)])
    counts = json.loads(results.read_text())
    passed, skipped, failures = counts["passed"], counts["skipped"], counts["failed"]
    as_told = code == 0 or (code == NO_TESTS and passed == 0)
    failed = bool(failures) or not as_told or not (passed or skipped)
    why = failures[:FAILURES_NAMED]
    if len(failures) > FAILURES_NAMED:
        why.append(f"and {len(failures) - FAILURES_NAMED} further tests")
    return Part(name, took, failed, passed, skipped, why or _end_of(code, output))


def _end_of(code: int, output: str) -> list[str]:
    lines = output.rstrip().splitlines()
    # mpiexec of MPICH and of Open MPI say which signal ended a rank, before the stacks of all ranks.
    signals = [line for line in lines[:-LAST_LINES] if re.search("=   PID|EXIT STRING|exited on signal", line)]
    return [f"exit code {code}", *signals, *lines[-LAST_LINES:]]


def causes(parts: list[Part]) -> list[str]:
    """Return lines about why parts failed, for the end of a record whose middle may be lost."""
    said = []
    for each in parts:
        if each.failed:
            said.append(f"{each.name} FAILED:")
            said.extend(f"    {line[:LINE_LENGTH]}" for line in each.why)
    return said


def conclusion(parts: list[Part]) -> str:
    """Return one line about the parts that ran, the parts that did not, and the reasons."""
    said = []
    for word, names in (
        ("FAILED", [part.name for part in parts if part.failed]),
        ("passed", [part.name for part in parts if part.ran and not part.failed]),
        # The line of all has the beginning of a long reason; the line of the part has the rest.
        ("did not run", [f"{part.name} ({part.why_skipped.partition(': ')[0]})" for part in parts if not part.ran]),
        ("ran without some tests", [part.name for part in parts if part.ran and part.skipped]),
    ):
        if names:
            said.append(f"{word}: {', '.join(names)}")
    return "; ".join(said)
