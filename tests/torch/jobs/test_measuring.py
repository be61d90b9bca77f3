"""The scripts that measure PyTorch's backends, and the host's time in calls, check results and write tables."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, environment, run_job

BACKENDS = ROOT / "scripts/measuring/measure_torch.py"
ISSUE = ROOT / "scripts/measuring/measure_issue.py"
SHORT = ("--kib=4", "--calls=5")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy of the results with a file of each script, and the output of the script of the host's time."""
    copy = tmp_path_factory.mktemp("copy")
    results = Path(shutil.copytree(ROOT / "scripts/results", copy / "scripts/results"))
    shutil.copy(ROOT / "README.md", copy)
    only = "--only=Allgatherv,Iallreduce,persistent,all_to_all_single"
    job, ended = run_in_turn(
        2,
        (BACKENDS, "--kib=4", "--rounds=1", f"--json={results / 'torch-here.json'}"),
        (ISSUE, *SHORT, only, f"--json={results / 'issue-here.json'}"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert (job.returncode, job.stderr, [code for _, code in ended]) == (0, "", [0, 0])
    subprocess.run([sys.executable, "scripts/results/tables.py"], cwd=copy, env=environment(), check=True)
    return copy / "scripts/results", ended[-1][0]


def test_files_and_tables_have_the_rows_of_both_backends(measured: tuple[Path, str]) -> None:
    results, output = measured
    tables = (results / "README.md").read_text()
    assert "[issue-here.json](issue-here.json)" in tables and "[torch-here.json](torch-here.json)" in tables
    calls, training = json.loads((results / "torch-here.json").read_text())
    assert [row[0] for row in calls["rows"]] == ["4 KiB"] and all(value > 0 for value in calls["rows"][0][1:])
    assert [row[0] for row in training["rows"]][:2] == ["gloo", "mpicomm"] and "torch" in calls["versions"]
    document = json.loads((results / "issue-here.json").read_text())
    assert document["columns"] == [
        "call", "known: mpicomm, us", "known: gloo, us", "new: mpicomm, us", "new: gloo, us",
    ]  # fmt: skip
    rows = {name: times for name, *times in document["rows"]}
    assert len(rows) == len(document["rows"]) == 8
    assert output.count("\n") == 9
    for name, (known, known_peer, new, new_peer) in rows.items():
        assert known > 0
        assert (new is None) == name.startswith("persistent")
        assert (known_peer is not None) == name.startswith("`dist."), name
        assert (new_peer is not None) == name.startswith("`dist."), name


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
sys.path.insert(0, {str(ISSUE.parent)!r})
runpy.run_path({str(ISSUE)!r}, run_name="__main__")
""")
    job = run_job(2, str(driver), *SHORT, "--only=`Allreduce`", CUDA_VISIBLE_DEVICES="")
    assert job.returncode != 0
    assert "ValueError: allreduce left " in job.stderr
