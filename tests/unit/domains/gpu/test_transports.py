"""The engine between peer domains: the best that works, or the one that MPICOMM_INTERNODE names; calls of NCCL."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda

Choose = Callable[[Callable[[], Any] | None], Any]
"""Chooses with a function that makes channels, which is None if the ranks are on several nodes."""


def session_of(group: Group, nodes: int) -> Any:
    """A session of one GPU for each node."""
    places = [SimpleNamespace(device_uuid=bytes([node])) for node in range(nodes)]
    placement = SimpleNamespace(nodes=[[node] for node in range(nodes)], places=places)
    return SimpleNamespace(group=group, node=group, kind="ipc", pads=None, placement=placement, keep=lambda made: made)


@pytest.fixture
def choose(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choose for one rank, without NCCL, and with an MPI that takes no device pointers."""
    monkeypatch.delenv("MPICOMM_INTERNODE", raising=False)
    nccl = importlib.import_module("mpicomm.devices.cuda.nccl")
    monkeypatch.setattr(nccl, "missing", lambda: "not installed: pip install nvidia-nccl-cu13")
    module = importlib.import_module("mpicomm.domains.gpu.transports")
    backend: Any = SimpleNamespace(current=contextlib.nullcontext, side_streams=SimpleNamespace(acquire=lambda: 1))
    transfers: Any = None
    group = Group(MPI.COMM_SELF, [0], 5.0)

    def choose(channels: Callable[[], Any] | None) -> Any:
        monkeypatch.setattr(module, "MappedChannels", lambda *arguments: channels and channels())
        session = session_of(group, nodes=1 if channels else 2)
        return module.choose_transport(session, backend, transfers, lambda error: None)

    return choose


def test_mapped_memory_is_first_on_one_node(choose: Choose) -> None:
    transport, rejected = choose(lambda: "channels")
    assert transport.name == "mapped"
    assert not rejected


def test_other_engines_follow_on_several_nodes_or_if_memory_cannot_be_mapped(choose: Choose) -> None:
    def refuse() -> Any:
        raise HandleError("the driver refuses the handle")

    for channels, said in ((None, "the ranks are on several nodes"), (refuse, "the driver refuses the handle")):
        transport, rejected = choose(channels)
        assert transport.name == "pinned"
        assert list(rejected) == ["mapped", "nccl", "mpi"]
        assert said in rejected["mapped"]
        assert "pip install nvidia-nccl-cu13" in rejected["nccl"]


@pytest.mark.parametrize("name", ["mapped", "nccl", "mpi"], ids="engine {}".format)  # pytest-mpi skips mpi
def test_an_engine_that_is_named_is_taken_or_refused_if_it_does_not_work(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MPICOMM_INTERNODE", name)
    with pytest.raises(BackendUnavailableError, match=f"^MPICOMM_INTERNODE={name}: .*"):
        choose(None)
    monkeypatch.setenv("MPICOMM_INTERNODE", "pinned")
    transport, rejected = choose(lambda: "channels")
    assert transport.name == "pinned" and not rejected


def test_nccl_is_aborted_if_another_rank_could_not_start_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class AnotherRankFails(Group):
        def agree(self, step: str, act: Callable[[], Any]) -> Any:
            result = super().agree(step, act)
            if step == "engine nccl: start":
                raise HandleError("rank 1 could not start NCCL")
            return result

    transports, nccl = (
        importlib.import_module(f"mpicomm.{name}") for name in ("domains.gpu.transports", "devices.cuda.nccl")
    )
    calls: list[str] = []
    comm = SimpleNamespace(abort=lambda: calls.append("abort"), destroy=lambda: calls.append("destroy"))
    monkeypatch.setenv("MPICOMM_INTERNODE", "nccl")
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "unique_id", lambda: b"")
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda size, unique_id, rank: comm)
    monkeypatch.setattr(transports, "ForkedStream", lambda: SimpleNamespace(close=lambda: None))
    backend: Any = SimpleNamespace(current=contextlib.nullcontext, prepare_thread=lambda: None)
    group, transfers = AnotherRankFails(MPI.COMM_SELF, [0], 5.0), None
    with pytest.raises(BackendUnavailableError, match="rank 1 could not start NCCL"):
        transports.choose_transport(session_of(group, nodes=1), backend, transfers, lambda error: None)
    assert calls == ["abort"]


@pytest.fixture
def transport(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = importlib.import_module("mpicomm.domains.gpu.transports")
    monkeypatch.setattr(module.nccl, "missing", lambda: None)
    return module


def test_ranks_of_one_gpu_need_different_hosts(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    transport.require_nccl([b"A", b"B"])
    with pytest.raises(BackendUnavailableError, match="give each rank another NCCL_HOSTID"):
        transport.require_nccl([b"A", b"A"])
    monkeypatch.setenv("NCCL_HOSTID", "0")
    transport.require_nccl([b"A", b"A"])


def test_a_call_that_waits_too_long_is_left_to_its_thread(transport: Any) -> None:
    came = threading.Event()
    with pytest.raises(CollectiveTimeoutError, match=r"^no rank came within 0.1 s"):
        transport.run_with_timeout(lambda: came.wait(30), 0.1, "no rank came")
    came.set()
    assert transport.run_with_timeout(lambda: 5, 10, "no rank came") == 5


def test_an_error_of_a_call_arrives(transport: Any) -> None:
    def fail() -> None:
        raise RuntimeError("unhandled system error")

    with pytest.raises(HandleError, match="NCCL: unhandled system error"):
        transport.run_with_timeout(fail, 10, "no rank came")
