"""``python -m mpicomm.bench matmul`` as a user runs it, and with a fault planted into the product that it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.jobs.in_turn import run_changed, run_in_turn

BENCH = ("-m", "mpicomm.bench", "matmul", "-D", "cpu", "-n", "1", "-G", "2", "--shape", "48,32")
KINDS = ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]


def test_all_is_well_and_the_defaults_fit_the_host(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    named = (*BENCH, "--rows", "8,64", "--compare", "nccl,torch", "-J", path)
    job, ((said, status), by_default) = run_in_turn(2, named, (*BENCH[:5], "-n", "1", "-G", "1"))
    assert (job.returncode, job.stderr, status, by_default[1]) == (0, "", 0, 0)
    assert [line.split()[1] for line in by_default[0].splitlines() if line[0] != "#"] == ["256", "512"] * len(KINDS)
    lines = said.splitlines()
    assert lines[-1] == "# OK" and "# nccl: skipped, because it needs GPUs and these ranks are on the cpu" in lines
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [(row[0], int(row[1])) for row in rows] == [(kind, each) for kind in KINDS for each in (8, 64)]
    report = json.loads(path.read_text())
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "matmul")
    assert report["missing"] == dict.fromkeys(
        ("nccl", "torch"), "skipped, because it needs GPUs and these ranks are on the cpu"
    )
    for row, result in zip(rows, report["results"], strict=True):
        times = {name: each["time_us"] for name, each in result["places"]["matmul"].items()}
        assert list(times) == ["collective", "product", "mpicomm", "serial"]
        assert [float(cell) for cell in row[6::2]] == [
            pytest.approx(times[name] / times["mpicomm"], abs=0.0051) for name in ("collective", "product", "serial")
        ]
        assert row[4] == "0"


def test_wrong_results_are_counted(tmp_path: Path) -> None:
    code = """
def wrong(self, a, b, out):
    right(self, a, b, out)
    out[-1, -1] += self.rank == 1
right = patch(mpicomm.Communicator, "matmul_allreduce", wrong)
"""
    _, ((said, status),) = run_changed(tmp_path, 2, "mpicomm.bench.__main__", (code, (*BENCH[2:], "--rows", "8")))
    assert (status, said.splitlines()[-1]) == (1, "# FAILED: 1 wrong")


REFUSED = {
    ("--rows", "9"): "--rows 9: 2 ranks cannot share them: pass a multiple of 2",
    ("--shape", "8"): "argument --shape: '8': use K,N",
    ("--eager",): "--eager is for GPUs",
    ("-d", "bfloat16"): "--datatype bfloat16 is for GPUs: on the host pass float32",
}


def test_bad_options_are_refused() -> None:
    job, ended = run_in_turn(2, *((*BENCH, *options) for options in REFUSED))
    assert [code for _, code in ended] == [2] * len(REFUSED), job.stderr
    assert all(message in job.stderr for message in REFUSED.values())
