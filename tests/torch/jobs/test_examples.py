"""The examples that use PyTorch, as jobs that a test starts from one process."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.helpers.mpiexec import ROOT, run_job

TRAIN = ROOT / "examples/train_torch.py"
SPREAD = ROOT / "examples/tensor_parallel.py"
AVERAGES = {
    "comm": "comm.Allreduce(MPI.IN_PLACE, gradients, op=mpicomm.AVG)",
    "ddp": "model = DistributedDataParallel(model)",
    "fsdp": "fully_shard(part, mesh=mesh)",
}
"""The line of each mode without which the ranks do not average their gradients."""


ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}

# To import PyTorch takes longer than a program runs, so one job runs several programs, one after the other.
IN_TURN = """
import json, runpy, sys
from mpi4py import MPI
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if MPI.COMM_WORLD.rank == 0:
            print("exit code", int(end.code or 0))
"""


def run(nprocs: int, program: Path, *arguments: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    return run_job(nprocs, str(program), *arguments, **DEVICES[device])


def run_in_turn(
    nprocs: int, programs: Sequence[tuple[Path, Sequence[str]]], device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    """Run programs with their arguments; each ends with a line that says its exit code."""
    given = json.dumps([[str(program), *arguments] for program, arguments in programs])
    return run_job(nprocs, "-c", IN_TURN, given, **DEVICES[device])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_ranks_train_as_one_rank_does(nprocs: int, device: str, tmp_path: Path) -> None:
    pictures = {mode: tmp_path / f"{mode}.svg" for mode in AVERAGES}
    given = [
        (TRAIN, ("--mode", mode, "--epochs=3", "--check", f"--plot={picture}")) for mode, picture in pictures.items()
    ]
    result = run_in_turn(nprocs, given, device)
    assert result.returncode == 0 and errors_of(result, device) == ""
    lines = result.stdout.splitlines()
    assert len(lines) == 3 * len(AVERAGES)
    for mode, trained, compared, ended in zip(AVERAGES, lines[::3], lines[1::3], lines[2::3], strict=True):
        found = re.fullmatch(rf"{nprocs} ranks, {mode}: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
        assert found, trained
        assert float(found[1]) < 2.1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
        assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-04 is allowed", compared)
        assert ended == "exit code 0" and "<svg" in pictures[mode].read_text()


def pairs_of_last_lines(result: subprocess.CompletedProcess[str]) -> list[tuple[str, str]]:
    """Return the last line of each of the programs of `run_in_turn`, and the line with its exit code."""
    lines = result.stdout.splitlines()
    return [(before, line) for before, line in pairwise(lines) if line.startswith("exit code ")]


def errors_of(result: subprocess.CompletedProcess[str], device: str) -> str:
    """Return what a job says on stderr; not the warning that ranks share a GPU, which tests let them do."""
    lines = result.stderr.splitlines()
    return "\n".join(line for line in lines if device == "cpu" or "share" not in line)


def test_the_check_finds_gradients_that_are_not_averaged(tmp_path: Path) -> None:
    source, given = TRAIN.read_text(), []
    for mode, line in AVERAGES.items():
        assert source.count(line) == 1
        broken = tmp_path / f"{mode}_alone.py"
        broken.write_text(source.replace(line, "pass"))
        given.append((broken, ("--mode", mode, "--epochs=3", "--check")))
    result = run_in_turn(2, given)
    said = [(compared.endswith("1e-04 is allowed"), ended) for compared, ended in pairs_of_last_lines(result)]
    assert said == [(True, "exit code 1")] * len(AVERAGES), result.stdout + result.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_layers_that_are_spread_compute_what_whole_layers_compute(nprocs: int, device: str) -> None:
    result = run(nprocs, SPREAD, device=device)
    assert result.returncode == 0 and errors_of(result, device) == ""
    share = f"{nprocs} ranks, {100 // nprocs}% of the parameters on each: "
    assert result.stdout.startswith(share) and result.stdout.endswith(" us, the results of one rank\n")


def test_a_result_that_differs_from_that_of_whole_layers_is_found(tmp_path: Path) -> None:
    source, layer = SPREAD.read_text(), '"2": RowwiseParallel()'
    assert source.count(layer) == 1
    broken = tmp_path / "not_added.py"
    broken.write_text(
        source.replace(layer, '"2": RowwiseParallel(output_layouts=Partial())').replace(
            "import mpicomm.torch\n", "import mpicomm.torch\nfrom torch.distributed.tensor import Partial\n"
        )
    )
    result = run(2, broken)
    assert result.returncode != 0 and "Tensor-likes are not close" in result.stderr
