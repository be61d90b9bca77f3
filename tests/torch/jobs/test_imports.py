"""The backend starts where packages of CUDA or internal functions of PyTorch are missing."""

from __future__ import annotations

import pytest

from tests.helpers.jobs.mpiexec import run_job

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
