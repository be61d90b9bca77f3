"""Communicators: what they are and say, their hosts and their ends; and those that all ranks refuse to create."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, MpicommError
from mpicomm.log import logger
from tests.helpers.faults.raising import FIRST_AND_LAST, raises_everywhere
from tests.helpers.rigs.communicators import communicator, halves, node_ranks, on_hosts, require_memory_works, to_host


def test_is_an_intracommunicator(comm: mpicomm.Communicator, device: str, comm_world: MPI.Intracomm) -> None:
    assert isinstance(comm, MPI.Intracomm)
    assert (comm.rank, comm.size) == (comm_world.rank, comm_world.size)
    assert comm != comm_world
    assert MPI.Comm.Compare(comm, comm_world) == MPI.CONGRUENT
    assert (comm.local_rank, comm.local_size, comm.num_nodes) == (comm.rank, comm.size, 1)
    assert (comm.device == "cpu") == (comm.handle == "memfd") == (device == "cpu")
    info = comm.describe()
    assert (info.rank, info.node, info.device, info.handle) == (comm.rank, 0, comm.device, comm.handle)
    assert len(set(comm.allgather((info.host, info.pid)))) == comm.size
    assert [link.path == "self" for link in info.links] == [rank == comm.rank for rank in range(comm.size)]


def test_describe_says_how_much_memory_is_set_up(comm: mpicomm.Communicator, device: str) -> None:
    with comm.Dup() as child:

        def held() -> dict[str, int]:
            return {use.purpose: use.device_nbytes + use.host_nbytes for use in child.describe().memory}

        assert set(held()) == (set() if device == "cpu" else {"fault page"})
        first, second = child.zeros(2 << 20, np.uint8), child.zeros(4 << 20, np.uint8)
        assert held()["symmetric arrays"] == 6 << 20 and held()["signal pads"] > 0
        child.Allreduce(first.local, second.local[: first.size], algorithm="one_shot")
        second.close()
        assert held()["symmetric arrays"] == 2 << 20 and held()["call log"] > 0
        assert held()["host arena" if device == "cpu" else "collectives: arena"] > 2 << 20
        if device == "cpu":
            assert all(use.device_nbytes == 0 for use in child.describe().memory)


def test_memory_of_the_caller_does_not_count(comm: mpicomm.Communicator, device: str, tmp_path: Path) -> None:
    if device != "cpu":
        pytest.skip("memory of a file")
    with comm.Dup() as child, child.register(np.memmap(tmp_path / "file", np.uint8, "w+", shape=1 << 20)):
        assert {use.purpose for use in child.describe().memory} == {"signal pads"}


@pytest.mark.parametrize("end", ["Free", "free", "Disconnect"])
def test_the_end_of_a_communicator_closes_its_arrays_and_refuses_its_calls(device: str, end: str) -> None:
    comm, unused = communicator(device), communicator(device)
    array, text = comm.zeros(3), "the communicator was freed; create another"
    for each in (comm, unused):
        getattr(each, end)()
        assert each == MPI.COMM_NULL and isinstance(each, mpicomm.Communicator)
        assert repr(each) == "<mpicomm.Communicator freed>"
        for name in ("empty", "zeros", "register", "shared_event", "check", "suspend"):
            with pytest.raises(InvalidUsageError, match=f"{name}: {text}"):
                getattr(each, name)(np.zeros(3))
        getattr(each, end)()  # it does nothing
    assert array.closed
    array.close()


@pytest.fixture(scope="module")
def two_hosts(device: str) -> Iterator[mpicomm.Communicator]:
    """Even ranks on one host, and odd ranks on another."""
    with on_hosts("in turns", device) as comm:
        yield comm
        require_memory_works(comm)


def test_ranks_are_counted_by_host(two_hosts: mpicomm.Communicator) -> None:
    comm = two_hosts
    assert comm.num_nodes == min(comm.size, 2)
    assert comm.local_rank == comm.rank // 2
    assert comm.local_size == len(range(comm.rank % 2, comm.size, 2))
    assert comm.describe().node == comm.rank % 2


@pytest.mark.mpi(min_size=2)
def test_memory_is_reached_only_within_a_host(two_hosts: mpicomm.Communicator) -> None:
    comm = two_hosts
    require_memory_works(comm)
    with comm.zeros(4) as array:
        assert node_ranks(array) == list(range(comm.rank % 2, comm.size, 2))
        other = (comm.rank + 1) % comm.size if comm.size % 2 == 0 else 1 - comm.rank % 2
        event = comm.shared_event()
        uses: list[Any] = [array.peer, array.get, array.signal, array.wait_signal, event.wait]
        for use in (*uses, lambda peer: array.put(array.local, peer)):
            with pytest.raises(InvalidUsageError, match=rf"peer={other} is on another node .*{comm.describe().host}"):
                use(other)
        array.signal(comm.rank)
        array.wait_signal(comm.rank)
        event.record()
        event.wait(comm.rank)
        comm.check()
        event.close()
        assert [link.path == "other node" for link in comm.describe().links] == [
            rank % 2 != comm.rank % 2 for rank in range(comm.size)
        ]


@pytest.mark.mpi(min_size=2)
def test_children_know_their_hosts(two_hosts: mpicomm.Communicator) -> None:
    comm = two_hosts
    with comm.Split(0, -comm.rank) as backwards:
        assert backwards.num_nodes == 2
        require_memory_works(backwards)
    with comm.Split(comm.rank % 2) as node:
        assert (node.num_nodes, node.local_size) == (1, comm.local_size)
        require_memory_works(node)


def test_longest_timeout_works(comm_world: MPI.Intracomm) -> None:
    with mpicomm.Communicator(comm_world, device="cpu", timeout_s=1e6) as comm:
        require_memory_works(comm)


def test_is_made_from_any_communicator(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    alone = MPI.COMM_SELF
    with mpicomm.Communicator(comm, device="cpu") as of_its_own_kind, mpicomm.Communicator(alone) as single:
        require_memory_works(of_its_own_kind)
        require_memory_works(single)
        with single.zeros(1, np.int64) as array:
            array.local[0] = 7
            assert to_host(array.get(0)).tolist() == [7]
    if comm_world.rank == 0:
        with mpicomm.Communicator(alone, device="cpu") as single:  # collective over its own ranks only
            require_memory_works(single)


def test_one_that_is_lost_is_warned_of(comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = mpicomm.Communicator(comm_world, device="cpu")
    plain = MPI.Intracomm(comm)
    child = comm.Dup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        child.Free()
        del child
        with mpicomm.Communicator(comm_world, device="cpu"):
            pass
        gc.collect()
    session = comm._session
    monkeypatch.setattr("mpicomm.api.lifetime.sys", None)  # as at the end of a program
    with pytest.warns(ResourceWarning, match="rank .* was not freed: call Free, or use a with block"):
        del comm
        gc.collect()
    session.close()
    plain.Free()


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"device": "gpu"}, "device='gpu' is no device"),
    ({"device": -1}, "device=-1 is no device"),
    ({"device": True}, "device=True is no device"),
    ({"device": None}, "device=None is no device"),
    ({"handle": "magic"}, "handle='magic' is no handle kind"),
    ({"handle": "memfd"}, "handle='memfd' is no handle kind"),
    ({"handle": 3}, "handle=3 is no handle kind"),
    ({"timeout_s": 0}, "timeout_s=0: use a positive number"),
    ({"timeout_s": -1.5}, "timeout_s=-1.5: use a positive number"),
    ({"timeout_s": math.nan}, "timeout_s=nan: use a positive number"),
    ({"timeout_s": math.inf}, "timeout_s=inf: use a positive number"),
    ({"timeout_s": 1e12}, "timeout_s=.*: use a positive number of seconds, .* at most"),
    ({"timeout_s": "soon"}, "timeout_s='soon': use a positive number"),
    ({"reductions": "fast"}, "reductions='fast': use auto"),
    *(({"leaves": bad}, f"leaves={bad}: pass a power of two from 1 to 1024") for bad in (0, 3, 2048, 4.0)),
]
GOOD_ARGUMENTS: dict[str, Any] = {"device": "cpu", "timeout_s": 20}


@pytest.mark.parametrize("culprit", FIRST_AND_LAST)
def test_bad_arguments_are_refused_by_all(comm_world: MPI.Intracomm, culprit: int) -> None:
    for bad, text in BAD_ARGUMENTS:
        with raises_everywhere(comm_world, InvalidUsageError, match=text):
            mpicomm.Communicator(comm_world, **{**GOOD_ARGUMENTS, **bad})
        with raises_everywhere(comm_world, InvalidUsageError, match=f"^rank {culprit}: {text}") as excinfo:
            mpicomm.Communicator(comm_world, **{**GOOD_ARGUMENTS, **(bad if comm_world.rank == culprit else {})})
        assert excinfo.value.ranks == (culprit,)


BAD_ENVIRONMENT = {
    "MPICOMM_DEVICE=-1": "MPICOMM_DEVICE='-1' is no device",
    "MPICOMM_TIMEOUT=soon": "MPICOMM_TIMEOUT='soon': use a positive number",
    "MPICOMM_TIMEOUT=0": "MPICOMM_TIMEOUT='0': use a positive number",
    "MPICOMM_MEMORY=much": "MPICOMM_MEMORY: 'much' is no size",
    "MPICOMM_STATS=yes": "MPICOMM_STATS='yes': use 1",
    "MPICOMM_DEBUG=loud": "MPICOMM_DEBUG='loud': use WARN",
    "MPICOMM_DEBUG_FILE=/nowhere/log": "MPICOMM_DEBUG_FILE='/nowhere/log' cannot be opened: No such",
}


@pytest.mark.parametrize("culprit", FIRST_AND_LAST)
def test_bad_environment_of_one_rank_is_refused_by_all(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    for setting, text in BAD_ENVIRONMENT.items():
        with monkeypatch.context() as patch:
            patch.setattr(logger, "handlers", [])  # as in a process that has made no communicator yet
            if comm_world.rank == culprit:
                patch.setenv(*setting.split("="))
            with raises_everywhere(comm_world, MpicommError, match=f"^rank {culprit}: {text}"):
                mpicomm.Communicator(comm_world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", FIRST_AND_LAST)
def test_arguments_that_differ_are_refused_by_all(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, culprit: int
) -> None:
    cases: list[tuple[str, Any, Any]] = [
        ("handle", "fd", "ipc"),
        ("timeout_s", 20, 21),
        ("leaves", 16, 8),
        ("device", "auto", "cpu"),
        ("device", "cpu", 0),
        ("MPICOMM_MEMORY", "1G", "512M"),
    ]
    for name, others, of_one in cases:
        given = {name: of_one if comm_world.rank == culprit else others}
        with monkeypatch.context() as patch:
            if name.isupper():
                patch.setenv(name, given.pop(name))
            with raises_everywhere(comm_world, InvalidUsageError, match=f"{name} differs between ranks: .* on rank 1"):
                mpicomm.Communicator(comm_world, **given)


def test_handle_that_does_not_go_with_the_device_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match="handle=.ipc. does not go with device='cpu'"):
        mpicomm.Communicator(comm_world, device="cpu", handle="ipc")


def test_what_is_no_intracommunicator_is_refused(comm: mpicomm.Communicator, comm_world: MPI.Intracomm) -> None:
    freed = comm.Dup()
    freed.Free()
    refused: list[Any] = [MPI.COMM_NULL, 3, None, "world", freed]
    if comm.size > 1:
        half = halves(comm_world)
        refused.append(half.Create_intercomm(0, comm_world, 1 - comm_world.rank % 2))
    for bad in refused:
        with pytest.raises(InvalidUsageError, match="is no intracommunicator") as raised:
            mpicomm.Communicator(bad)
        assert "comm=MPI.COMM_NULL" in str(raised.value) or bad is not freed
    if comm.size > 1:
        refused.pop().Free()
        half.Free()


def test_stream_of_a_barrier_is_refused_on_the_host(host_comm: mpicomm.Communicator) -> None:
    with pytest.raises(InvalidUsageError, match=r"stream=0 is for GPUs.*: call Barrier\(\) without stream"):
        host_comm.Barrier(stream=0)
