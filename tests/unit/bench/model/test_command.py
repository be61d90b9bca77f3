"""``python -m mpicomm.bench --model`` as a user runs it: its files, its errors, its comparison with measured runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpicomm.bench import __main__ as bench
from mpicomm.bench.model.accuracy import Run, compare, error_of
from mpicomm.bench.model.group import read_group
from mpicomm.bench.options import parser
from mpicomm.errors import InvalidUsageError
from tests.helpers.jobs.mpiexec import environment, run_job
from tests.unit.bench.model.systems import RECORDED

MODEL = ("allreduce", "--model", "2,4", "--network", "50,5")
FROM = ("--from", *map(str, RECORDED))

Bench = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command line in this process and return its output."""

    def run_bench(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        assert bench.main() == 0
        return capsys.readouterr().out

    return run_bench


def test_it_needs_no_launcher() -> None:
    command = [sys.executable, "-m", "mpicomm.bench", *MODEL, *FROM, "-b", "1K", "-e", "1M", "-f", "1024"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [row[:3] for row in rows] == [[n, r, s] for n, r in (("2", "16"), ("4", "32")) for s in ("1024", "1048576")]


def test_every_number_is_called_predicted(run: Bench) -> None:
    lines = run(*MODEL, *FROM).splitlines()
    assert lines[0].endswith("bench allreduce --model: all times below are PREDICTED, none is measured")
    assert "# network: 50 GB/s and 5 us, as --network says, for each rank's card" in lines
    assert "# reduce_scatter is taken to last as long as allgather" in lines
    head, units = (line for line in lines if line.startswith("# ") and ("nodes " in line or "(B)" in line))
    assert head.count("predicted") + units.count("predicted") == 3


def test_a_file_has_the_rows_and_is_no_input_of_the_model(run: Bench, tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    shown = run(*MODEL, *FROM, "-b", "1M", "-e", "1M", "--json", str(path))
    document = json.loads(path.read_text())
    assert document["predicted"] is True and document["network"] == {"gb_s": 50, "latency_us": 5}
    rows = [line.split() for line in shown.splitlines() if not line.startswith("#")]
    for row, record in zip(rows, document["predictions"], strict=True):
        assert float(row[3]) == pytest.approx(record["predicted_us"], abs=0.0051)
        assert float(row[-2]) == pytest.approx(record["predicted_nccl_ring_us"], abs=0.0051)
    with pytest.raises(InvalidUsageError, match="is no result of the bench: name a file"):
        read_group([path])


def test_a_result_of_the_bench_is_read(run: Bench, tmp_path: Path) -> None:
    path = tmp_path / "alltoall.json"
    job = run_job(2, "-m", "mpicomm.bench", "alltoall", "-D", "cpu", "-n", "2", "-e", "1K", "--json", str(path))
    assert job.returncode == 0, job.stderr
    group = read_group([path])
    assert group.ranks == 2
    row = json.loads(path.read_text())["results"][-1]
    measured = row["places"]["out-of-place"]["mpicomm"]["time_us"]
    shown = run("alltoall", "--model", "1,2", "--network", "10,2", "--from", str(path), "-b", "1K", "-e", "1K")
    first, second = (line.split() for line in shown.splitlines() if not line.startswith("#"))
    assert float(first[3]) == pytest.approx(measured, abs=0.0051)
    assert second[-2:] == ["-", "-"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib draws it")
def test_a_picture_is_drawn(run: Bench, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    run(*MODEL, *FROM, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--model", value) for value in ("two", "0", "2,", "2,-4", "2.5", "")),
        *(("--network", value) for value in ("50", "50,5,1", "50;5", "0,5", "50,-1", "nan,5", "50,inf")),
    ],
)
def test_wrong_values(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parser().parse_args(["allreduce", f"{option}={value}"])
    assert raised.value.code == 2
    assert f"argument {option}: {value!r}: use " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allreduce", "--model", "2", *FROM), "--model needs --network"),
        (MODEL, "--model needs --from"),
        ((*MODEL, *FROM, "--compare", "nccl"), "--compare is not for --model, which measures nothing: leave it out"),
        ((*MODEL, *FROM, "-d", "half"), "--datatype is not for --model"),
        ((*MODEL, *FROM, "-b", "1M", "-e", "1K"), "no size to measure: -b 1M is above -e 1K"),
        ((*MODEL, "--from", "/no/file"), "--from /no/file cannot be read"),
        ((*MODEL, *FROM, FROM[1]), "is a second run of allreduce: name one of them"),
        ((*MODEL, "--from", FROM[1]), "--from has no times of reduce_scatter, only of allreduce: write them with"),
        ((*MODEL, *FROM, FROM[1].replace("allreduce-8-h200", "bcast-4-h100")), "is a second run of bcast"),
        ((*MODEL, *FROM[:3], FROM[3].replace("-8-h200", "-4-h100")), "name runs with as many ranks as a node has"),
        ((*MODEL, "--from", FROM[1].replace("allreduce-8-h200", "barrier-4-h100")), "has fewer than two sizes"),
        ((*MODEL, "--from", FROM[1].replace("allreduce-8-h200", "setup")), "is no result of the bench"),
        (("barrier", *MODEL[1:], *FROM), "--model has no schedule of barrier: use one of allreduce"),
        ((*MODEL, *FROM, "--against", "/no/file"), "--against /no/file cannot be read"),
        (("allreduce", "--network", "50,5"), "--network is for --model NODES"),
        (("allreduce", *FROM), "--from is for --model NODES"),
    ],
)
def test_options_that_do_not_fit(arguments: tuple[str, ...], message: str, run: Bench) -> None:
    with pytest.raises(InvalidUsageError) as raised:
        run(*arguments)
    assert message in str(raised.value)


def test_runs_of_several_nodes_are_no_runs_of_a_group(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(RECORDED[0].read_text())
    path = tmp_path / "two.json"
    path.write_text(json.dumps({**document, "ranks": [{"node": 0}, {"node": 1}]}))
    with pytest.raises(InvalidUsageError, match="was measured on several nodes: name a run of one"):
        read_group([path])


def test_the_error_of_the_model_is_stated() -> None:
    runs = [Run(2, 1024, 10.0), Run(2, 2048, 40.0)]
    compared = compare(runs, lambda nodes, nbytes: 20.0)
    assert [each.ratio for each in compared] == [2, 0.5]
    said = error_of(compared)
    assert "of 2 runs: geometric mean 1.00, from 0.50 to 2.00; a prediction is off by a factor of 2.00" in said


def test_measured_runs_are_compared(run: Bench, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text('[{"nodes": 2, "nbytes": 1024, "time_us": 18.256}]')
    shown = run(*MODEL, *FROM, "-b", "1K", "-e", "1K", "--against", str(path))
    assert "# 2 nodes, 1024 B: measured 18.26 us, predicted 9.13 us, predicted / measured 0.50" in shown
    assert "geometric mean 0.50" in shown.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"nodes": 2}]', '[{"nodes": 2, "nbytes": 8, "time_us": 0}]'])
def test_wrong_files_of_measured_runs(text: str, run: Bench, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(InvalidUsageError, match=r"--against .*: give a JSON list of runs, as in"):
        run(*MODEL, *FROM, "--against", str(path))
