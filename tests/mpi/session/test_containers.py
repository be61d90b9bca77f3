"""Ranks of one host that cannot open each other's memory, like ranks of several containers, are several nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.cluster import placement
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.sharing import choose_handle

WORLD = MPI.COMM_WORLD
SIZE = WORLD.size

if SIZE == 1:
    pytest.skip("one rank opens no memory of others", allow_module_level=True)


def close_between(monkeypatch: pytest.MonkeyPatch, container_of: list[str]) -> None:
    """Let no memory be opened between ranks of different containers."""
    probe = choose_handle.probe

    def probe_in_container(node: Any, backend: Any, kind: Any) -> None:
        if len({container_of[rank] for rank in node.ranks}) > 1:
            raise HandleError(f"{kind}: permission denied", ranks=[0])
        probe(node, backend, kind)

    monkeypatch.setattr(choose_handle, "probe", probe_in_container)


def test_containers_that_share_no_memory_are_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    container_of = [str(rank % 2) for rank in range(SIZE)]
    close_between(monkeypatch, container_of)
    monkeypatch.setattr(placement, "container_key", lambda: container_of[WORLD.rank])
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: warnings.append(text % values))
    with mpicomm.Communicator(device="cpu", timeout_s=10) as comm:
        assert comm.num_nodes == 2
        assert comm.local_size == len(range(WORLD.rank % 2, SIZE, 2))
        array, total = np.full(1000, comm.rank, np.float16), np.empty(1000, np.float16)
        comm.Allreduce(array, total)
        assert (total == sum(range(SIZE))).all()
    assert any("share no memory and count as several nodes" in text for text in warnings) == (WORLD.rank == 0)


def test_ranks_of_one_container_that_share_no_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    close_between(monkeypatch, [str(rank % 2) for rank in range(SIZE)])
    with pytest.raises(HandleError, match="permission denied"):
        mpicomm.Communicator(device="cpu", timeout_s=10)


def test_a_rank_that_opens_not_even_its_own_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(node: Any, backend: Any, kind: Any) -> None:
        def fail() -> None:
            if WORLD.rank == 1:
                raise HandleError("there is no memory")

        node.agree("probe", fail)

    monkeypatch.setattr(choose_handle, "probe", probe)
    with pytest.raises(HandleError, match="there is no memory") as raised:
        mpicomm.Communicator(device="cpu", timeout_s=10)
    assert raised.value.ranks == (1,)
