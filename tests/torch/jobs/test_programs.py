"""Programs of the backend begin and end well, also without packages, functions or its import, and if a rank dies."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.mpiexec import ROOT, environment, mpiexec_command, run_job, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.jobs.survivors import Call, calls_of
from tests.helpers.programs.torch_lost_ranks import NAMES

WITHOUT_CUDA = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "cupy", "cupyx", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
WITHOUT_INTERNALS = """
import torch
from torch._C import _distributed_c10d as c10d

del torch._jit_internal._extract_tensors, c10d._register_work, c10d.Reducer._set_forward_pass_work_handle
"""
PROGRAM = """
import torch
import torch.distributed as dist

import mpicomm.torch

dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
product = mpicomm.torch.matmul_allreduce(torch.ones(2, 2), torch.ones(2, 2))
if dist.get_rank() == 0:
    print(dist.get_backend(), total.tolist(), product.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("missing", [WITHOUT_CUDA, WITHOUT_INTERNALS], ids=["cuda", "internals"])
def test_the_backend_starts_without(missing: str) -> None:
    result = run_job(2, "-c", missing + PROGRAM, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
    expected = "mpicomm [2.0, 2.0, 2.0] [[4.0, 4.0], [4.0, 4.0]]\n"
    assert (result.returncode, result.stdout) == (0, expected), result.stdout + result.stderr


GROUP = "torch.distributed.backends"
WITHOUT_IMPORT = """
import os, sys
from mpi4py import MPI
import torch, torch.distributed as dist

world = MPI.COMM_WORLD
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
# The first rank listens on a port that the system chooses. PyTorch's own store in the same process shares the port.
held = None
if world.rank == 0:
    held = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False, multi_tenant=True)
os.environ["MASTER_PORT"] = str(world.bcast(held and held.port))
assert "mpicomm" not in sys.modules
dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
if world.rank == 0:
    print(dist.get_backend(), total.tolist())
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not any(each.value.startswith("torch.") for each in entry_points(group=GROUP)),
    reason="this PyTorch has no entry points of backends: a program imports mpicomm.torch",
)
def test_a_program_names_only_the_backend(tmp_path: Path) -> None:
    # The metadata that an installation of this checkout has, also if another one, or none, is installed.
    (entry,) = re.findall(rf'^\[project\.entry-points\."{GROUP}"\]\n(.+)$', (ROOT / "pyproject.toml").read_text(), re.M)
    metadata = tmp_path / "mpicomm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mpicomm\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n".replace('"', ""))
    result = run_job(
        2,
        "-c",
        WITHOUT_IMPORT,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
        MASTER_ADDR="127.0.0.1",
        MPICOMM_DEVICE="cpu",
    )
    assert (result.returncode, result.stdout) == (0, "mpicomm [2.0, 2.0, 2.0]\n"), result.stdout + result.stderr


DROPS_WORKS_AT_THE_END = """
import atexit, threading, time
import torch, torch.distributed as dist
import mpicomm.torch
from mpicomm.torch.works import MessageWork

over, main, has_ended = MessageWork.is_completed, threading.current_thread(), threading.Event()

def held(work):  # until the program ends, when the thread drops all works at once
    done = over(work)
    if done and threading.current_thread() is not main:
        has_ended.wait()
    return done

MessageWork.is_completed = MessageWork.advance = held
dist.init_process_group("mpicomm")
peer = 1 - dist.get_rank()
works = [call(torch.ones(3), peer) for _ in range(1000) for call in (dist.isend, dist.irecv)]
for work in works:
    work.wait()
del works, work
dist.destroy_process_group()

def end():
    has_ended.set()
    time.sleep(1e-4)

atexit.register(end)
"""


def test_works_that_a_thread_drops_while_python_ends_abort_nothing() -> None:
    result = run_job(2, "-c", DROPS_WORKS_AT_THE_END, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr


RANKS = 3
SLACK_S = 1.5
SURVIVORS = range(RANKS - 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a job that has lost a rank."""
    results = tmp_path_factory.mktemp("results")
    command = mpiexec_command(RANKS, "-m", "tests.helpers.programs.torch_lost_ranks", str(results))
    with (results / "output").open("w") as output:
        job = subprocess.Popen(
            command,
            env={**sharing_of_cores(RANKS), **environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    ends = [results / f"end-{rank}" for rank in SURVIVORS]
    wait_until(lambda: all(end.exists() for end in ends) or job.poll() is not None, HANG_S)
    (results / "done").touch()
    job.wait(HANG_S)
    assert all(end.exists() for end in ends), (results / "output").read_text()[-5000:]
    return results


@pytest.fixture(scope="module")
def calls(results: Path) -> list[dict[str, Call]]:
    """The calls of each rank that lives on, by name."""
    return [{call.name: call for call in calls_of(results, rank)} for rank in SURVIVORS]


@pytest.fixture(scope="module")
def limit_s(results: Path) -> float:
    return float((results / "limit_s").read_text())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "destroy"])
def test_calls_raise_in_time(calls: list[dict[str, Call]], limit_s: float, name: str) -> None:
    for of_rank in calls:
        call = of_rank[name]
        # Autograd passes on the text of another thread's error.
        assert ("RuntimeError" if name == "training" else "CollectiveTimeoutError") in call.errors, call
        assert f"rank {RANKS - 1}" in call.text, call
        call.require_in_time(limit_s, SLACK_S)


def test_a_group_is_destroyed_all_the_same(calls: list[dict[str, Call]], limit_s: float) -> None:
    for of_rank in calls:
        call = of_rank["destroy"]
        assert not call.errors, call
        call.require_in_time(limit_s, SLACK_S)
