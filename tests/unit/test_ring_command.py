"""``python -m mpicomm.ring`` as a user runs it, and with faults planted into the package."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicomm
from tests.helpers.jobs.in_turn import run_changed, run_in_turn
from tests.helpers.jobs.mpiexec import environment, mpiexec_command, run_job
from tests.helpers.jobs.pace import HANG_S

RING = ("-m", "mpicomm.ring", "--device", "cpu")
SHORT = ("-b", "1K", "-e", "64K", "-n", "2", "-w", "1")
SIZES = [1024, 4096, 16384, 65536]


def table(stdout: str) -> dict[int, list[float]]:
    rows = [line.split() for line in stdout.splitlines() if not line.startswith("#")]
    return {int(row[0]): [float(cell) for cell in row[1:]] for row in rows}


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_all_is_well(nprocs: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    job = run_job(nprocs, *RING, *SHORT, "--json", str(path))
    assert (job.returncode, job.stderr) == (0, "")
    lines = job.stdout.splitlines()
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} ring: {nprocs} rank")
    assert [line for line in lines if line.startswith("#  Rank")] == [
        line
        for line in lines
        if re.fullmatch(rf"#  Rank +\d+ Pid +\d+ on {re.escape(socket.gethostname())} device cpu", line)
    ]
    assert len([line for line in lines if line.startswith("#  Rank")]) == nprocs
    assert "# handle: memfd (the best for this device)" in lines
    assert job.stdout.count("host memory") == nprocs * (nprocs - 1)
    assert lines[-1] == "# OK"
    # One header, ranks, handle, matrix, blank, head of table, table, agreed error: only the first rank wrote.
    assert len(lines) == 1 + nprocs + 1 + (2 + nprocs) + 1 + 2 + len(SIZES) + 1

    shown = table(job.stdout)
    assert list(shown) == SIZES
    for nbytes, (put_us, put_gb_s, put_wrong, get_us, get_gb_s, get_wrong) in shown.items():
        assert put_wrong == get_wrong == 0
        assert put_gb_s == pytest.approx(nbytes / put_us / 1e3, abs=0.0051, rel=0.01)
        assert get_gb_s == pytest.approx(nbytes / get_us / 1e3, abs=0.0051, rel=0.01)
    check_report(json.loads(path.read_text()), nprocs, shown)
    assert list(tmp_path.iterdir()) == [path]


def check_report(report: dict[str, Any], nprocs: int, shown: dict[int, list[float]]) -> None:
    assert (report["ok"], report["wrong"]) == (True, 0)
    assert report["handle"] == "memfd"
    assert report["options"]["iters"] == 2
    assert report["options"]["maxbytes"] == 65536
    assert report["processor"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["date"])
    assert report["versions"]["mpicomm"] == mpicomm.__version__
    assert report["versions"]["numpy"] == np.__version__
    assert {"Python", "mpi4py", "MPI"} <= set(report["versions"])
    assert [info["rank"] for info in report["ranks"]] == list(range(nprocs))
    assert len({info["pid"] for info in report["ranks"]}) == nprocs
    for rank, info in enumerate(report["ranks"]):
        paths = [link["path"] for link in info["links"]]
        assert paths == ["self" if peer == rank else "host memory" for peer in range(nprocs)]
    for row in report["results"]:
        cells = [round(row[name][key], 2) for name in ("put", "get") for key in ("time_us", "algbw_gb_s", "wrong")]
        assert cells == pytest.approx(shown.pop(row["nbytes"]), abs=0.011)
    assert not shown


def test_one_direction_and_sizes_that_are_no_multiple_of_anything() -> None:
    once = (*RING, "-n", "1", "-w", "0")
    directions = [(*once, "-b", "1K", "-e", "1K", "--direction", name) for name in ("put", "get")]
    job, (*ended, (odd, status)) = run_in_turn(2, *directions, (*once, "-b", "1", "-e", "1200000", "-f", "101"))
    assert (job.returncode, job.stderr, status) == (0, "", 0)
    assert list(table(odd)) == [1, 101, 10201, 1030301]
    for name, (said, status) in zip(("put", "get"), ended, strict=True):
        assert (status, [len(row) for row in table(said).values()]) == (0, [3])
        assert [each for each in ("put", "get") if f" {each} " in said] == [name]


WRONG = {
    ("-b", "12Q"): "argument -b/--minbytes: '12Q' is no size",  # the first rank parses
    ("-f", "1"): "argument -f/--stepfactor: '1': use a whole number from 2 up",
    ("--json", "/no/such/directory/file"): "argument -J/--json",
    ("--direction", "up"): "argument --direction",
    ("--bogus",): "unrecognized arguments: --bogus",
    ("-b", "1M", "-e", "1K"): "error: no size to measure: -b 1M is above -e 1K",  # all ranks raise
    ("--handle", "ipc"): 'handle="ipc"',
}


def test_a_wrong_option_is_said_once_and_so_is_help() -> None:
    job, (*ended, (usage, status)) = run_in_turn(3, *((*RING, *options) for options in (*WRONG, ("--help",))))
    assert ended == [("", 2)] * len(WRONG), job.stderr
    assert (usage.count("usage:"), status) == (1, 0)
    assert [job.stderr.count(message) for message in WRONG.values()] == [1] * len(WRONG)
    assert job.stderr.count("error:") == len(WRONG)
    assert "Traceback" not in job.stderr
    assert "abort" not in job.stderr.lower()


def ring(folder: Path, nprocs: int, *codes: str, **variables: str) -> Any:
    """Run the ring after each code, which changes the package, and return the job and what each run said."""
    changes = [
        (code, ("--device", "cpu", *SHORT, "--json", str(folder / f"{number}.json")))
        for number, code in enumerate(codes)
    ]
    return run_changed(folder, nprocs, "mpicomm.ring", *changes, **variables)


def test_ranks_on_two_nodes_are_refused(tmp_path: Path) -> None:
    job, ended = ring(tmp_path, 3, "import os; os.environ['MPICOMM_HOSTID'] = 'a' if RANK == 0 else 'b'")
    assert ended == [("", 2)]
    assert job.stderr == (
        "error: the ring goes through mapped memory and needs all ranks on one node; these 3 ranks are on 2 nodes: "
        "start them on one\n"
    )


CHANGED = """
FIRST = {{}}
def changed(self, *given, **options):
    {body}
{name} = patch(SymmetricArray, {name!r}, changed)
"""
FAULTS = {
    # What stands in the place of a method, whether puts and gets are wrong, and the wrong bytes: one byte for each call
    # that is checked, two per size.
    "put(self, *given)\n    if RANK == 0: self.peer(given[1])[0] ^= 1": ("put", 8),
    "put(self, *given)\n    if RANK == 1: self.peer(given[1])[517] ^= 1": ("put", 8),
    "put(self, *given)\n    if RANK == 0: self.peer(given[1])[-1] ^= 1": ("put", 8),
    "get(self, *given)\n    if RANK == 0: given[1][-1] ^= 0x80": ("get", 8),
    "pass  # in place of put(": ("put", None),
    "return FIRST.setdefault((id(self), *given), (self, peer(self, *given).copy()))[1]": ("put get", None),
}
FOR_ANOTHER_RANK = {"put(self, given[0], (given[1] + 1) % 3)": ("put", None)}


@pytest.mark.parametrize(("nprocs", "faults"), [(2, FAULTS), (3, FOR_ANOTHER_RANK)])
def test_a_fault_is_found(nprocs: int, faults: dict[str, tuple[str, int | None]], tmp_path: Path) -> None:
    names = [next(name for name in ("put", "get", "peer") if f"{name}(" in body) for body in faults]
    codes = [CHANGED.format(name=name, body=body) for name, body in zip(names, faults, strict=True)]
    job, ended = ring(tmp_path, nprocs, *codes)
    assert (job.returncode, job.stderr) == (0, "")
    for number, ((said, status), (which, count)) in enumerate(zip(ended, faults.values(), strict=True)):
        match = re.fullmatch(r"# FAILED: (\d+) wrong", said.splitlines()[-1])
        assert match and status == 1 and "# OK" not in said, said
        shown = table(said)
        assert list(shown) == SIZES
        assert sum(int(row[2] + row[5]) for row in shown.values()) == int(match[1]) > 0
        assert count in (None, int(match[1]))
        for row in shown.values():
            assert (row[2] > 0, row[5] > 0) == ("put" in which, "get" in which)
        report = json.loads((tmp_path / f"{number}.json").read_text())
        assert (report["ok"], report["wrong"]) == (False, int(match[1]))


@pytest.mark.parametrize("error", ["RuntimeError", "mpicomm.InvalidUsageError"])
def test_an_error_on_one_rank_ends_the_job(error: str, tmp_path: Path) -> None:
    code = f"""
