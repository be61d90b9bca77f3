"""The script that measures the host's time in calls checks their results, and writes a table of scripts/results."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT, environment, run_job

SCRIPT = ROOT / "scripts/measuring/measure_issue.py"
SHORT = ("--kib=4", "--calls=5")


def test_rows_have_known_and_new_calls_of_both(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/results", tmp_path / "scripts/results")
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "scripts/results/issue-here.json"
    only = "--only=Allgatherv,Iallreduce,persistent,all_to_all_single,a step"
    job = run_job(2, str(SCRIPT), *SHORT, only, f"--json={file}", CUDA_VISIBLE_DEVICES="")
    assert (job.returncode, job.stderr) == (0, "")
    document = json.loads(file.read_text())
    assert document["columns"] == [
        "call", "known: mpicomm, us", "known: gloo, us", "new: mpicomm, us", "new: gloo, us",
    ]  # fmt: skip
    rows = {name: times for name, *times in document["rows"]}
    assert len(rows) == len(document["rows"]) == 9
    assert job.stdout.count("\n") == 10
    for name, times in rows.items():
        known, known_peer, new, new_peer = times
        assert known > 0
        assert (new is None) == name.startswith(("persistent", "a step"))
        assert (known_peer is not None) == name.startswith(("`dist.", "a step")), name
        assert (new_peer is not None) == name.startswith("`dist."), name
    subprocess.run([sys.executable, "scripts/results/tables.py"], cwd=tmp_path, env=environment(), check=True)
    assert "[issue-here.json](issue-here.json)" in (tmp_path / "scripts/results/README.md").read_text()


def test_a_new_call_that_reads_where_the_last_one_read_ends_the_run(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(f"""
import runpy, sys
import numpy as np
import mpicomm
allreduce, last, number = mpicomm.Communicator.Allreduce, None, 0
def stale(self, send, receive, *rest, **options):
    global last, number
    number += 1
    given = np.lib.stride_tricks.as_strided(last, send.shape) if number == 70 else send  # 45 calls are known
    last = send
    allreduce(self, given, receive, *rest, **options)
mpicomm.Communicator.Allreduce = stale
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
""")
    job = run_job(2, str(driver), *SHORT, "--only=`Allreduce`", CUDA_VISIBLE_DEVICES="")
    assert job.returncode != 0
    assert "ValueError: allreduce left " in job.stderr
