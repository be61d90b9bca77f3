"""Examples that need scikit-learn or matplotlib, which scripts/test installs for the tests of PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT

TRAIN = ROOT / "examples/train_cupy.py"
SUMS = "comm.Iallreduce(MPI.IN_PLACE, gradient)\n"
"""The call without which the ranks do not add their gradients on the host."""


@pytest.mark.parametrize("nprocs", [2, 4])
def test_ranks_train_as_one_rank_does_without_pytorch(nprocs: int, tmp_path: Path) -> None:
    """A copy whose ranks do not add their gradients, which comes next in the same job, finds that out."""
    source, picture, alone = TRAIN.read_text(), tmp_path / "loss.svg", tmp_path / "train_alone.py"
    assert source.count(SUMS) == 1
    alone.write_text(source.replace(SUMS, "MPI.Request(MPI.REQUEST_NULL)\n"))
    programs = [(TRAIN, "--epochs=3", f"--plot={picture}"), (alone, "--epochs=1")]
    job, ended = run_in_turn(nprocs, *programs, MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr, [code for _, code in ended]) == (0, "", [0, 1])
    trained, compared = ended[0][0].splitlines()
    found = re.fullmatch(rf"{nprocs} ranks on numpy: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right", trained)
    assert found, trained
    assert float(found[1]) < 1 and float(found[2]) > 70, "it learns nothing: guesses have a loss of 2.3 and 10 %"
    assert re.fullmatch(r"losses of one rank differ by at most \S+; 1e-09 is allowed", compared)
    assert "<svg" in picture.read_text()
    assert ended[1][0].endswith("1e-09 is allowed\n")


def test_examples_draw_pictures(tmp_path: Path) -> None:
    names = ("producer_consumers", "pipeline", "fft_transpose", "jacobi")
    pictures = {name: tmp_path / f"{name}.svg" for name in names}
    programs = [(ROOT / f"examples/{name}.py", f"--plot={picture}") for name, picture in pictures.items()]
    job, ended = run_in_turn(2, *programs, MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr, [code for _, code in ended]) == (0, "", [0] * len(programs))
    assert all("<svg" in picture.read_text() for picture in pictures.values())
