"""``python -m mpicomm.ring`` as a user runs it, and with faults planted into the package."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import mpicomm
from tests.helpers.jobs.in_turn import changed, run_in_turn, run_named
from tests.helpers.jobs.mpiexec import environment, mpiexec_command
from tests.helpers.jobs.pace import HANG_S

DEVICE = ("--device", "cpu")
RING = ("-m", "mpicomm.ring", *DEVICE)
SHORT = ("-b", "1K", "-e", "64K", "-n", "2", "-w", "1")
ONCE = (*RING, "-n", "1", "-w", "0")
SIZES = [1024, 4096, 16384, 65536]
HOST = socket.gethostname()

OTHERS: dict[str, tuple[str, ...]] = {
    "put": (*ONCE, "-b", "1K", "-e", "1K", "--direction", "put"),
    "get": (*ONCE, "-b", "1K", "-e", "1K", "--direction", "get"),
    "odd sizes": (*ONCE, "-b", "1", "-e", "1200000", "-f", "101"),
    "help": (*RING, "--help"),
}
REFUSED = {
    ("-b", "12Q"): "argument -b/--minbytes: '12Q' is no size",  # the first rank parses
    ("-f", "1"): "argument -f/--stepfactor: '1': use a whole number from 2 up",
    ("--json", "/no/such/directory/file"): "argument -J/--json",
    ("--direction", "up"): "argument --direction",
    ("--bogus",): "unrecognized arguments: --bogus",
    ("-b", "1M", "-e", "1K"): "error: no size to measure: -b 1M is above -e 1K",  # all ranks raise
    ("--handle", "ipc"): 'handle="ipc"',
}
CHANGED = """
FIRST = {{}}
def changed(self, *given, **options):
    {body}
{name} = patch(SymmetricArray, {name!r}, changed)
"""
FAULTS: dict[str, tuple[str, int | None]] = {
    # What stands in the place of a method, whether puts and gets are wrong, and the wrong bytes: one byte for each call
    # that is checked, two per size.
    "put(self, *given)\n    if RANK == 0: self.peer(given[1])[0] ^= 1": ("put", 8),
    "put(self, *given)\n    if RANK == 1: self.peer(given[1])[517] ^= 1": ("put", 8),
    "put(self, *given)\n    if RANK == 0: self.peer(given[1])[-1] ^= 1": ("put", 8),
    "get(self, *given)\n    if RANK == 0: given[1][-1] ^= 0x80": ("get", 8),
    "pass  # in place of put(": ("put", None),
    "return FIRST.setdefault((id(self), *given), (self, peer(self, *given).copy()))[1]": ("put get", None),
}
FOR_ANOTHER_RANK: dict[str, tuple[str, int | None]] = {"put(self, given[0], (given[1] + 1) % 3)": ("put", None)}
ON_TWO_NODES = "import os; os.environ['MPICOMM_HOSTID'] = 'a' if RANK == 0 else 'b'"
SLOW = """
import time
def slow(self, src, peer, **options):
    time.sleep(0.02)
    put(self, src, peer, **options)
