"""The examples on GPUs, with a rank on each GPU or with ranks that share one. Each of them checks its own results."""

from __future__ import annotations

import pytest

from tests.helpers.jobs.mpiexec import ROOT, run_job

NEEDS = {"experts": "sklearn", "train_cupy": "sklearn"}
"""Some environments of these tests lack these packages."""


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("peer_memory", "gpu_allreduce", "halo_exchange", "ring_sum"),
        *("experts", "fft_transpose", "histogram", "jacobi", "pipeline", "producer_consumers", "train_cupy"),
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
