from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.mpiexec import ROOT, run_job

STOCK = ROOT / "examples" / "stock_mpi4py.py"
COMPARED = {
    "producer_consumers": r"{consumers} of {nprocs} ranks read 60 batches of 2 MiB in 3 slots of rank 0, in place: ",
    "pipeline": r"{nprocs} ranks, 8 micro-batches: \S+ ms, \d+% of it idle ",
    "fft_transpose": r"{nprocs} ranks transformed 90 x 128 x 100 numbers forward and back in \S+ ms\n",
}
"""The programs that compare with one rank, and their first words."""
SLEEP = '__import__("time").sleep(0.03)'  # longer than the producer needs for a batch
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


def test_the_list_of_examples_names_all_programs() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("nprocs", [2, 4])
@pytest.mark.parametrize("name", COMPARED)
def test_ranks_compute_what_one_rank_computes(name: str, nprocs: int) -> None:
    result = run_job(nprocs, str(ROOT / f"examples/{name}.py"), MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.match(COMPARED[name].format(nprocs=nprocs, consumers=nprocs - 1), result.stdout), result.stdout
    assert re.search(r" differ by at most \S+; 1e-\d+ is allowed\n$", result.stdout), result.stdout


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("producer_consumers", {"ring.wait_signal(PRODUCER)": "pass"}),
        (
            "producer_consumers",
            {
                "ring.wait_signal(consumer)": "pass",
                "ring.wait_signal(PRODUCER)": f"{SLEEP}; ring.wait_signal(PRODUCER)",
            },
        ),
        ("producer_consumers", {"batches[number % SLOTS]": "batches[number % SLOTS].copy()"}),
        ("pipeline", {"arrived.wait_signal(comm.rank - 1)": "pass"}),
        ("pipeline", {"returned.wait_signal(comm.rank + 1)": "pass"}),
        ("fft_transpose", {"block(turned, 0, part) for part in rows": "block(turned, 0, part) for part in rows[::-1]"}),
    ],
    ids=["empty slots", "full slots", "copies", "no activations", "no derivatives", "swapped blocks"],
)
def test_programs_find_what_is_wrong(name: str, changes: dict[str, str], tmp_path: Path) -> None:
    source = (ROOT / f"examples/{name}.py").read_text()
    for line, broken in changes.items():
        assert source.count(line) == 1
        source = source.replace(line, broken)
    program = tmp_path / "broken.py"
    program.write_text(source)
    result = run_job(2, str(program), MPICOMM_DEVICE="cpu")
    assert result.returncode != 0 and " is allowed\n" in result.stdout, result.stdout + result.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there")
@pytest.mark.parametrize("name", COMPARED)
def test_a_picture_without_matplotlib_is_refused(name: str) -> None:
    result = run_job(1, str(ROOT / f"examples/{name}.py"), "--plot=picture.svg", MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (1, "--plot needs matplotlib: pip install matplotlib\n")


@pytest.mark.parametrize(("name", "other"), [("gpu_allreduce", "stock_mpi4py"), ("ring_sum", "peer_memory")])
def test_gpu_program_says_what_is_missing(name: str, other: str) -> None:
    result = run_job(1, str(ROOT / "examples" / f"{name}.py"), CUDA_VISIBLE_DEVICES="", MPICOMM_DEVICE="cpu")
    assert result.returncode != 0
    assert "this example needs" in result.stderr and f"examples/{other}.py runs without" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "package", "extras"),
    [
        ("train_torch", "torch", "torch,examples"),
        ("tensor_parallel", "torch", "torch"),
        ("train_cupy", "matplotlib", "examples"),
    ],
)
def test_program_says_which_package_is_missing(name: str, package: str, extras: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('none here')")
    result = run_job(1, str(ROOT / "examples" / f"{name}.py"), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "(none here)" in result.stderr and f'pip install -e ".[{extras}]"' in result.stderr