put = patch(SymmetricArray, "put", slow)
"""


class Job(NamedTuple):
    """One job of all runs: output and exit code of each, what they said on stderr, and the folder of their reports."""

    ended: dict[str, tuple[str, int]]
    stderr: str
    folder: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """Gives the job of all runs on a number of ranks."""

    @cache
    def run(nprocs: int) -> Job:
        folder, codes = tmp_path_factory.mktemp("reports"), tmp_path_factory.mktemp("codes")
        programs: dict[str, tuple[str | Path, ...]] = {"well": (*RING, *SHORT)}
        code = {}
        if nprocs == 2:
            programs |= OTHERS | {" ".join(options): (*RING, *options) for options in REFUSED}
            code["slow"] = SLOW
        for body in faults(nprocs):
            name = next(name for name in ("put", "get", "peer") if f"{name}(" in body)
            code[body] = CHANGED.format(name=name, body=body)
        if nprocs == 3:
            code["two nodes"] = ON_TWO_NODES  # at last, because the environment stays so
        programs |= {name: (changed(codes, "mpicomm.ring", each), *DEVICE, *SHORT) for name, each in code.items()}
        for number, name in enumerate(("well", *faults(nprocs))):
            programs[name] = (*programs[name], "--json", folder / f"{number}.json")
        ended, said = run_named(nprocs, programs)
        return Job(ended, said, folder)

    return run


def faults(nprocs: int) -> dict[str, tuple[str, int | None]]:
    return {1: {}, 2: FAULTS, 3: FOR_ANOTHER_RANK}[nprocs]


def table(stdout: str) -> dict[int, list[float]]:
    rows = [line.split() for line in stdout.splitlines() if not line.startswith("#")]
    return {int(row[0]): [float(cell) for cell in row[1:]] for row in rows}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_all_is_well(job: Callable[[int], Job], nprocs: int) -> None:
    said, status = job(nprocs).ended["well"]
    lines = said.splitlines()
    assert status == 0
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} ring: {nprocs} rank")
    ranks = [line for line in lines if line.startswith("#  Rank")]
    assert len(ranks) == nprocs
    assert all(re.fullmatch(rf"#  Rank +\d+ Pid +\d+ on {re.escape(HOST)} device cpu", line) for line in ranks)
    assert "# handle: memfd (the best for this device)" in lines
    assert lines[-1] == "# OK"
    # One header, ranks, handle, matrix, blank, head of table, table, agreed error: only the first rank wrote.
    assert len(lines) == 1 + nprocs + 1 + 1 + 2 + len(SIZES) + 1
    shown = table(said)
    assert list(shown) == SIZES
    for nbytes, (put_us, put_gb_s, put_wrong, get_us, get_gb_s, get_wrong) in shown.items():
        assert put_wrong == get_wrong == 0
        assert put_gb_s == pytest.approx(nbytes / put_us / 1e3, abs=0.0051, rel=0.01)
        assert get_gb_s == pytest.approx(nbytes / get_us / 1e3, abs=0.0051, rel=0.01)

    report = json.loads((job(nprocs).folder / "0.json").read_text())
    assert (report["ok"], report["wrong"], report["handle"]) == (True, 0, "memfd")
    assert (report["options"]["iters"], report["options"]["maxbytes"]) == (2, 65536)
    assert report["processor"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["date"])
    assert report["versions"].items() >= {"mpicomm": mpicomm.__version__, "numpy": np.__version__}.items()
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


def test_one_direction_and_sizes_that_are_no_multiple_of_anything(job: Callable[[int], Job]) -> None:
    ended = job(2).ended
    for name in ("put", "get"):
        said, status = ended[name]
        assert (status, [len(row) for row in table(said).values()]) == (0, [3])
        assert [each for each in ("put", "get") if f" {each} " in said] == [name]
    said, status = ended["odd sizes"]
    assert (status, list(table(said))) == (0, [1, 101, 10201, 1030301])


def test_a_wrong_option_is_said_once_and_so_is_help(job: Callable[[int], Job]) -> None:
    found = job(2)
    assert [found.ended[" ".join(options)] for options in REFUSED] == [("", 2)] * len(REFUSED), found.stderr
    assert [found.stderr.count(message) for message in REFUSED.values()] == [1] * len(REFUSED)
    assert found.stderr.count("error:") == len(REFUSED)
    assert "Traceback" not in found.stderr and "abort" not in found.stderr.lower()
    usage, status = found.ended["help"]
    assert (usage.count("usage:"), status) == (1, 0)


def test_ranks_on_two_nodes_are_refused(job: Callable[[int], Job]) -> None:
    assert job(3).ended["two nodes"] == ("", 2)
    assert job(3).stderr == (
        "error: the ring goes through mapped memory and needs all ranks on one node; these 3 ranks are on 2 nodes: "
        "start them on one\n"
    )


@pytest.mark.parametrize("nprocs", [2, 3])
def test_a_fault_is_found(job: Callable[[int], Job], nprocs: int) -> None:
    for number, (body, (which, count)) in enumerate(faults(nprocs).items(), start=1):
        said, status = job(nprocs).ended[body]
        match = re.fullmatch(r"# FAILED: (\d+) wrong", said.splitlines()[-1])
        assert match and status == 1 and "# OK" not in said, said
        shown = table(said)
        assert list(shown) == SIZES
        assert sum(int(row[2] + row[5]) for row in shown.values()) == int(match[1]) > 0
        assert count in (None, int(match[1]))
        for row in shown.values():
            assert (row[2] > 0, row[5] > 0) == ("put" in which, "get" in which)
        report = json.loads((job(nprocs).folder / f"{number}.json").read_text())
        assert (report["ok"], report["wrong"]) == (False, int(match[1]))


def test_time_is_one_iteration(job: Callable[[int], Job]) -> None:
    for put_us, *_, get_us, _, _ in table(job(2).ended["slow"][0]).values():
        assert 20_000 <= put_us < 100_000
        assert get_us < 20_000


FAIL = """
def fail(self, *arguments, **options):
    raise {error}("planted")
if RANK == 1:
    patch(SymmetricArray, "put", fail)
"""
ENDS = {
    "RuntimeError: planted": (FAIL.format(error="RuntimeError"), r"rank 1 on {host} \(device cpu\)"),
    "InvalidUsageError: planted": (FAIL.format(error="mpicomm.InvalidUsageError"), r"rank 1 on {host} \(device cpu\)"),
    # All ranks raise it at once.
    "ZeroDivisionError": (
        "command_line.Communicator = lambda *args, **options: 1 / 0",
        r"rank [01] on {host} \(no device yet\)",
    ),
}


@pytest.mark.parametrize("error", ENDS)
def test_an_error_on_one_rank_ends_the_job(error: str, tmp_path: Path) -> None:
    code, who = ENDS[error]
    program = (changed(tmp_path, "mpicomm.ring", code), *DEVICE, *SHORT)
    job, ended = run_in_turn(2, program, MPICOMM_TIMEOUT=f"{2 * HANG_S:g}")  # which no rank waits
    assert job.returncode != 0 and not ended
    assert "# OK" not in job.stdout and "# FAILED" not in job.stdout
    said = re.findall(r"mpicomm: (.+) failed\nTraceback", job.stderr)
    assert said and all(re.fullmatch(who.format(host=re.escape(HOST)), each) for each in said), job.stderr
    assert error in job.stderr


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
