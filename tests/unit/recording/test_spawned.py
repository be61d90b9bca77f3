"""The traces of processes that MPI has spawned. Their parents have the same ranks in their own MPI.COMM_WORLD."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicomm.trace.__main__ import main
from tests.helpers.jobs.mpiexec import run_job

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


def test_two_ranks_of_one_file_are_told_which_mark_is_missing(tmp_path: Path) -> None:
    # Both ranks have the file, because the link leads there from the names of both.
    (tmp_path / "trace-0.json").touch()
    (tmp_path / "trace-1.json").hardlink_to(tmp_path / "trace-0.json")
    program = tmp_path / "program.py"
    program.write_text('import mpicomm\nmpicomm.Communicator(device="cpu")\n')
    job = run_job(2, "-m", "mpi4py", str(program), MPICOMM_TRACE=f"{tmp_path}/trace-%r.json")
    assert "is one file for ranks 0, 1: put %h and %p" in job.stderr
