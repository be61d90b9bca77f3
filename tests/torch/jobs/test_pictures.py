"""Examples that need scikit-learn or matplotlib, which scripts/test installs for the tests of PyTorch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.mpiexec import ROOT, run_job

TRAIN = ROOT / "examples/train_cupy.py"
SUMS = "comm.Iallreduce(MPI.IN_PLACE, gradient)\n"
"""The call without which the ranks do not add their gradients on the host."""


def run(nprocs: int, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_job(nprocs, str(program), *arguments, MPICOMM_DEVICE="cpu")


@pytest.mark.parametrize("nprocs", [2, 4])
def test_ranks_train_as_one_rank_does_without_pytorch(nprocs: int, tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    result = run(nprocs, TRAIN, "--epochs=3", f"--plot={picture}")
    assert (result.returncode, result.stderr) == (0, "")
    trained, compared = result.stdout.splitlines()
    found = re.fullmatch(rf"{nprocs} ranks on numpy: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
    assert found, trained
    assert float(found[1]) < 1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
    assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-04 is allowed", compared)
    assert "<svg" in picture.read_text()


def test_gradients_that_are_not_added_are_found(tmp_path: Path) -> None:
    source = TRAIN.read_text()
    assert source.count(SUMS) == 1
    broken = tmp_path / "train_alone.py"
    broken.write_text(source.replace(SUMS, "MPI.Request(MPI.REQUEST_NULL)\n"))
    result = run(2, broken, "--epochs=1")
    assert result.returncode != 0 and "1e-04 is allowed" in result.stdout, result.stderr


@pytest.mark.parametrize("name", ["producer_consumers", "pipeline", "fft_transpose", "jacobi"])
def test_examples_draw_pictures(name: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    result = run(2, ROOT / f"examples/{name}.py", f"--plot={picture}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "<svg" in picture.read_text()
