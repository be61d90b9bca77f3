"""The scripts that measure PyTorch's backends, and the host's time in calls, check results and write tables.

The arrays of calls that vary show a call that does nothing, or works in another place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
import torch

from mpicomm.bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE
from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, environment, run_job

sys.path.append(str(ROOT / "scripts/measuring"))
from varied_arrays import Pools

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


CALLS = 12
CULPRIT = 7


def pools_of(name: str, place: str) -> list[Pools]:
    found = [Pools(OPERATIONS[name], place, 1 << 10, CALLS, rank, 2) for rank in range(2)]
    for pools in found:
        pools.put(torch.device("cpu"))
    return found


def gather(ranks: list[Pools], calls: Iterable[int], fault: str = "") -> None:
    """Carry out calls of Allgatherv; rank 1 has the fault in one of them."""
    for call in calls:
        sent = [pools.tensors(call).send.clone() for pools in ranks]
        for rank, pools in enumerate(ranks):
            found = fault if (rank, call) == (1, CULPRIT) else ""
            receive, result = pools.tensors(call).receive, torch.cat(sent)
            if found == "where the last call received":
                receive = pools.tensors(call - 1).receive
            if found == "what the last call sent":
                result = torch.cat([pools.tensors(call - 1).send for pools in ranks])
            length = min(len(receive), len(result)) - (found == "too little")
            receive[:length] = result[:length]
            if found == "too much":
                receive.as_strided((len(receive) + 1,), (1,), receive.storage_offset())[-1] = 7


def test_right_calls_are_right_and_each_leaves_something() -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]
    gather(ranks, range(CALLS))
    assert [pools.count_wrong(range(CALLS)) for pools in ranks] == [0, 0]
    assert all(
        pools.count_wrong(chain(range(call), range(call + 1, CALLS))) for pools in ranks for call in range(CALLS)
    )
    for pools in ranks:
        pools.reset()
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]


@pytest.mark.parametrize("fault", ["where the last call received", "what the last call sent", "too little", "too much"])
def test_a_fault_in_one_call_of_one_rank_is_found_there(fault: str) -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    gather(ranks, range(CALLS), fault)
    clean, faulty = (pools.count_wrong(range(CALLS)) for pools in ranks)
    assert clean == 0 and faulty > 0


def test_sums_in_place_of_a_second_call_are_found() -> None:
    ranks = pools_of("allreduce", IN_PLACE)
    assert not ranks[0].repeatable and pools_of("bcast", IN_PLACE)[0].repeatable
    for again in (False, True):
        total = ranks[0].tensors(3).send + ranks[1].tensors(3).send
        for pools in ranks:
            pools.tensors(3).send.copy_(total)
            assert (pools.count_wrong([3]) > 0) == again
