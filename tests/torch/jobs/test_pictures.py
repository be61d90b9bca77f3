"""Examples that need scikit-learn or matplotlib, which scripts/test installs for the tests of PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT

TRAIN = ROOT / "examples/train_cupy.py"
SUMS = "comm.Iallreduce(MPI.IN_PLACE, gradient)\n"
"""The call without which the ranks do not add their gradients on the host."""
RANKS = 3  # it divides no power of two


def test_programs_draw_pictures_and_ranks_train_as_one_rank_does_without_pytorch(tmp_path: Path) -> None:
    """A copy whose ranks do not add their gradients, which comes last in the same job, finds that out."""
    source, alone = TRAIN.read_text(), tmp_path / "train_alone.py"
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
