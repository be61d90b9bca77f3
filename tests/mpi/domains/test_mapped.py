"""Network messages through memory that all ranks of a node map. On the host a copy is over when it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.domains import mapped
from mpicomm.domains.mapped import MappedChannels
from mpicomm.domains.steps import NetworkMessage, NetworkStep
from tests.helpers.rigs.communicators import communicator


@pytest.fixture
def timeout_s() -> float:
    return 20.0


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Iterator[MappedChannels]:
    monkeypatch.setattr(mapped, "SLOT_NBYTES", 4096)
    with communicator("cpu", timeout_s=timeout_s) as comm:
        session = comm._session.set_up("test")
        yield session.keep(MappedChannels(session.node, session.backend, "memfd", session.pads))


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 50_000])
def test_all_ranks_exchange_with_all(channels: MappedChannels, nbytes: int) -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    others = [peer for peer in range(size) if peer != rank]
    for turn in range(5):
        lengths = {peer: nbytes + 100 * (peer + rank) for peer in others}
        sent = {peer: np.full(lengths[peer], 16 * rank + peer + turn, np.uint8) for peer in others}
        received = {peer: np.zeros(lengths[peer], np.uint8) for peer in others}
        network_step = NetworkStep(
            tuple(NetworkMessage(peer, array.ctypes.data, array.nbytes) for peer, array in sent.items()),
            tuple(NetworkMessage(peer, array.ctypes.data, array.nbytes) for peer, array in received.items()),
        )
        channels.exchange(network_step, 0, 0)
        for peer, array in received.items():
            assert (array == 16 * peer + rank + turn).all()


@pytest.mark.parametrize("timeout_s", [0.5])
def test_a_rank_that_does_not_come_is_named(channels: MappedChannels) -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if size == 1:
        pytest.skip("there is no other rank")
    array = np.zeros(10, np.uint8)
    raising = pytest.raises(mpicomm.CollectiveTimeoutError, match=rf"rank {size - 1} did not come")
    with contextlib.nullcontext() if rank else raising:
        if rank == 0:
            channels.exchange(NetworkStep(receives=(NetworkMessage(size - 1, array.ctypes.data, array.nbytes),)), 0, 0)
