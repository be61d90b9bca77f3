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


def test_traces_are_merged_without_mpi(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "mpicomm.trace", "merge", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "traces of the ranks" in done.stdout
    assert "mpicomm.trace.files" in done.stderr and "mpi4py" not in done.stderr
