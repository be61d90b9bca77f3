"""The examples and the programs in documents that use PyTorch, scikit-learn or matplotlib, as jobs of one process."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.programs.document_programs import programs, require_programs_run

TRAIN = ROOT / "examples/train_torch.py"
SPREAD = ROOT / "examples/tensor_parallel.py"
EXPERTS = ROOT / "examples/experts.py"
AVERAGES = {
    "comm": "comm.Allreduce(MPI.IN_PLACE, gradients, op=mpicomm.AVG, wire_dtype=codes)",
    "ddp": "model = DistributedDataParallel(model)",
    "fsdp": "fully_shard(part, mesh=mesh)",
}
"""The line of each mode without which the ranks do not average their gradients."""


CAUGHT = """
import runpy, sys
import torch.distributed as dist
try:
    runpy.run_path({program!r}, run_name="__main__")
except AssertionError as error:
    print(error)
    dist.destroy_process_group()
    sys.exit(1)
"""
"""A program with an error that all ranks raise, and that must not end the job."""
RANKS = 3  # it divides no power of two, and 8 experts not evenly

ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}


@dataclass(frozen=True)
class Ended:
    """What a program has said and drawn."""

    output: str
    picture: str


@pytest.fixture(scope="module", params=DEVICES)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The outputs of the programs, and the pictures that some draw, by names, from one job."""
    folder = tmp_path_factory.mktemp("pictures")
    trainings = [(mode, (TRAIN, "--mode", mode, "--epochs=3", "--check")) for mode in AVERAGES]
    drawn = {name: folder / f"{name}.svg" for name in (*AVERAGES, "experts")}
    programs: dict[str, tuple[str | Path, ...]] = {
        **dict(trainings),
        "codes": (TRAIN, "--mode", "ddp", "--wire-dtype", "float8_e4m3fn", "--epochs=3", "--check"),
        "layers": (SPREAD,),
        "experts": (EXPERTS,),
        "experts of PyTorch": (EXPERTS, "--torch"),
    }
    given = [(*words, *([f"--plot={drawn[name]}"] if name in drawn else [])) for name, words in programs.items()]
    job, said = run_in_turn(RANKS, *given, **DEVICES[request.param])
    assert job.returncode == 0 and errors_of(job, request.param) == ""
    assert [code for _, code in said] == [0] * len(programs), said
    pictures = [drawn[name].read_text() if name in drawn else "" for name in programs]
    return {name: Ended(output, picture) for name, (output, _), picture in zip(programs, said, pictures, strict=True)}


@pytest.mark.parametrize("mode", AVERAGES)
def test_ranks_train_as_one_rank_does(ended: dict[str, Ended], mode: str) -> None:
    trained, compared = ended[mode].output.splitlines()
    found = re.fullmatch(rf"{RANKS} ranks, {mode}: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
    assert found, trained
    assert float(found[1]) < 2.1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
    assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-04 is allowed", compared)
    assert "<svg" in ended[mode].picture


def test_ranks_train_with_codes_nearly_as_one_rank_does(ended: dict[str, Ended]) -> None:
    said = r"\nlosses of one rank differ by at most [1-9]\S+; 2e-02 is allowed$"
    assert re.search(said, ended["codes"].output.rstrip())


def test_layers_on_all_ranks_compute_the_results_of_one_rank(ended: dict[str, Ended]) -> None:
    output = ended["layers"].output
    assert output.startswith(f"{RANKS} ranks, {100 // RANKS}% of the parameters on each: ")
    assert output.endswith(" us, the results of one rank\n")


@pytest.mark.parametrize("name", ["experts", "experts of PyTorch"])
def test_ranks_train_experts_as_one_rank_does(ended: dict[str, Ended], name: str) -> None:
    output = ended[name].output
    assert re.match(rf"{RANKS} ranks trained 8 experts in 60 steps, and read \d\d.\d% of new digits\n", output), output
    assert re.search(r" differ by at most \S+; 1e-\d+ is allowed\n$", output), output
    assert "<svg" in ended["experts"].picture


def errors_of(result: subprocess.CompletedProcess[str], device: str) -> str:
    """Return a job's output on stderr, without the warning that ranks share a GPU, which tests let them do."""
    lines = result.stderr.splitlines()
    return "\n".join(line for line in lines if device == "cpu" or "share" not in line)


def test_results_that_differ_from_one_ranks_results_are_found(tmp_path: Path) -> None:
    """Gradients that no rank averages, derivatives of other weights, and layers without a bias or the sum of parts."""
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
    source, bias, layer = SPREAD.read_text(), "columns.t(), bias)", '"2": RowwiseParallel()'
    partial = '"2": RowwiseParallel(output_layouts=__import__("torch").distributed.tensor.Partial())'
    for name, line, wrong in (("no_bias", bias, "columns.t(), bias * 0)"), ("not_added", layer, partial)):
        assert source.count(line) == 1
        broken = tmp_path / f"{name}.py"
        broken.write_text(source.replace(line, wrong))
        caught = tmp_path / f"{name}_caught.py"
        caught.write_text(CAUGHT.format(program=str(broken)))
        given.append((caught,))
    job, ended = run_in_turn(2, *given, **ON_HOST)
    assert [code for _, code in ended] == [1] * len(given), job.stdout + job.stderr
    trainings, experts, layers = ended[: len(AVERAGES)], ended[len(AVERAGES)], ended[len(AVERAGES) + 1 :]
    assert all(output.endswith("1e-04 is allowed\n") for output, _ in trainings)
    assert " is allowed\n" in experts[0]
    assert all("Tensor-likes are not close" in output for output, _ in layers)


WITHOUT_PYTORCH = ROOT / "examples/train_cupy.py"
SUMS = "comm.Iallreduce(MPI.IN_PLACE, gradient)\n"
"""The call without which the ranks do not add their gradients on the host."""


def test_programs_draw_pictures_and_ranks_train_as_one_rank_does_without_pytorch(tmp_path: Path) -> None:
    """A copy whose ranks do not add their gradients, which comes last in the same job, finds that out."""
    source, alone = WITHOUT_PYTORCH.read_text(), tmp_path / "train_alone.py"
    assert source.count(SUMS) == 1
    alone.write_text(source.replace(SUMS, "MPI.Request(MPI.REQUEST_NULL)\n"))
    names = ("producer_consumers", "pipeline", "fft_transpose", "jacobi", "train_cupy")
    pictures = {name: tmp_path / f"{name}.svg" for name in names}
    *programs, train = [(ROOT / f"examples/{name}.py", f"--plot={picture}") for name, picture in pictures.items()]
    job, ended = run_in_turn(RANKS, *programs, (*train, "--epochs=3"), (alone, "--epochs=1"), MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr, [code for _, code in ended]) == (0, "", [0] * len(names) + [1])
    assert all("<svg" in picture.read_text() for picture in pictures.values())
    trained, compared = ended[-2][0].splitlines()
    found = re.fullmatch(rf"{RANKS} ranks on numpy: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
    assert found, trained
    assert float(found[1]) < 1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
    assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-09 is allowed", compared)
    assert ended[-1][0].endswith("1e-09 is allowed\n")


CHOSEN = [program for program in programs() if program.needs == {"torch"}]


@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_documents_run(device: str) -> None:
    require_programs_run(2, CHOSEN, **DEVICES[device])
