"""Programs of the backend begin and end well, also without packages, functions or its import."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from tests.helpers.jobs.mpiexec import ROOT, run_job

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
