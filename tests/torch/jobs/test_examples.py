"""The examples and the programs in documents that use PyTorch, scikit-learn or matplotlib, as jobs of one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.programs.document_programs import programs, require_programs_run

EXAMPLES = ROOT / "examples"
TRAIN, SPREAD, EXPERTS = (EXAMPLES / f"{name}.py" for name in ("train_torch", "tensor_parallel", "experts"))
RANKS = 3  # it divides no power of two, and 8 experts not evenly
ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}

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


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_compute_and_train_as_one_rank_does(device: str, tmp_path: Path) -> None:
    def drawing(name: str) -> str:
        return f"--plot={tmp_path / name}.svg"

    given: dict[str, tuple[str | Path, ...]] = {
        **{mode: train(TRAIN, mode, drawing(mode)) for mode in ("comm", "ddp", "fsdp")},
        "fp8": train(TRAIN, "ddp", "--wire-dtype", "float8_e4m3fn"),
        "layers": (SPREAD,),
        "experts": (EXPERTS, drawing("experts")),
        "experts of PyTorch": (EXPERTS, "--torch"),
    }
    if device == "cpu":  # CuPy's programs run with NumPy there
        given |= {name: (EXAMPLES / f"{name}.py", drawing(name)) for name in DRAWING}
        given["numpy"] = (EXAMPLES / "train_cupy.py", drawing("numpy"), "--epochs=3")
    ended, errors = run_named(RANKS, given, **DEVICES[device])
    # Tests let ranks share a GPU, of which mpicomm warns.
    assert not [line for line in errors.splitlines() if device == "cpu" or "share" not in line]
    for name, (said, code) in ended.items():
        found = re.fullmatch(SAID[name], said)
        assert found and code == 0, (name, code, said)
        if "samples/s" in said:
            loss, right = map(float, found.groups())
            most = 1.0 if name == "numpy" else 2.1
            assert loss < most and right > 70, f"{name} learns nothing: guesses have a loss of 2.3 and 10 %"
    drawn = {name for name, words in given.items() if any("--plot" in str(word) for word in words)}
    assert {name for name in drawn if "<svg" in (tmp_path / f"{name}.svg").read_text()} == drawn


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


def test_results_that_differ_from_one_ranks_results_are_found(tmp_path: Path) -> None:
    given: dict[str, tuple[str | Path, ...]] = {}
    for name, changed in SPOILT.items():
        program = spoilt(tmp_path, name, *changed)
        if changed[0] == TRAIN:
            given[name] = train(program, name)
        elif changed[0] == SPREAD:
            caught = tmp_path / f"{name}_caught.py"
            caught.write_text(CAUGHT.format(program=str(program)))
            given[name] = (caught,)
        else:
            given[name] = (program, "--epochs=1") if name == "numpy" else (program,)
    ended, _ = run_named(2, given, **ON_HOST)
    for name, (said, code) in ended.items():
        text = "Tensor-likes are not close" if name in ("bias", "sum") else " is allowed\n"
        assert code == 1 and text in said, (name, code, said)


CHOSEN = [program for program in programs() if program.needs == {"torch"}]


@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_documents_run(device: str) -> None:
    require_programs_run(2, CHOSEN, **DEVICES[device])
