"""The arrays of calls that vary show a call that does nothing, or works in another place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain

import pytest
import torch

from mpicomm.bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE
from tests.helpers.jobs.mpiexec import ROOT

sys.path.append(str(ROOT / "scripts/measuring"))
from varied_arrays import Pools

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
