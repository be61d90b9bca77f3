"""A pytest plugin that writes down how far a part of `scripts/test` is: ``pytest -p ... --results FILE``.

At the end FILE gets the numbers of tests that passed, failed and were skipped, and the reasons for skips. FILE.progress
gets the numbers of tests and of those that are over, and which test has run since when.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NO_TESTS = 5  # pytest's exit code if whole files were skipped


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
        passed, failed = (
            sum(len(stats.get(name, ())) for name in names) for names in (("passed", "xfailed"), ("failed", "error"))
        )
        skipped = Counter(_reason(report) for report in stats.get("skipped", ()))
        Path(file).write_text(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))


def _reason(report: Any) -> str:
    _, _, said = report.longrepr
    return str(said).removeprefix("Skipped: ")


@dataclass(frozen=True)
class Part:
    """The result of a part of the tests; ``passed`` is None if the part does not count tests."""

    name: str
    seconds: int
    failed: bool
    passed: int | None
    skipped: dict[str, int]

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
        return [
            f"{self.name}: {'FAILED' if self.failed else 'passed'} in {self.seconds} s{counted}",
            *(f"    {count} skipped: {reason}" for reason, count in self.skipped.items()),
        ]


def part(name: str, code: int, seconds: int, results: Path | None) -> Part:
    """Return the result of a part from its exit code; ``results`` is None for a program that is not pytest.

    A part that passed but has no results has failed.
    """
    if results is None:
        return Part(name, seconds, code != 0, None, {})
    if not results.exists():
        return Part(name, seconds, True, 0, {})
    counts = json.loads(results.read_text())
    passed, skipped = counts["passed"], counts["skipped"]
    as_told = code == 0 or (code == NO_TESTS and passed == 0)
    failed = counts["failed"] > 0 or not as_told or not (passed or skipped)
    return Part(name, seconds, failed, passed, skipped)


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
