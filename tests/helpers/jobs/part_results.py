"""The results of the parts of `scripts/test`: a pytest plugin that writes them down, and a program that sums them up.

* ``pytest -p tests.helpers.jobs.part_results --results FILE`` writes the numbers of tests that passed, failed and were
  skipped, and the reasons for skips.
* ``python -m tests.helpers.jobs.part_results FILE`` prints a line for each part and one line of all. FILE has a line
  for each part: exit code, seconds, file of results ("-" for a program that is not pytest) and name, separated by tabs.
  The program exits with 1 if a part has failed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NO_TESTS = 5  # pytest's exit code if whole files were skipped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write how many tests passed, failed and were skipped")


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


def read(line: str) -> Part:
    """Return the part of a line of FILE. A part that passed but has no results has failed."""
    code, seconds, file, name = line.split("\t")
    if file == "-":
        return Part(name, int(seconds), code != "0", None, {})
    if not Path(file).exists():
        return Part(name, int(seconds), True, 0, {})
    counts = json.loads(Path(file).read_text())
    passed, skipped = counts["passed"], counts["skipped"]
    as_told = code == "0" or (int(code) == NO_TESTS and passed == 0)
    failed = counts["failed"] > 0 or not as_told or not (passed or skipped)
    return Part(name, int(seconds), failed, passed, skipped)


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


def main(file: Path) -> int:
    """Print the summary, and return the exit code."""
    parts = [read(line) for line in file.read_text().splitlines()]
    sys.stdout.write("\n".join([*(line for part in parts for line in part.lines()), conclusion(parts), ""]))
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
