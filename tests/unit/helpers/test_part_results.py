"""The summary of `scripts/test`, from pytest's reports about small test files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.jobs.part_results import Part, causes, conclusion, part
from tests.helpers.jobs.run_parts import Run, Step

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


# A process for each part, but only one that imports pytest.
RUN_EACH = """
import os, sys
import pytest
directory, count = sys.argv[1], int(sys.argv[2])
for number in range(count):
    if os.fork() == 0:
        options = ["-p", "tests.helpers.jobs.part_results", "--results", f"{directory}/{number}.json"]
        code = pytest.main([*options, "--rootdir", directory, f"{directory}/test_{number}.py"])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.wait()
    print(f"\\n---- {os.waitstatus_to_exitcode(status)}", flush=True)
"""


def summary(directory: Path, *names: str, program: int = 0) -> tuple[bool, list[str]]:
    """Run the parts of these names and a program with an exit code; return whether any failed, and the summary."""
    for number, name in enumerate(names):
        (directory / f"test_{number}.py").write_text(PARTS[name])
    # Without other plugins, which take most of the time.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", RUN_EACH, str(directory), str(len(names))]
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    outputs = re.findall(r"(.*?)^---- (\d+)$", ended.stdout, re.MULTILINE | re.DOTALL)
    parts = [
        part(name, int(code), (3, 2), directory / f"{number}.json", output)
        for number, (name, (output, code)) in enumerate(zip(names, outputs, strict=True))
    ]
    parts.append(part("a program", program, (7, 9), None, "its last words\n"))
    lines = [line for each in parts for line in each.lines()]
    return any(each.failed for each in parts), [*lines, *causes(parts), conclusion(parts)]


def test_the_summary_counts_tests_that_passed_and_tests_that_did_not_run(tmp_path: Path) -> None:
    assert summary(tmp_path, "good", "partly skipped", "skipped", "skipped file") == (
        False,
        [
            "good: passed in 3 s (2 s of CPU), 2 tests passed",
            "partly skipped: passed in 3 s (2 s of CPU), 1 tests passed",
            "    2 skipped: no printer",
            "skipped: skipped, needs root",
            "skipped file: skipped, no GPU: no driver",
            "a program: passed in 7 s (9 s of CPU)",
            "passed: good, partly skipped, a program; did not run: skipped (needs root), skipped file (no GPU); "
            "ran without some tests: partly skipped",
        ],
    )


def test_what_failed(tmp_path: Path) -> None:
    names = ("bad", "not collected", "empty", "skipped and bad", "ends in the middle")
    failed, lines = summary(tmp_path, *names, "good", program=1)
    assert failed
    assert [line for line in lines if "FAILED in 3 s (2 s of CPU)" in line] == [
        f"{name}: FAILED in 3 s (2 s of CPU), {passed} tests passed"
        for name, passed in zip(names, (1, 0, 0, 0, 0), strict=True)
    ]
    why = lines[lines.index("bad FAILED:") : -1]
    assert why[1] == "    test_0.py::test_one: assert False"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in why[3]
    assert why[why.index("empty FAILED:") + 1] == "    exit code 5"
    assert why[why.index("ends in the middle FAILED:") + 1 :][:2] == [
        "    it ended in test_4.py::test_one",
        "    exit code 0",
    ]
    assert why[-3:] == ["a program FAILED:", "    exit code 1", "    its last words"]
    assert lines[-1] == (
        f"FAILED: {', '.join(names)}, a program; passed: good; ran without some tests: skipped and bad"
    )


def test_a_run_shows_how_far_it_is_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = tmp_path / "test_fast.py", tmp_path / "test_slow.py"
    go_on = tmp_path / "go on"
    fast.write_text("def test_one(): pass")
    slow.write_text(f"""
import time
from pathlib import Path
def test_one(): pass
def test_two(): pass
def test_three():
    while not Path({str(go_on)!r}).exists():
        time.sleep(0.01)
""")
    pytest_ = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path)]
    first = Step("first", [*pytest_, str(slow)])
    second = Step("second", [*pytest_, str(fast)], after=first)
    bad = Step("bad", [sys.executable, "-c", "print('the cause'); 1 / 0"], counts=False)
    run = Run([[first], [second], [bad]], tmp_path)
    results: list[Part] = []
    thread = threading.Thread(target=lambda: results.extend(run.run()), daemon=True)
    thread.start()
    assert wait_until(lambda: "first 2 of 3" in run.line(slow_s=0), HANG_S)
    assert "| 1 part to come | slow: test_slow.py::test_three, 0 s" in run.line(slow_s=0)
    go_on.touch()
    thread.join()
    assert [(result.name, result.passed, result.failed) for result in results] == [
        ("first", 3, False),
        ("second", 1, False),
        ("bad", None, True),
    ]
    said = capsys.readouterr().out
    assert "==== first: passed in " in said and "==== second: passed in " in said
    assert "the cause" in said and "ZeroDivisionError" in said and "==== bad: FAILED" in said
