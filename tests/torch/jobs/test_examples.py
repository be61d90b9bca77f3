"""The examples that use PyTorch or scikit-learn, as jobs that a test starts from one process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, run_job

TRAIN = ROOT / "examples/train_torch.py"
SPREAD = ROOT / "examples/tensor_parallel.py"
EXPERTS = ROOT / "examples/experts.py"
AVERAGES = {
    "comm": "comm.Allreduce(MPI.IN_PLACE, gradients, op=mpicomm.AVG, wire_dtype=codes)",
    "ddp": "model = DistributedDataParallel(model)",
    "fsdp": "fully_shard(part, mesh=mesh)",
}
"""The line of each mode without which the ranks do not average their gradients."""


ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nprocs", [2, 3])  # three divides no power of two
def test_ranks_compute_the_results_of_one_rank(nprocs: int, device: str, tmp_path: Path) -> None:
    pictures = {mode: tmp_path / f"{mode}.svg" for mode in AVERAGES}
    given = [
        (TRAIN, "--mode", mode, "--epochs=3", "--check", f"--plot={picture}") for mode, picture in pictures.items()
    ]
    coded = (TRAIN, "--mode", "ddp", "--wire-dtype", "float8_e4m3fn", "--epochs=3", "--check")
    job, ended = run_in_turn(nprocs, *given, coded, (SPREAD,), **DEVICES[device])
    assert job.returncode == 0 and errors_of(job, device) == ""
    assert [code for _, code in ended] == [0] * (len(AVERAGES) + 2)
    *trainings, with_codes, layers = (output for output, _ in ended)
    assert re.search(r"\nlosses of one rank differ by at most [1-9]\S+; 2e-02 is allowed$", with_codes.rstrip())
    for mode, training in zip(AVERAGES, trainings, strict=True):
        trained, compared = training.splitlines()
        found = re.fullmatch(rf"{nprocs} ranks, {mode}: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
        assert found, trained
        assert float(found[1]) < 2.1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
        assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-04 is allowed", compared)
        assert "<svg" in pictures[mode].read_text()
    assert layers.startswith(f"{nprocs} ranks, {100 // nprocs}% of the parameters on each: ")
    assert layers.endswith(" us, the results of one rank\n")


def errors_of(result: subprocess.CompletedProcess[str], device: str) -> str:
    """Return a job's output on stderr, without the warning that ranks share a GPU, which tests let them do."""
    lines = result.stderr.splitlines()
    return "\n".join(line for line in lines if device == "cpu" or "share" not in line)


def test_results_that_differ_from_one_ranks_results_are_found(tmp_path: Path) -> None:
    """Gradients that no rank averages, derivatives of other weights, and at the end layers without the sum of parts."""
    source = TRAIN.read_text()
    given: list[tuple[str | Path, ...]] = []
    for mode, line in AVERAGES.items():
        assert source.count(line) == 1
        broken = tmp_path / f"{mode}_alone.py"
        broken.write_text(source.replace(line, "pass"))
        given.append((broken, "--mode", mode, "--epochs=3", "--check"))
    source, weights = EXPERTS.read_text(), "back.weights[rows, None]"
    assert source.count(weights) == 1
    other_weights = tmp_path / "other_weights.py"
    other_weights.write_text(source.replace(weights, "1"))
    given.append((other_weights,))
    source, layer = SPREAD.read_text(), '"2": RowwiseParallel()'
    assert source.count(layer) == 1
    not_added = tmp_path / "not_added.py"
    not_added.write_text(
        source.replace(layer, '"2": RowwiseParallel(output_layouts=Partial())').replace(
            "import mpicomm.torch\n", "import mpicomm.torch\nfrom torch.distributed.tensor import Partial\n"
        )
    )
    job, ended = run_in_turn(2, *given, (not_added,), **ON_HOST)
    assert [code for _, code in ended] == [1] * len(given), job.stdout + job.stderr
    assert all(output.endswith("1e-04 is allowed\n") for output, _ in ended[: len(AVERAGES)])
    assert " is allowed\n" in ended[-1][0]
    assert job.returncode != 0 and "Tensor-likes are not close" in job.stderr


def test_a_layer_without_its_bias_is_found(tmp_path: Path) -> None:
    source, call = SPREAD.read_text(), "allgather_matmul(mine, columns.t(), bias)"
    assert source.count(call) == 1
    broken = tmp_path / "without_bias.py"
    broken.write_text(source.replace(call, "allgather_matmul(mine, columns.t(), bias * 0)"))
    job = run_job(2, str(broken), **ON_HOST)
    assert job.returncode != 0 and "Tensor-likes are not close" in job.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nprocs", [2, 4])
def test_ranks_train_experts_as_one_rank_does(nprocs: int, device: str, tmp_path: Path) -> None:
    picture = tmp_path / "experts.svg"
    job, ended = run_in_turn(nprocs, (EXPERTS, f"--plot={picture}"), (EXPERTS, "--torch"), **DEVICES[device])
    assert job.returncode == 0 and errors_of(job, device) == ""
    for output, code in ended:
        assert code == 0, output
        said = rf"{nprocs} ranks trained 8 experts in 60 steps, and read \d\d.\d% of new digits\n"
        assert re.match(said, output), output
        assert re.search(r" differ by at most \S+; 1e-\d+ is allowed\n$", output), output
    assert "<svg" in picture.read_text()
