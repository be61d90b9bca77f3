"""At the end of a process its trace has an end, and rank 0 prints the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.pace import HANG_S

ROOT = Path(__file__).parents[3]
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
    variables = {**os.environ, "MPICOMM_TRACE": f"{tmp_path}/%r.json", "MPICOMM_STATS": "1"}
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "output\n"
    assert "mpicomm: calls of this rank" in done.stderr and "Allreduce" in done.stderr
    events = json.loads((tmp_path / "0.json").read_text())
    assert ("Allreduce", 32) in [(event["name"], event["args"].get("bytes")) for event in events]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "


def said_by(program: str, *, check: bool, **variables: str) -> str:
    """What a program says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == check, done.stderr
    assert not check or done.stdout == "output\n"
    return done.stderr


@pytest.mark.parametrize("reason", ["No space left on device", "File too large"])
def test_a_trace_or_log_that_cannot_be_written_ends_with_a_warning(reason: str, tmp_path: Path) -> None:
    name, program = "/dev/full", PROGRAM.format(end="comm.Free()")
    if reason == "File too large":
        # The limit also holds for the shared memory that MPI and a Communicator make.
        name, program = str(tmp_path / "file"), program.replace("comm.Allreduce", LIMIT + "comm.Allreduce")
    said = said_by(program, check=True, MPICOMM_TRACE=name)
    assert said.count("\n") == 1 and f"MPICOMM_TRACE={name!r} cannot be written: {reason}: the trace ends" in said
    (tmp_path / "file").unlink(missing_ok=True)
    program = program.replace("print", "mpicomm.log.logger.info('x' * 1000); print")
    said = said_by(program, check=True, MPICOMM_DEBUG_FILE=name, MPICOMM_DEBUG="INFO")
    assert said.count("\n") == 1 and f"MPICOMM_DEBUG_FILE cannot be written: {reason}: warnings go to stderr" in said


def test_traces_are_merged_without_mpi(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mpicomm.trace", "merge", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "traces of the ranks" in done.stdout
    assert "mpicomm.trace.merge" in done.stderr and "mpi4py" not in done.stderr
