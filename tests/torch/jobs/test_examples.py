"""The examples that use PyTorch, as jobs that a test starts from one process."""

from __future__ import annotations

import re
import subprocess
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


def run(nprocs: int, program: Path, *arguments: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    # The ranks share the cores already.
    return run_job(nprocs, str(program), *arguments, **DEVICES[device], OMP_NUM_THREADS="1")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("mode", AVERAGES)
def test_ranks_train_as_one_rank_does(mode: str, nprocs: int, device: str, tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    result = run(nprocs, TRAIN, "--mode", mode, "--epochs=3", "--check", f"--plot={picture}", device=device)
    assert result.returncode == 0 and errors_of(result, device) == ""
    trained, compared = result.stdout.splitlines()
    found = re.fullmatch(rf"{nprocs} ranks, {mode}: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
    assert found, trained
    assert float(found[1]) < 2.1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
    assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-04 is allowed", compared)
    assert "<svg" in picture.read_text()


def errors_of(result: subprocess.CompletedProcess[str], device: str) -> str:
    """Return what a job says on stderr; not the warning that ranks share a GPU, which tests let them do."""
    lines = result.stderr.splitlines()
    return "\n".join(line for line in lines if device == "cpu" or "share" not in line)


@pytest.mark.parametrize("mode", AVERAGES)
def test_the_check_finds_gradients_that_are_not_averaged(mode: str, tmp_path: Path) -> None:
    source = TRAIN.read_text()
    assert source.count(AVERAGES[mode]) == 1
    broken = tmp_path / "train_alone.py"
    broken.write_text(source.replace(AVERAGES[mode], "pass"))
    result = run(2, broken, "--mode", mode, "--epochs=3", "--check")
    assert result.returncode != 0 and "1e-04 is allowed" in result.stdout, result.stderr


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
