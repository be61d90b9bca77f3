"""mpicomm.cuh and pointers in kernels of users, with a rank on each GPU or with ranks that share one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT, run_job


@pytest.mark.parametrize("nprocs", [2, 4])
def test_each_function_works_as_on_cpu_threads(nprocs: int, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    # The test has its own cache, because the package's cache does not look into the headers for users.
    program = ("-m", "mpi4py", "-m", "tests.gpu.device_functions")
    result = run_job(nprocs, *program, XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert result.stdout.startswith("all functions of mpicomm.cuh")


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_heat_equals_the_heat_of_one_rank_in_four_ways(nprocs: int) -> None:
    result = run_job(nprocs, str(ROOT / "examples/jacobi.py"))
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert len(re.findall(r"^.{24} +\d+\.\d us a step$", result.stdout, re.MULTILINE)) == 4, result.stdout


@pytest.mark.parametrize("name", ["own_kernel_numba", "own_kernel_triton"])
def test_kernels_of_other_libraries_read_the_memory_of_all_ranks(name: str) -> None:
    result = run_job(2, str(ROOT / f"examples/{name}.py"))
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "added the arrays of 2 ranks" in result.stdout or "this example needs" in result.stdout, result.stdout
