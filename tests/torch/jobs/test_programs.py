"""Programs of the backend begin and end well, and arrays of calls that vary show a call that does nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path

import pytest
import torch

from mpicomm.bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE
from tests.helpers.jobs.mpiexec import ROOT, run_job

sys.path.append(str(ROOT / "scripts/measuring"))
from varied_arrays import Pools

WITHOUT_CUDA_AND_INTERNALS = """
import atexit, sys, threading, time

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "cupy", "cupyx", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

del torch._jit_internal._extract_tensors, c10d._register_work, c10d.Reducer._set_forward_pass_work_handle
"""
AS_BACKEND_ALONE = """
import os
from mpi4py import MPI

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
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
"""
IMPORTED = """
import mpicomm.torch
from mpicomm.torch.works import MessageWork

dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
product = mpicomm.torch.matmul_allreduce(torch.ones(2, 2), torch.ones(2, 2))
if dist.get_rank() == 0:
    print(dist.get_backend(), total.tolist(), product.tolist())
"""
DROPS_WORKS_AT_THE_END = """
over, main, has_ended = MessageWork.is_completed, threading.current_thread(), threading.Event()

def held(work):  # until the program ends, when the thread drops all works at once
    done = over(work)
    if done and threading.current_thread() is not main:
        has_ended.wait()
    return done

MessageWork.is_completed = MessageWork.advance = held
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


GROUP = "torch.distributed.backends"


# One job has all, because each process takes seconds to import PyTorch.
def test_the_backend_works_by_its_name_without_cuda_and_internals_and_ends_while_a_thread_drops_works(
    tmp_path: Path,
) -> None:
    expected = "mpicomm [2.0, 2.0, 2.0] [[4.0, 4.0], [4.0, 4.0]]\n"
    program, own = WITHOUT_CUDA_AND_INTERNALS, {}
    # Older versions of PyTorch have no entry points of backends: a program imports mpicomm.torch.
    if any(each.value.startswith("torch.") for each in entry_points(group=GROUP)):
        # The metadata that an installation of this checkout has, also if another one, or none, is installed.
        project = (ROOT / "pyproject.toml").read_text()
        (entry,) = re.findall(rf'^\[project\.entry-points\."{GROUP}"\]\n(.+)$', project, re.M)
        metadata = tmp_path / "mpicomm-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mpicomm\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n".replace('"', ""))
        program, own = program + AS_BACKEND_ALONE, {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MASTER_ADDR": "127.0.0.1"}
        expected = "mpicomm [2.0, 2.0, 2.0]\n" + expected
    program += IMPORTED + DROPS_WORKS_AT_THE_END
    result = run_job(2, "-c", program, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", **own)
    assert (result.returncode, result.stdout) == (0, expected), result.stdout + result.stderr


CALLS = 12
CULPRIT = 7


def pools_of(name: str, place: str) -> list[Pools]:
    found = [Pools(OPERATIONS[name], place, 1 << 10, CALLS, rank, 2) for rank in range(2)]
    for pools in found:
        pools.put(torch.device("cpu"))
    return found


def gather(ranks: list[Pools], calls: Iterable[int], fault: str = "") -> None:
    """Carry out calls of Allgatherv; rank 1 has the fault in one of them."""
    for call in calls:
        sent = [pools.tensors(call).send.clone() for pools in ranks]
        for rank, pools in enumerate(ranks):
            found = fault if (rank, call) == (1, CULPRIT) else ""
            receive, result = pools.tensors(call).receive, torch.cat(sent)
            if found == "where the last call received":
                receive = pools.tensors(call - 1).receive
            if found == "what the last call sent":
                result = torch.cat([pools.tensors(call - 1).send for pools in ranks])
            length = min(len(receive), len(result)) - (found == "too little")
            receive[:length] = result[:length]
            if found == "too much":
                receive.as_strided((len(receive) + 1,), (1,), receive.storage_offset())[-1] = 7


def test_right_calls_are_right_and_each_leaves_something() -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]
    gather(ranks, range(CALLS))
    assert [pools.count_wrong(range(CALLS)) for pools in ranks] == [0, 0]
    assert all(
        pools.count_wrong(chain(range(call), range(call + 1, CALLS))) for pools in ranks for call in range(CALLS)
    )
    for pools in ranks:
        pools.reset()
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]


@pytest.mark.parametrize("fault", ["where the last call received", "what the last call sent", "too little", "too much"])
def test_a_fault_in_one_call_of_one_rank_is_found_there(fault: str) -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    gather(ranks, range(CALLS), fault)
    clean, faulty = (pools.count_wrong(range(CALLS)) for pools in ranks)
    assert clean == 0 and faulty > 0


def test_sums_in_place_of_a_second_call_are_found() -> None:
    ranks = pools_of("allreduce", IN_PLACE)
    assert not ranks[0].repeatable and pools_of("bcast", IN_PLACE)[0].repeatable
    for again in (False, True):
        total = ranks[0].tensors(3).send + ranks[1].tensors(3).send
        for pools in ranks:
            pools.tensors(3).send.copy_(total)
            assert (pools.count_wrong([3]) > 0) == again
