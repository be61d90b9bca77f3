"""Gathers whose input is its own place in the output, as FSDP2 makes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

KINDS = [torch.float32, torch.float8_e5m2]


@pytest.mark.parametrize("kind", KINDS)
def test_gather_into_one_tensor(world: dist.ProcessGroup, kind: torch.dtype) -> None:
    rank, size = world.rank(), world.size()
    whole = torch.full((size, 3), -1.0).to(kind)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    assert whole.float().tolist() == [[each] * 3 for each in range(size)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [False, True], ids=["one after the other", "apart"])
def test_gather_into_a_list(world: dist.ProcessGroup, kind: torch.dtype, apart: bool) -> None:
    rank, size = world.rank(), world.size()
    whole = torch.full((size * (size + 1) // 2,), -1.0).to(kind)
    parts = list(whole.split([each + 1 for each in range(size)]))
    if apart:
        parts = [part.clone() for part in parts]
    parts[rank].fill_(rank)
    dist.all_gather(parts, parts[rank])
    assert [part.float().tolist() for part in parts] == [[each] * (each + 1) for each in range(size)]
