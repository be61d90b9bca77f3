"""Communicators that cannot be created: all ranks get the same error."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, MpicommError
from mpicomm.log import logger
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.rigs.communicators import halves

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


@pytest.mark.parametrize(("bad", "text"), BAD_ARGUMENTS)
def test_bad_argument_is_refused_by_all(comm_world: MPI.Intracomm, bad: dict[str, Any], text: str) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match=text):
        mpicomm.Communicator(comm_world, **{**GOOD_ARGUMENTS, **bad})
    for culprit in range(comm_world.size):
        with raises_everywhere(comm_world, InvalidUsageError, match=f"^rank {culprit}: {text}") as excinfo:
            mpicomm.Communicator(comm_world, **{**GOOD_ARGUMENTS, **(bad if comm_world.rank == culprit else {})})
        assert excinfo.value.ranks == (culprit,)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MPICOMM_DEVICE", "-1", "MPICOMM_DEVICE='-1' is no device"),
        ("MPICOMM_HANDLE", "magic", "MPICOMM_HANDLE='magic' is no handle kind"),
        ("MPICOMM_TIMEOUT", "soon", "MPICOMM_TIMEOUT='soon': use a positive number"),
        ("MPICOMM_TIMEOUT", "0", "MPICOMM_TIMEOUT='0': use a positive number"),
        ("MPICOMM_MEMORY", "much", "MPICOMM_MEMORY: 'much' is no size"),
        ("MPICOMM_BIND_CPU", "yes", "MPICOMM_BIND_CPU='yes': use 1"),
        ("MPICOMM_INTERNODE", "foo", "MPICOMM_INTERNODE='foo': use mapped"),
        ("MPICOMM_STATS", "yes", "MPICOMM_STATS='yes': use 1"),
        ("MPICOMM_DEBUG", "loud", "MPICOMM_DEBUG='loud': use WARN"),
        ("MPICOMM_DEBUG_FILE", "/nowhere/log", "MPICOMM_DEBUG_FILE='/nowhere/log' cannot be opened: No such"),
    ],
)
def test_bad_environment_of_one_rank_is_refused_by_all(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    for culprit in range(comm_world.size):
        with monkeypatch.context() as patch:
            patch.setattr(logger, "handlers", [])  # as in a process that has made no communicator yet
            if comm_world.rank == culprit:
                patch.setenv(name, value)
            with raises_everywhere(comm_world, MpicommError, match=f"^rank {culprit}: {text}"):
                mpicomm.Communicator(comm_world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("others", "of_one"),
    [
        ({"handle": "fd"}, {"handle": "ipc"}),
        ({"timeout_s": 20}, {"timeout_s": 21}),
        ({"leaves": 16}, {"leaves": 8}),
        ({"device": "auto"}, {"device": "cpu"}),
        ({"device": "cpu"}, {"device": 0}),
    ],
)
def test_arguments_that_differ_are_refused_by_all(
    comm_world: MPI.Intracomm, others: dict[str, Any], of_one: dict[str, Any]
) -> None:
    (name,) = others
    for culprit in range(comm_world.size):
        with raises_everywhere(comm_world, InvalidUsageError, match=f"{name} differs between ranks: .* on rank 1"):
            mpicomm.Communicator(comm_world, **(of_one if comm_world.rank == culprit else others))


@pytest.mark.mpi(min_size=2)
def test_bounds_of_memory_that_differ_are_refused_by_all(
    comm_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPICOMM_MEMORY", "512M" if comm_world.rank else "1G")
    with raises_everywhere(
        comm_world, InvalidUsageError, match=f"MPICOMM_MEMORY differs between ranks: {1 << 30} on rank 0, {1 << 29} on"
    ):
        mpicomm.Communicator(comm_world)


def test_device_that_is_not_there_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, MpicommError, match="device=99 on rank 0"):
        mpicomm.Communicator(comm_world, device=99)


def test_handle_that_does_not_go_with_the_device_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    with raises_everywhere(comm_world, InvalidUsageError, match="handle=.ipc. does not go with device='cpu'"):
        mpicomm.Communicator(comm_world, device="cpu", handle="ipc")


@pytest.mark.parametrize("bad", [MPI.COMM_NULL, 3, None, "world"], ids=["COMM_NULL", "3", "None", "world"])
def test_what_is_no_communicator_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidUsageError, match="is no intracommunicator"):
        mpicomm.Communicator(bad)


def test_freed_communicator_is_refused(comm: mpicomm.Communicator) -> None:
    child = comm.Dup()
    child.Free()
    with pytest.raises(InvalidUsageError, match=r"comm=MPI\.COMM_NULL is no intracommunicator"):
        mpicomm.Communicator(child)


def test_stream_of_a_barrier_is_refused_on_the_host(host_comm: mpicomm.Communicator) -> None:
    with pytest.raises(InvalidUsageError, match=r"stream=0 is for GPUs.*: call Barrier\(\) without stream"):
        host_comm.Barrier(stream=0)


@pytest.mark.mpi(min_size=2)
def test_intercommunicator_is_refused(comm_world: MPI.Intracomm) -> None:
    half = halves(comm_world)
    between = half.Create_intercomm(0, comm_world, 1 - comm_world.rank % 2)
    with pytest.raises(InvalidUsageError, match="is no intracommunicator"):
        mpicomm.Communicator(between)  # type: ignore[arg-type]
    between.Free()
    half.Free()
