"""``python -m mpicomm.doctor --pid`` and ``--job`` on jobs that run."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpicomm.activity import layout
from mpicomm.activity.page import CommunicatorRow, Member, RowHeader, page
from mpicomm.doctor.__main__ import sample, show
from mpicomm.doctor.running import job_of
from mpicomm.doctor.waits import RankWait
from mpicomm.errors import InvalidUsageError
from mpicomm.waiting import wait_until
from tests.helpers.jobs.mpiexec import ROOT, environment, mpiexec_command, run_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.programs.late_rank import CALLS, LATE, TAG

LOOK_S = 0.3
DOCTOR = (sys.executable, "-m", "mpicomm.doctor")
NOBODY = 65534


def doctor(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run_command(*before, *DOCTOR, *arguments)


@dataclass(frozen=True)
class Job:
    """A job of `late_rank`, which runs."""

    folder: Path
    mpiexec: subprocess.Popen[bytes]

    def come_to(self, call: str) -> None:
        """Wait until all ranks have come to a call."""
        for rank in range(LATE + 1):
            file = self.folder / f"{call}-{rank}"
            assert wait_until(file.exists, HANG_S), f"{file}: {self.output}"

    def go_on(self, call: str) -> None:
        """Let the late rank make the call."""
        (self.folder / f"go-{call}").touch()

    @property
    def late(self) -> int:
        """The process number of the late rank."""
        return int((self.folder / "late").read_text())

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    command = mpiexec_command(LATE + 1, "-m", "tests.helpers.programs.late_rank", str(tmp_path))
    variables = {**sharing_of_cores(LATE + 1), **environment()}
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT)
    try:
        yield Job(tmp_path, job)
    finally:
        job.kill()
        job.wait()


SAID = {
    "Communicator": "rank 2 of MPI.COMM_WORLD has not come: ranks 0, 1 wait in 'Communicator'. Rank 2, process {late}, "
    "has not begun to make a Communicator",
    "one_shot": "rank 2 is behind: it has made 1 call of world, the others 2 (Allreduce(float64, count=4, op=sum, "
    "algorithm=one_shot)). Rank 2 (process {late}) sleeps",
    "Allreduce": "rank 2 is behind: it has made 2 calls of world, the others 3 (Allreduce). Rank 2 (process {late})",
    "bcast": "rank 2 is behind: it has made 3 calls of world, the others 4 (bcast)",
    "Recv": f"rank 0 waits in a receive from rank 2 (tag {TAG}) of world. Rank 2 (process {{late}}) sleeps",
    "recv": f"rank 0 waits in a receive from rank 2 (tag {TAG}) of world. Rank 2 (process {{late}}) sleeps",
    "zeros": "rank 2 of MPI.COMM_WORLD has not come: ranks 0, 1 wait in 'zeros: signal pads: allocate and export'",
    "Split": "rank 2 of MPI.COMM_WORLD has not come: ranks 0, 1 wait in 'Split'. Rank 2 (process {late}) sleeps",
    "Create_group": "rank 2 of MPI.COMM_WORLD has not come: rank 0 waits in 'Create_group'. Rank 2 (process {late})",
    "Create_group in MPI": "rank 2 of MPI.COMM_WORLD has not come: rank 0 waits in 'Create_group'. Rank 2 (process ",
    "Free": "rank 2 of MPI.COMM_WORLD has not come: ranks 0, 1 wait in 'Free'. Rank 2 (process {late}) sleeps",
    "MPI_Finalize": "rank 2 of MPI.COMM_WORLD has not come: ranks 0, 1 wait in 'MPI_Finalize'",
}


def test_the_doctor_names_the_rank_for_which_the_others_wait(job: Job) -> None:
    found: list[RankWait] = []

    def is_seen(call: str) -> bool:
        (report,) = sample(lambda: [job_of(job.mpiexec.pid)], LOOK_S)
        found[:] = report.waits()
        if call not in SAID:
            return not found
        return bool(found) and found[0].text.startswith(SAID[call].format(late=job.late))

    for call in CALLS:
        job.come_to(call)
        # A rank is in a call only a moment after it has come to it.
        assert wait_until(functools.partial(is_seen, call), HANG_S), f"{call}: {found}"
        if call in SAID:
            assert found[0].pids == (job.late,)
        if call == "Allreduce":
            said = doctor("--pid", str(job.late))
            assert (said.returncode, said.stderr) == (1, "")
            first, fix, *table = said.stdout.splitlines()
            assert first.startswith("WAIT for ") and f" s or longer: {SAID[call].format(late=job.late)}" in first
            assert fix == f"      fix: `py-spy dump --pid {job.late}` shows where that rank is"
            rows = [row.split("│") for row in table if "world" in row]
            assert [[cell.strip() for cell in (row[2], row[4], row[5], row[7])] for row in rows] == [
                ["0", "Allreduce", "3", "rank 2"],
                ["1", "Allreduce", "3", "rank 2"],
                ["2", "Allreduce(float64, count=4, op=sum, algorithm=one_shot)", "2", ""],
            ]
        if call == "nothing":
            said = doctor("--job")
            assert f" {job.late} " in said.stdout and f"dump --pid {job.late}`" not in said.stdout
        job.go_on(call)
    assert job.mpiexec.wait(HANG_S) == 0, job.output


def test_no_rank_waits_in_a_single_process() -> None:
    row = CommunicatorRow()
    row.publish(RowHeader(0, [Member("host", os.getpid(), 0)], "cpu"), 1)
    row.log(0).post("Allreduce(float64, count=4)")
    said = doctor("--pid", str(os.getpid()))
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("no rank waits for another one")
    assert "Allreduce(float64, count=4)" in said.stdout


def test_a_process_that_has_ended_or_is_no_program_of_mpicomm() -> None:
    with subprocess.Popen(["sleep", str(HANG_S)], stdin=subprocess.DEVNULL) as process:
        said = doctor("--pid", str(process.pid))
        process.kill()
    assert said.returncode == 2
    assert f"--pid {process.pid}: sleep {HANG_S} is no program of mpicomm, or has not begun" in said.stderr
    said = doctor("--pid", str(process.pid))
    assert (said.returncode, said.stdout) == (2, "")
    assert f"--pid {process.pid}: there is no such process on this machine, or it has ended\n" in said.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and util-linux")
def test_a_process_of_another_user() -> None:
    other = ("setpriv", f"--reuid={NOBODY}", "--clear-groups")
    said = doctor("--pid", str(os.getpid()), before=other)
    assert (said.returncode, said.stdout) == (2, "")
    assert "look into this process of user root: run the doctor as that user or as root" in said.stderr


TEXTS = (
    b"0-99999999999999999999 \x1b]0;title\x07[blink]",
    b"0-%s x" % (b"9" * 5000),
    b"0-1000000 step",
    b"0-5 [/bold] :smiley:",
    b"\xff\x9b" * 2000,
)


def put_text(page_bytes: bytearray, text: bytes) -> None:
    """Write the text with number 1."""
    at = layout.TEXTS_AT + layout.text_at(1)
    struct.pack_into("q", page_bytes, at, 1)
    page_bytes[at + 8 : at + layout.TEXT_NBYTES] = text[: layout.TEXT_NBYTES - 8].ljust(layout.TEXT_NBYTES - 8, b"\0")


PLACES = [8 * word for word in range(layout.PID + 1, layout.HEADER_WORDS)]
for _row in range(4):
    PLACES += [layout.row_at(_row) + 8 * word for word in range(layout.WORDS)]
    PLACES += [layout.log_at(_row, index) + 8 * word for index in range(layout.LOGS) for word in range(20)]


def hostile_page(pid: int, seed: int) -> bytes:
    """The page of this process after another user has changed it by hand."""
    hostile, rng = bytearray(page().bytes), random.Random(seed)
    struct.pack_into("q", hostile, 8 * layout.PID, pid)
    for at in rng.sample(PLACES, rng.randrange(60)):
        values = rng.randrange(-(2**63), 2**63), rng.randrange(-3, 61), layout.NOBODY
        struct.pack_into("q", hostile, at, rng.choice(values))
    for at in (layout.NAMES.start, *(layout.row_at(row) + layout.NAME.start for row in range(4))):
        text = rng.choice((*TEXTS, rng.randbytes(100)))[:100]
        hostile[at : at + len(text)] = text
    put_text(hostile, rng.choice(TEXTS))
    return bytes(hostile)


def shown(pid: int, memory: int, content: bytes) -> str:
    """What the doctor says of a process with that page."""
    os.pwrite(memory, content, 0)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for report in sample(lambda: [job_of(pid)], 0.001):
            show(report)
    return output.getvalue()


def test_the_page_of_another_user_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = os.memfd_create(layout.MEMORY_NAME)
    empty, rows = bytearray(layout.NBYTES), [CommunicatorRow() for _ in range(4)]
    for number, row in enumerate(rows):
        row.publish(RowHeader(number, [Member("host", each, each) for each in range(4)], "cpu"), 1)
        row.log(number % layout.LOGS).post("Allreduce(float64, count=4)")
    with subprocess.Popen(["sleep", str(HANG_S)], stdin=subprocess.DEVNULL, pass_fds=[memory]) as process:
        struct.pack_into("5q", empty, 0, layout.MAGIC, process.pid, 0, 1, 1)
        put_text(empty, b"0-9999 \x1b[31m[blink]x")
        listdir = os.listdir  # without the other processes, which take most of the time
        only = [str(process.pid)]
        monkeypatch.setattr(os, "listdir", lambda path: only if str(path) == "/proc" else listdir(path))
        try:
            for seed in range(50):
                said = shown(process.pid, memory, hostile_page(process.pid, seed))
                assert all(line.isprintable() for line in said.splitlines()) and len(said) < 100_000, seed
            said = shown(process.pid, memory, bytes(empty))
        finally:
            process.kill()
            os.close(memory)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 9991 more of MPI.COMM_WORLD have not come" in said
    assert "\\x1b[31m[blink]x" in said


FORKS = """
import os, sys, time
from mpicomm.activity.page import CommunicatorRow, RowHeader, Member, page
row = CommunicatorRow()
row.publish(RowHeader(0, [Member("host", os.getpid(), 0)], "cpu"), 1)
child = os.fork()
if child == 0:
    row.hide()  # as the garbage collector of the child may do
    del row
    time.sleep(60)
print(os.getpid(), child, flush=True)
input()
os.kill(child, 9)
"""


def test_a_forked_child_is_not_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        number, child = map(int, parent.stdout.readline().split())
        assert [calls.size for rank in job_of(number).ranks for calls in rank.activity.communicators] == [1]
        # A program that forks is its child's parent, as an mpiexec is the parent of its ranks, but not the other way.
        with pytest.raises(InvalidUsageError, match=f"--pid {child}: .* is no program of mpicomm"):
            job_of(child)
        parent.communicate("\n")
