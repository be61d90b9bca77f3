from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.mpiexec import ROOT, run_job

STOCK = ROOT / "examples" / "stock_mpi4py.py"
CHANGED = {
    "import mpicomm  # <- added\n": "",
    "comm = mpicomm.Communicator(MPI.COMM_WORLD)  # <- was: comm = MPI.COMM_WORLD\n": "comm = MPI.COMM_WORLD\n",
}


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_stock_program_gives_what_mpi4py_gives(nprocs: int, tmp_path: Path) -> None:
    source = STOCK.read_text()
    for line, was in CHANGED.items():
        assert source.count(line) == 1
        source = source.replace(line, was)
    assert "mpicomm." not in source
    original = tmp_path / "original.py"
    original.write_text(source)
    ours, theirs = (run_job(nprocs, str(program), MPICOMM_DEVICE="cpu") for program in (STOCK, original))
    for result in (ours, theirs):
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"{nprocs} ranks: eigenvalue 1.000000000 after ")


@pytest.mark.parametrize("nprocs", [1, 2, 3, 4])
def test_halo_exchange_computes_what_one_rank_computes(nprocs: int) -> None:
    result = run_job(nprocs, str(ROOT / "examples/halo_exchange.py"), MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    grid = " x ".join(map(str, MPI.Compute_dims(nprocs, 2)))
    assert result.stdout.startswith(f"{grid} ranks: steps of ")
    assert result.stdout.endswith(" the same heat as a rank alone computes\n")


@pytest.mark.parametrize(("name", "other"), [("gpu_allreduce", "stock_mpi4py"), ("ring_sum", "peer_memory")])
def test_gpu_program_says_what_is_missing(name: str, other: str) -> None:
    result = run_job(1, str(ROOT / "examples" / f"{name}.py"), CUDA_VISIBLE_DEVICES="", MPICOMM_DEVICE="cpu")
    assert result.returncode != 0
    assert "this example needs" in result.stderr and f"examples/{other}.py runs without" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("name", "extras"), [("train_torch", "torch,examples"), ("tensor_parallel", "torch")])
def test_program_of_pytorch_says_what_is_missing(name: str, extras: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch here')")
    result = run_job(1, str(ROOT / "examples" / f"{name}.py"), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "(no PyTorch here)" in result.stderr and f'pip install -e ".[{extras}]"' in result.stderr
