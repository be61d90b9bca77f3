"""Examples with kernels of users, as far as they go on the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.jobs.mpiexec import ROOT, run_job

JACOBI = ROOT / "examples/jacobi.py"
EDGES = "[before, counts, displacements, {}]"


@pytest.mark.parametrize("nprocs", [1, 4])
def test_heat_equals_the_heat_of_one_rank_in_every_way(nprocs: int) -> None:
    result = run_job(nprocs, str(JACOBI), MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    grid = " x ".join(map(str, MPI.Compute_dims(nprocs, 2)))
    first, *rows = result.stdout.splitlines()
    assert first == f"{grid} ranks of 60 x 90 cells: the heat of one rank, bit for bit"
    names = ("Neighbor_alltoallw", "Sendrecv", "slices of peers' memory", "one kernel for all")
    for name, row in zip(names, rows, strict=True):
        assert re.fullmatch(rf"{name} +(\d+\.\d us a step|needs a GPU on every rank)", row)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        (f"    grid.Neighbor_alltoallw({EDGES.format('sent')}, {EDGES.format('received')})\n", ""),
        ("(ABOVE, above, BELOW, below),", "(BELOW, above, ABOVE, below),"),
        ("        planes.wait_signal(peer)\n", ""),
    ],
    ids=["no edges", "wrong edges", "no wait"],
)
def test_wrong_heat_is_found(line: str, broken: str, tmp_path: Path) -> None:
    source = JACOBI.read_text()
    assert source.count(line) == 1
    program = tmp_path / "jacobi.py"
    program.write_text(source.replace(line, broken))
    result = run_job(2, str(program), MPICOMM_DEVICE="cpu")
    assert result.returncode != 0 and "one rank computes other heat" in result.stderr, result.stderr


@pytest.mark.parametrize("name", ["own_kernel_numba", "own_kernel_triton"])
def test_kernels_of_other_libraries_say_what_they_need(name: str) -> None:
    result = run_job(2, str(ROOT / f"examples/{name}.py"), CUDA_VISIBLE_DEVICES="", MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"this example needs \w+, .*CuPy and a GPU on every rank: .+\n", result.stdout)
