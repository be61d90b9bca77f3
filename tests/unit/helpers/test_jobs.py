"""The harness of tests/mpi, and the summary of `scripts/test`, on small test files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.jobs import run_parts
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.jobs.part_results import Part, causes, conclusion, part
from tests.helpers.jobs.run_parts import Run, Step
from tests.helpers.jobs.sweeps import QUICK_LEAVES_OUT, QUICK_RUNS_EVERY

ROOT = Path(__file__).parents[3]

RunRanks = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/mpi/conftest.py").read_text())

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(
            "import os, time, pytest\nfrom mpi4py import MPI\n"
            "from tests.helpers.faults.raising import raises_everywhere\n"
            "WORLD = MPI.COMM_WORLD\nRANK = WORLD.rank\n" + code
        )
        command = [sys.executable, "-m", "tests.helpers.jobs.run_ranks", "2"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "--timeout=20"]
        return subprocess.run(
            [*command, *arguments, str(tmp_path / "test_it.py")],
            # Python imports `tests` from here.
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
        )

    return run


def test_ranks_report_one_outcome(run_ranks: RunRanks) -> None:
    result = run_ranks("""
def test_passes(comm_world):
    assert comm_world.size == 2

@pytest.mark.mpi(min_size=3)
def test_needs_three(): pass

@pytest.mark.xfail(reason="known")
def test_is_expected_to_fail(): assert False

def test_fails_on_one():
    print("captured on", RANK)
    assert RANK != 1, "only here"

def test_fails_first_on_one():
    time.sleep(0.1 * (1 - RANK))
    raise ValueError(f"I am {RANK}")

def test_skipped_on_one():
    if RANK == 1:
        pytest.skip("not here")

@pytest.fixture
def bad_on_one():
    assert RANK != 1

def test_set_up_fails_on_one(bad_on_one):
    WORLD.Barrier()

def test_same_error():
    with raises_everywhere(WORLD, ValueError, match="same") as excinfo:
        raise ValueError("the same")
    assert str(excinfo.value) == "the same"

def test_same_error_with_another_text():
    with raises_everywhere(WORLD, ValueError, match="another"):
        raise ValueError("the same")

def test_different_texts():
    with raises_everywhere(WORLD, ValueError):
        raise ValueError(RANK)

def test_raised_by_one():
    with raises_everywhere(WORLD, ValueError):
        if RANK == 0:
            raise ValueError("alone")
""")
    assert result.returncode == 1, result.stdout
    for line in [
        "failed on ranks [1] of 2; first on rank 1:",
        "AssertionError: only here",
        "captured on 1",
        "failed on ranks [0, 1] of 2; first on rank 1:",
        "ValueError: I am 1",
        "ranks disagree",
        "Regex pattern did not match",
        "not the same ValueError on all ranks",
        "rank 1: raised nothing",
        "2 ranks: mpiexec exited with 1; rank 0 exited with 1; rank 1 exited with 1",
    ]:
        assert line in result.stdout
    assert "ValueError: I am 0" not in result.stdout
    # Only one rank prints.
    assert result.stdout.count("6 failed, 2 passed, 1 skipped, 1 xfailed, 1 error") == 1
    assert "last words" not in result.stdout


def test_hanging_rank_ends_the_run_with_all_stacks(run_ranks: RunRanks) -> None:
    result = run_ranks(
        """
def wait_for_ever():
    while True:
        time.sleep(0.1)

def test_hangs():
    assert RANK == 1, "the cause"
    wait_for_ever()
""",
        "--timeout=2",
    )
    assert result.returncode == 1
    first, second = result.stdout.split("---- last words of rank ")[1:]
    assert "AssertionError: the cause" in first
    assert "in _wait" in first
    assert "in wait_for_ever" in second
    end = result.stdout.splitlines()[-7:]
    assert "waiting for the other ranks after test_it.py::test_hangs call, which failed" in end[0]
    assert "AssertionError: the cause" in end[1]
    assert re.fullmatch(r"rank 1 \(process \d+\) was in test_it.py::test_hangs, after its setup", end[3])
    assert "in wait_for_ever" in end[4] and "in test_hangs" in end[5]
    assert "rank 0 did not reach its end; rank 1 did not reach its end" in end[6]


def test_the_end_names_the_rank_that_a_signal_ended_and_its_test(run_ranks: RunRanks) -> None:
    result = run_ranks("""
import signal
def test_dies():
    WORLD.Barrier()  # MPI ends rank 0 as soon as rank 1 dies, even before its test
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    WORLD.Barrier()
""")
    end = result.stdout.splitlines()[-4:]
    for rank in (0, 1):
        assert re.fullmatch(rf"rank {rank} \(process \d+\) was in test_it.py::test_dies, after its setup", end[rank])
    assert end[2] == "    Fatal Python error: Segmentation fault"


def test_rank_that_exits_with_0_is_judged_failed(run_ranks: RunRanks) -> None:
    # Both do it, so that mpiexec exits with 0.
    result = run_ranks("def test_exits(): os._exit(0)")
    assert result.returncode == 1
    assert result.stdout.endswith("2 ranks: rank 0 did not reach its end; rank 1 did not reach its end\n")


def test_different_collections_are_refused(run_ranks: RunRanks) -> None:
    result = run_ranks("if RANK == 1: raise ImportError('only here')\ndef test_it(): pass")
    assert result.returncode == 1
    assert "ranks collected different tests" in result.stdout
    assert "ImportError: only here" in result.stdout


def test_leaks_are_named(tmp_path: Path) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    file = (tmp_path / "left-open").open("w")
    file.close()
    try:
        with pytest.raises(AssertionError, match=r"fd \d+ -> .*left-open, thread \d+"), nothing_leaks():
            thread.start()
            file = (tmp_path / "left-open").open("w")
    finally:
        stop.set()
        file.close()
    with nothing_leaks():
        pass


def test_all_files_that_runs_name_exist() -> None:
    for file in {*run_parts.OF_TWO, *run_parts.OF_FOUR, *run_parts.WITH_OPEN_MPI, *run_parts.WITH_TORCH_ALONE}:
        assert (ROOT / file).exists(), file


def test_all_tests_that_the_quick_run_cuts_exist() -> None:
    for test in (*QUICK_RUNS_EVERY, *QUICK_LEAVES_OUT):
        file, name = test.split("::")
        assert re.search(rf"^(def {name}\(|{name} = controls\()", (ROOT / file).read_text(), re.MULTILINE), test


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
