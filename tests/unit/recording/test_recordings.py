"""Traces and tables at the end of a process, traces of spawned processes, and NVTX ranges."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpicomm.environment import Recording
from mpicomm.errors import InvalidUsageError
from mpicomm.recording.channel import Channel
from mpicomm.recording.recorder import Recorder
from mpicomm.trace import main
from tests.helpers.jobs.mpiexec import run_command, run_job

ENDING = """
import os
import numpy as np
import mpicomm
comm = mpicomm.Communicator(device="cpu")
comm.Allreduce(np.ones(4), np.empty(4))
print("output")
{end}
"""


@pytest.mark.parametrize("end", ["comm.Free()", "comm._unfreed = False", "raise SystemExit(comm.Free())"])
def test_the_trace_ends_and_the_table_is_printed(tmp_path: Path, end: str) -> None:
    variables = {"MPICOMM_TRACE": f"{tmp_path}/%r.json", "MPICOMM_STATS": "1"}
    done = run_command(sys.executable, "-c", ENDING.format(end=end), **variables)
    assert (done.returncode, done.stdout) == (0, "output\n")
    assert "mpicomm: calls of this rank" in done.stderr and "Allreduce" in done.stderr
    events = json.loads((tmp_path / "0.json").read_text())
    assert ("Allreduce", 32) in [(event["name"], event["args"].get("bytes")) for event in events]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "


@pytest.mark.parametrize("reason", ["No space left on device", "File too large"])
def test_a_trace_or_log_that_cannot_be_written_ends_with_a_warning(reason: str, tmp_path: Path) -> None:
    name, program = "/dev/full", ENDING.format(end="comm.Free()")
    if reason == "File too large":
        # The limit also holds for the shared memory that MPI and a Communicator make.
        name, program = str(tmp_path / "file"), program.replace("comm.Allreduce", LIMIT + "comm.Allreduce")
    done = run_command(sys.executable, "-c", program, MPICOMM_TRACE=name)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    trace = name if name == "/dev/full" else f"{name}-0"  # a name without %r gets the rank
    assert f"MPICOMM_TRACE={trace!r} cannot be written: {reason}: the trace ends" in done.stderr
    program = program.replace("print", "mpicomm.log.logger.info('x' * 1000); print")
    variables = {"MPICOMM_DEBUG_FILE": name, "MPICOMM_DEBUG": "INFO"}
    done = run_command(sys.executable, "-c", program, **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    assert f"MPICOMM_DEBUG_FILE cannot be written: {reason}: warnings go to stderr" in done.stderr


def test_traces_are_merged_without_mpi(tmp_path: Path) -> None:
    command = (sys.executable, "-X", "importtime", "-m", "mpicomm.trace", "merge", "--help")
    done = run_command(*command)
    assert done.returncode == 0 and "traces of the ranks" in done.stdout
    assert "mpicomm.recording.record" in done.stderr and "mpi4py" not in done.stderr


PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpicomm

parent = MPI.Comm.Get_parent()
spawned = parent != MPI.COMM_NULL
mine, ours = np.ones(3), np.empty(3)
with mpicomm.Communicator(MPI.COMM_WORLD, device="cpu") as world:
    world.Allreduce(mine, ours, algorithm="one_shot")
between = parent if spawned else MPI.COMM_WORLD.Spawn(sys.executable, [__file__], 1)
merged = between.Merge(spawned)
with mpicomm.Communicator(merged, device="cpu") as comm:
    comm.Allreduce(mine, ours, algorithm="one_shot")
    assert (ours == 2).all()
merged.Free()
between.Disconnect()
"""


def test_spawned_processes_have_their_own_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = run_job(1, str(program), MPICOMM_TRACE=f"{tmp_path}/trace-%r.json")
    assert job.returncode == 0, job.stderr
    paths = sorted(tmp_path.glob("trace-*.json"))
    assert len(paths) == 2
    assert main(["merge", *map(str, paths), "-o", f"{tmp_path}/all.json"]) == 0
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    calls = [event for event in events if event["name"] == "Allreduce" and event["ph"] == "X"]
    by_communicator: dict[str, set[int]] = {}
    for call in calls:
        by_communicator.setdefault(call["args"]["comm"], set()).add(call["pid"])
    # Each process in its own world, then both together.
    assert sorted(map(len, by_communicator.values())) == [1, 1, 2]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    nvtx = SimpleNamespace(
        push_range=lambda message, domain: lines.append(f"{domain} {message}"),
        pop_range=lambda domain: lines.append(f"{domain} end"),
        mark=lambda message, domain: lines.append(f"{domain} mark: {message}"),
    )
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    return lines


def test_a_range_has_operation_bytes_and_algorithm(said: list[str]) -> None:
    recorder = Recorder(Recording("nvtx", stats=False), 0, reports=False)
    channel = Channel(recorder, "0.1")
    record = channel.begin("Allreduce", "collective", nbytes=80, dtype="float32")
    channel.choose("ring", "by the table")
    channel.end(record)
    assert said == ["mpicomm Allreduce 80 B float32", "mpicomm Allreduce by ring", "mpicomm end", "mpicomm end"]
    said.clear()
    channel.end(channel.begin("Bcast", "collective", nbytes=8))
    assert said == ["mpicomm Bcast 8 B", "mpicomm mark: Bcast by mpi", "mpicomm end"]


def test_the_package_is_needed_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(
        InvalidUsageError, match=r'MPICOMM_TRACE="nvtx" needs the package nvtx: pip install -e "\.\[nvtx\]"'
    ):
        Recorder(Recording("nvtx", stats=False), 0, reports=False)
