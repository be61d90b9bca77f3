"""Programs on GPUs, with a rank on each GPU or with ranks that share one: examples, documents, kernels of users."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import tests.helpers.programs
from tests.helpers.jobs.mpiexec import ROOT, run_job
from tests.helpers.programs.document_programs import programs, require_programs_run

NEEDS = {"experts": "sklearn", "train_cupy": "sklearn"}
"""Some environments of these tests lack these packages."""


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("peer_memory", "gpu_allreduce", "halo_exchange", "ring_sum"),
        *("experts", "fft_transpose", "histogram", "pipeline", "producer_consumers", "train_cupy"),
        *("train_reproducible", "work_stealing"),
    ],
)
def test_example_runs_on_gpus(name: str, nprocs: int) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = run_job(nprocs, str(ROOT / f"examples/{name}.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout and "this example needs" not in result.stdout, result.stdout
    assert "using the cpu" not in result.stderr, result.stderr


@pytest.mark.parametrize("nprocs", [2, 4])
def test_programs_run_on_gpus(nprocs: int) -> None:
    chosen = [program for program in programs() if "torch" not in program.needs]
    assert "using the cpu" not in require_programs_run(nprocs, chosen)


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


# Unmodified programs find the data of a blocking call on every stream when the call has returned.
LIBRARIES = [name for name in ("cupy", "torch") if importlib.util.find_spec(name)]
PROGRAM = str(Path(tests.helpers.programs.__file__).with_name("complete_on_return.py"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_blocking_call_is_complete_on_return(library: str) -> None:
    result = run_job(2, "-m", "mpicomm", PROGRAM, library)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} saw old data after []\nrank {rank} done" in result.stdout, result.stdout + result.stderr


def test_calls_in_stream_order_return_before() -> None:
    """So the test above can fail."""
    result = run_job(2, "-m", "mpicomm", "--stream-order", PROGRAM, "cupy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'Allreduce'" in result.stdout and "'Sendrecv'" in result.stdout and "'put'" in result.stdout, result.stdout
