"""The summary of `scripts/test`, from pytest's reports about small test files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PARTS = {
    "good": "def test_one(): pass\ndef test_two(): pass",
    "partly skipped": """
import pytest
def test_one(): pass
@pytest.mark.parametrize("number", range(2))
def test_two(number): pytest.skip("no printer")
""",
    "skipped": "import pytest\ndef test_one(): pytest.skip('needs root')",
    "skipped file": "import pytest\npytest.skip('no GPU: no driver', allow_module_level=True)",
    "bad": "def test_one(): assert False\ndef test_two(): pass",
    "not collected": "import no_such_module",
    "empty": "",
    "skipped and bad": """
import pytest
def test_one(): pytest.skip("no printer")
def test_two(): assert False
""",
    "ends in the middle": "import os\ndef test_one(): os._exit(0)",
}


def summary(directory: Path, *names: str, program: str = "0\t7\t-\ta program\n") -> tuple[int, list[str]]:
    """Run the parts of these names and a program; return the exit code and the lines of the summary."""
    lines = ""
    for number, name in enumerate(names):
        test, results = directory / f"test_{number}.py", directory / f"{number}.json"
        test.write_text(PARTS[name])
        options = ("-p", "tests.helpers.jobs.part_results", "--results", str(results), "--rootdir", str(directory))
        # Without other plugins, which take most of the time.
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *options, str(test)]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE).returncode
        lines += f"{code}\t3\t{results}\t{name}\n"
    file = directory / "parts"
    file.write_text(lines + program)
    command = [sys.executable, "-m", "tests.helpers.jobs.part_results", str(file)]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return result.returncode, result.stdout.splitlines()


def test_the_summary_counts_tests_that_passed_and_tests_that_did_not_run(tmp_path: Path) -> None:
    assert summary(tmp_path, "good", "partly skipped", "skipped", "skipped file") == (
        0,
        [
            "good: passed in 3 s, 2 tests passed",
            "partly skipped: passed in 3 s, 1 tests passed",
            "    2 skipped: no printer",
            "skipped: skipped, needs root",
            "skipped file: skipped, no GPU: no driver",
            "a program: passed in 7 s",
            "passed: good, partly skipped, a program; did not run: skipped (needs root), skipped file (no GPU); "
            "ran without some tests: partly skipped",
        ],
    )


def test_what_failed(tmp_path: Path) -> None:
    names = ("bad", "not collected", "empty", "skipped and bad", "ends in the middle")
    code, lines = summary(tmp_path, *names, "good", program="1\t7\t-\ta program\n")
    assert code == 1
    assert [line for line in lines if "FAILED in 3 s" in line] == [
        f"{name}: FAILED in 3 s, {passed} tests passed" for name, passed in zip(names, (1, 0, 0, 0, 0), strict=True)
    ]
    assert lines[-1] == (
        f"FAILED: {', '.join(names)}, a program; passed: good; ran without some tests: skipped and bad"
    )
