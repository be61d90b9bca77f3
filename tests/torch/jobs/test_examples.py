"""Programs that use PyTorch, scikit-learn or matplotlib: examples, documents, and scripts that measure.

Most run in one job, because each rank takes seconds to import the packages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import ROOT, environment
from tests.helpers.programs.document_programs import programs, require_programs_run

EXAMPLES = ROOT / "examples"
TRAIN, SPREAD, EXPERTS = (EXAMPLES / f"{name}.py" for name in ("train_torch", "tensor_parallel", "experts"))
RANKS = 3  # it divides no power of two, and 8 experts not evenly
ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}

Programs = dict[str, Sequence[str | Path]]

CAUGHT = """
import runpy, sys
import torch.distributed as dist
try:
    runpy.run_path({program!r}, run_name="__main__")
except (AssertionError, ValueError) as error:
    print(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1)
"""
"""A program with an error that all ranks raise, and that must not end the job."""

DRAWING = ("producer_consumers", "pipeline", "fft_transpose", "jacobi")
ALL_SAMPLES = rf"{RANKS} ranks.*: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right\n"
DIFFERENCE = r"losses of one rank differ by at most \S+; {} is allowed\n"
READ = rf"{RANKS} ranks trained 8 experts in 60 steps, and read \d\d.\d% of new digits\n"
SAID = {
    **dict.fromkeys(("comm", "ddp", "fsdp"), ALL_SAMPLES + DIFFERENCE.format("1e-04")),
    "fp8": ALL_SAMPLES + DIFFERENCE.format("2e-02"),
    "layers": rf"{RANKS} ranks, {100 // RANKS}% of the parameters on each: .* us, the results of one rank\n",
    **dict.fromkeys(("experts", "experts of PyTorch"), READ + r"the losses differ by at most \S+; 1e-\d+ is allowed\n"),
    "numpy": ALL_SAMPLES + DIFFERENCE.format("1e-09"),
    **dict.fromkeys(DRAWING, "(.*\n)*"),
}
"""What each program says."""


def train(program: Path, mode: str, *words: str) -> tuple[str | Path, ...]:
    return program, "--mode", mode, "--epochs=3", "--check", *words


def spoilt(folder: Path, name: str, program: Path, line: str, wrong: str) -> Path:
    """Return a copy of a program with ``wrong`` in place of a line or a part of it."""
    source, copy = program.read_text(), folder / f"spoilt_{name}.py"
    assert source.count(line) == 1
    copy.write_text(source.replace(line, wrong))
    return copy


PARTIAL = '"2": RowwiseParallel(output_layouts=__import__("torch").distributed.tensor.Partial())'
SPOILT: dict[str, tuple[Path, str, str]] = {
    "ddp": (TRAIN, "model = DistributedDataParallel(model)", "pass"),
    "numpy": (
        EXAMPLES / "train_cupy.py",
        "comm.Iallreduce(MPI.IN_PLACE, gradient)\n",
        "MPI.Request(MPI.REQUEST_NULL)\n",
    ),
    "weights": (EXPERTS, "back.weights[rows, None]", "1"),
    "bias": (SPREAD, "columns.t(), bias)", "columns.t(), bias * 0)"),
    "sum": (SPREAD, '"2": RowwiseParallel()', PARTIAL),
}
"""Gradients that no rank averages, derivatives of other weights, and layers without a bias or the sum of parts."""


def caught(folder: Path, name: str, program: Path) -> Path:
    """Return a program that ends with the code 1 if the other one raises an error on all ranks."""
    catching = folder / f"{name}_caught.py"
    catching.write_text(CAUGHT.format(program=str(program)))
    return catching


CHOSEN = [program for program in programs() if program.needs == {"torch"}]
BACKENDS, ISSUE = (ROOT / f"scripts/measuring/measure_{name}.py" for name in ("torch", "issue"))
SHORT = ("--kib=4", "--calls=5")
ONLY = "--only=Allgatherv,Iallreduce,persistent,all_to_all_single"
STALE = f"""
import runpy, sys
import numpy as np
import mpicomm
from tests.helpers.jobs.in_turn import patch
last, number = None, 0
def stale(self, send, receive, *rest, **options):
    global last, number
    number += 1
    given = np.lib.stride_tricks.as_strided(last, send.shape) if number == 70 else send  # 45 calls are known
    last = send
    allreduce(self, given, receive, *rest, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", stale)
sys.path.insert(0, {str(ISSUE.parent)!r})
runpy.run_path({str(ISSUE)!r}, run_name="__main__")
"""
"""The script of the host's time; a new call reads where the last one read."""


def of_all_devices(folder: Path) -> Programs:
    def drawing(name: str) -> str:
        return f"--plot={folder / name}.svg"

    return {
        **{mode: train(TRAIN, mode, drawing(mode)) for mode in ("comm", "ddp", "fsdp")},
        "fp8": train(TRAIN, "ddp", "--wire-dtype", "float8_e4m3fn"),
        "layers": (SPREAD,),
        "experts": (EXPERTS, drawing("experts")),
        "experts of PyTorch": (EXPERTS, "--torch"),
    }


def of_the_host(folder: Path) -> Programs:
    # CuPy's programs run with NumPy there.
    given: Programs = {name: (EXAMPLES / f"{name}.py", f"--plot={folder / name}.svg") for name in DRAWING}
    given["numpy"] = (EXAMPLES / "train_cupy.py", f"--plot={folder / 'numpy'}.svg", "--epochs=3")
    for name, changed in SPOILT.items():
        program = spoilt(folder, name, *changed)
        if changed[0] == TRAIN:
            given[f"spoilt {name}"] = train(program, name)
        elif changed[0] == SPREAD:
            given[f"spoilt {name}"] = (caught(folder, name, program),)
        else:
            given[f"spoilt {name}"] = (program, "--epochs=1") if name == "numpy" else (program,)
    results = folder / "scripts/results"
    given["backends"] = (BACKENDS, "--kib=4", "--rounds=1", f"--json={results / 'torch-here.json'}")
    given["issue"] = (ISSUE, *SHORT, ONLY, f"--json={results / 'issue-here.json'}")
    stale = folder / "stale.py"
    stale.write_text(STALE)
    given["stale"] = (caught(folder, "stale", stale), *SHORT, "--only=`Allreduce`")
    return given


@dataclass(frozen=True)
class Job:
    folder: Path
    given: Programs
    ended: dict[str, tuple[str, int]]
    """The output and the exit code of each program."""


@pytest.fixture(scope="module", params=DEVICES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("job")
    shutil.copytree(ROOT / "scripts/results", folder / "scripts/results")
    given = of_all_devices(folder) | (of_the_host(folder) if request.param == "cpu" else {})
    ended, errors = run_named(RANKS, given, **DEVICES[request.param])
    # Tests let ranks share a GPU, of which mpicomm warns.
    assert not [line for line in errors.splitlines() if request.param == "cpu" or "share" not in line], errors
    return Job(folder, given, ended)


@pytest.fixture
def host_job(job: Job) -> Job:
    if "stale" not in job.given:
        pytest.skip("a program of the host")
    return job


def test_ranks_compute_and_train_as_one_rank_does(job: Job) -> None:
    for name in SAID.keys() & job.given.keys():
        said, code = job.ended[name]
        found = re.fullmatch(SAID[name], said)
        assert found and code == 0, (name, code, said)
        if "samples/s" in said:
            loss, right = map(float, found.groups())
            most = 1.0 if name == "numpy" else 2.1
            assert loss < most and right > 70, f"{name} learns nothing: guesses have a loss of 2.3 and 10 %"
    drawn = {name for name, words in job.given.items() if any("--plot" in str(word) for word in words)}
    assert {name for name in drawn if "<svg" in (job.folder / f"{name}.svg").read_text()} == drawn


def test_results_that_differ_from_one_ranks_results_are_found(host_job: Job) -> None:
    for name in SPOILT:
        said, code = host_job.ended[f"spoilt {name}"]
        text = "Tensor-likes are not close" if name in ("bias", "sum") else " is allowed\n"
        assert code == 1 and text in said, (name, code, said)


# In a job of their own: PyTorch warns of some of their calls.
@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_documents_run(device: str) -> None:
    require_programs_run(2, CHOSEN, **DEVICES[device])


def test_files_and_tables_of_scripts_that_measure_have_the_rows_of_both_backends(host_job: Job) -> None:
    (_, code), (output, issue_code) = host_job.ended["backends"], host_job.ended["issue"]
    assert (code, issue_code) == (0, 0)
    shutil.copy(ROOT / "README.md", host_job.folder)
    subprocess.run([sys.executable, "scripts/results/tables.py"], cwd=host_job.folder, env=environment(), check=True)
    results = host_job.folder / "scripts/results"
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


def test_a_new_call_that_reads_where_the_last_one_read_ends_the_run(host_job: Job) -> None:
    said, code = host_job.ended["stale"]
    assert code == 1 and "allreduce left " in said, (code, said)
