"""``python -m mpicomm.bench experts`` as a user runs it, and with faults planted into the calls that it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ml_dtypes")

from tests.helpers.jobs.in_turn import run_changed, run_in_turn

OPTIONS = ("experts", "-D", "cpu", "-n", "1", "--tokens", "5,9", "--hidden", "16", "--experts", "7", "--top-k", "3")


def test_every_row_is_checked_and_the_defaults_fit_the_host(tmp_path: Path) -> None:
    path, command = tmp_path / "out.json", ("-m", "mpicomm.bench")
    job, ((said, status), (by_default, second)) = run_in_turn(
        2, (*command, *OPTIONS, "-J", path), (*command, *OPTIONS[:5])
    )
    assert (job.returncode, job.stderr, status, second) == (0, "", 0, 0)
    assert "hidden 1024 of float32" in by_default
    assert [line.split()[0] for line in by_default.splitlines() if line[0] != "#"] == ["16", "16", "128", "128"]
    lines = said.splitlines()
    assert lines[-1] == "# OK"
    shown = [line.split() for line in lines if not line.startswith("#")]
    expected = [("5", "experts"), ("5", "tokens"), ("9", "experts"), ("9", "tokens")]
    assert [(*row[:2], row[5], row[9]) for row in shown] == [(*each, "0", "0") for each in expected]
    report = json.loads(path.read_text())
    assert report["ok"]
    assert [(str(row["tokens"]), row["layout"]) for row in report["results"]] == expected
    for row in report["results"]:
        found = row["places"]["dispatch"]["mpicomm"]
        assert found["crossing_gb_s"] == pytest.approx(row["crossing_nbytes"] / found["time_us"] * 1e-3)


FAULTS = {
    "received.x[2, 3] += 1": ("dispatch", "experts"),
    "received.sources[[0, 1]] = received.sources[[1, 0]]": ("dispatch", "experts"),
    "received.offsets[-1] -= 1": ("dispatch", "experts"),
    "received.x[1, 0] += 1": ("dispatch", "tokens"),
    "received.rows[[0, 1]] = received.rows[[1, 0]]": ("dispatch", "tokens"),
    "received.row_count[0] += 1": ("dispatch", "tokens"),
    "received[4, 5] += 8": ("combine", "experts"),
    "received[3, 5] += 8": ("combine", "tokens"),
}


def test_one_wrong_row_fails_the_run(tmp_path: Path) -> None:
    code = """
from mpicomm import Experts
def wrong(*arguments, **options):
    received = right(*arguments, **options)
    if RANK == 1:
        {}
    return received
right = patch(Experts, {!r}, wrong)
"""
    changes = [(code.format(fault, name), (*OPTIONS, "--layouts", layout)) for fault, (name, layout) in FAULTS.items()]
    job, ended = run_changed(tmp_path, 2, "mpicomm.bench.__main__", *changes)
    assert job.returncode == 0, job.stderr
    assert [status for _, status in ended] == [1] * len(FAULTS)
    assert all(said.splitlines()[-1].startswith("# FAILED: ") for said, _ in ended)
