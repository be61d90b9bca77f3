"""Gathers whose input is its own place in the output."""

from __future__ import annotations

import pytest

from tests.helpers.mpiexec import run_job

PROGRAM = """
import torch
import torch.distributed as dist
import mpicomm.torch

dist.init_process_group("mpicomm")
rank, size = dist.get_rank(), dist.get_world_size()
for kind in (torch.float32, torch.float8_e5m2):
    whole = torch.full((size, 3), -1.0).to(kind)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    assert whole.float().tolist() == [[each] * 3 for each in range(size)], whole

    whole = torch.full((size * (size + 1) // 2,), -1.0).to(kind)
    parts = list(whole.split([each + 1 for each in range(size)]))  # one after the other in memory
    apart = [part.clone() for part in parts]
    for received in (parts, apart):
        received[rank].fill_(rank)
        dist.all_gather(received, received[rank])
        assert [part.float().tolist() for part in received] == [[each] * (each + 1) for each in range(size)], received
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_rank_gathers_what_lies_in_its_place(nprocs: int) -> None:
    # PyTorch 2.14 warns that all_gather_into_tensor has another name.
    result = run_job(nprocs, "-W", "ignore::FutureWarning", "-c", PROGRAM, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert (result.returncode, result.stderr) == (0, "")