def fail(self, *arguments, **options):
    raise {error}("planted")
if RANK == 1:
    patch(SymmetricArray, "put", fail)
"""
    job, ended = ring(tmp_path, 2, code, MPICOMM_TIMEOUT=f"{2 * HANG_S:g}")  # which no rank waits
    assert job.returncode != 0 and not ended
    assert "# OK" not in job.stdout and "# FAILED" not in job.stdout
    said = f"rank 1 on {socket.gethostname()} (device cpu) failed"
    assert f"mpicomm: {said}\nTraceback" in job.stderr
    assert f"{error.removeprefix('mpicomm.')}: planted" in job.stderr
    assert "(device cpu) failed" not in job.stderr.replace(said, "")


def test_an_error_before_there_is_a_device(tmp_path: Path) -> None:
    job, _ = ring(tmp_path, 2, "if RANK == 0: command_line.Communicator = lambda *args, **options: 1 / 0")
    assert job.returncode != 0
    assert f"mpicomm: rank 0 on {socket.gethostname()} (no device yet) failed\nTraceback" in job.stderr
    assert "ZeroDivisionError" in job.stderr


def test_errors_on_all_ranks_at_once_end_the_job(tmp_path: Path) -> None:
    job, _ = ring(tmp_path, 2, "from mpicomm.bench.content import Content; Content.write = lambda *args: 1 / 0")
    assert job.returncode != 0
    assert "ZeroDivisionError" in job.stderr


@pytest.mark.parametrize("nprocs", [1, 2])
def test_an_interrupt_is_quiet(nprocs: int) -> None:
    command = mpiexec_command(nprocs, *RING, "-b", "1K", "-e", "1K", "-n", "100000000")
    with subprocess.Popen(
        command if nprocs > 1 else command[command.index(sys.executable) :],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell makes the programs that it starts in the background ignore interrupts, and their children inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as job:
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if "algbw" in line:  # the measurement has begun, and does not end
                    break
            time.sleep(0.2)
            job.send_signal(signal.SIGINT)
            _, stderr = job.communicate(timeout=HANG_S)
        finally:
            job.kill()
    assert job.returncode != 0
    assert "Traceback" not in stderr
    assert "mpicomm" not in stderr


def test_time_is_one_iteration(tmp_path: Path) -> None:
    code = """
import time
def slow(self, src, peer, **options):
    time.sleep(0.02)
    put(self, src, peer, **options)
put = patch(SymmetricArray, "put", slow)
"""
    _, ((said, _),) = ring(tmp_path, 2, code)
    for put_us, *_, get_us, _, _ in table(said).values():
        assert 20_000 <= put_us < 100_000
        assert get_us < 20_000
