"""At the end of a process its trace has an end, and rank 0 prints the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import run_command

PROGRAM = """
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
    done = run_command(sys.executable, "-c", PROGRAM.format(end=end), **variables)
    assert (done.returncode, done.stdout) == (0, "output\n")
    assert "mpicomm: calls of this rank" in done.stderr and "Allreduce" in done.stderr
    events = json.loads((tmp_path / "0.json").read_text())
    assert ("Allreduce", 32) in [(event["name"], event["args"].get("bytes")) for event in events]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "


@pytest.mark.parametrize("reason", ["No space left on device", "File too large"])
def test_a_trace_or_log_that_cannot_be_written_ends_with_a_warning(reason: str, tmp_path: Path) -> None:
    name, program = "/dev/full", PROGRAM.format(end="comm.Free()")
    if reason == "File too large":
        # The limit also holds for the shared memory that MPI and a Communicator make.
        name, program = str(tmp_path / "file"), program.replace("comm.Allreduce", LIMIT + "comm.Allreduce")
    done = run_command(sys.executable, "-c", program, MPICOMM_TRACE=name)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    assert f"MPICOMM_TRACE={name!r} cannot be written: {reason}: the trace ends" in done.stderr
    (tmp_path / "file").unlink(missing_ok=True)
    program = program.replace("print", "mpicomm.log.logger.info('x' * 1000); print")
    variables = {"MPICOMM_DEBUG_FILE": name, "MPICOMM_DEBUG": "INFO"}
    done = run_command(sys.executable, "-c", program, **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    assert f"MPICOMM_DEBUG_FILE cannot be written: {reason}: warnings go to stderr" in done.stderr


def test_traces_are_merged_without_mpi(tmp_path: Path) -> None:
    command = (sys.executable, "-X", "importtime", "-m", "mpicomm.trace", "merge", "--help")
    done = run_command(*command)
    assert done.returncode == 0 and "traces of the ranks" in done.stdout
    assert "mpicomm.trace.merge" in done.stderr and "mpi4py" not in done.stderr
