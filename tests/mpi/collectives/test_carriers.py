"""All ranks of a call take one carrier, whatever memory, datatypes and counts each of them passes.

The engine of the host stands for the engine of GPUs, so a rank that takes another carrier leaves the others waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.cluster.placement import Placement
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.dispatch.engines import Engines
from mpicomm.log import log_once, logger
from mpicomm.session import Session
from mpicomm.waiting import wait_until
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import (
    CALLS,
    FORMS,
    TOPOLOGIES,
    NeighborCall,
    complete,
    fails_in_open_mpi,
    method_name,
    result_of_mpi,
)
from tests.helpers.rigs.device_calls import (
    MAKERS,
    Engine,
    call,
    on_gpu,
    on_gpus,
    on_host_engine,
    require_one_carrier,
    values_of,
)
from tests.helpers.rigs.message_rigs import Rig, take_for_gpu

if MPI.COMM_WORLD.size == 1:
    pytest.skip("one rank has no others to agree with", allow_module_level=True)

NULL = MPI.memory.fromaddress(0, 0)


@pytest.fixture
def engine(rig: Rig) -> Iterator[Engine]:
    with on_host_engine(rig.comm) as engine:
        yield engine


def by_address(array: Any) -> Any:
    """The memory of an array as libraries name it that know only its address; 0 if the array is empty."""
    memory = array.memory if isinstance(array, DeviceArray) else array
    return MPI.memory.fromaddress(memory.ctypes.data, memory.nbytes) if memory.size else NULL


@pytest.mark.parametrize("where", MAKERS)
def test_neighbours_without_memory(rig: Rig, where: str) -> None:
    """Rank 0 sends to rank 1. Each has one buffer that lies nowhere, and all other ranks have two."""
    rank = rig.rank
    made: Any = rig.comm.Create_dist_graph_adjacent([0] * (rank == 1), [1] * (rank == 0))
    made.gpu = take_for_gpu(made)
    with on_host_engine(made) as engine:
        for name, form in itertools.product(("Neighbor_alltoallv", "Neighbor_alltoallw"), FORMS):
            sent = MAKERS[where](rig, np.arange(3.0)[: 3 * (rank == 0)])
            got = MAKERS[where](rig, np.zeros(3 * (rank == 1)))
            given: list[Any] = []
            for each in (sent, got):
                blocks = int(bool(values_of(each).size))
                types: Any = [MPI.DOUBLE] * blocks if name.endswith("w") else MPI.DOUBLE
                given.append([by_address(each), ([3] * blocks, [0] * blocks), types])
            call(made, method_name(form, name), *given)
            assert values_of(got).tolist() == [0.0, 1.0, 2.0][: 3 * (rank == 1)], (name, form)
        require_one_carrier(engine)
        assert (engine.calls > 0) == (where == "gpu")
    made.Free()


def test_ranks_of_several_nodes_without_memory(rig: Rig) -> None:
    comm = rig.comm.Dup()
    device = take_for_gpu(comm)
    places = [replace(place, node_key=str(rank % 2)) for rank, place in enumerate(comm._session.placement.places)]
    session = Session(MPI.Intracomm(comm), Placement(places, rig.rank), cast(GpuBackend, device))
    comm._begin(session)
    for nothing in (NULL, np.zeros(0)):
        comm.Alltoallv(*[[nothing, [0] * rig.size, MPI.DOUBLE]] * 2)
    comm.Free()


def test_one_warning_tells_of_host_arrays(rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    log_once.cache_clear()
    target = on_gpu(rig, np.zeros(rig.size))
    for _ in range(3):
        rig.comm.Allgather(np.zeros(1), target)
    assert said == ["Allgather: a host array beside an array on a GPU goes through pinned memory, which is slower"]


def test_a_graph_holds_no_call_with_a_host_array(rig: Rig, engine: Engine) -> None:
    refused = "{} cannot be part of a CUDA graph, because the host copies the host array beside an array on a GPU: pass"
    rig.device.capturing = True
    try:
        for given in ((np.zeros(2), on_gpu(rig, np.zeros(2))), (on_gpu(rig, np.zeros(2)), np.zeros(2))):
            with pytest.raises(InvalidUsageError, match=refused.format("Allreduce")):
                rig.comm.Allreduce(*given)
        if rig.rank == 0:
            with pytest.raises(InvalidUsageError, match=refused.format("Gather")):
                rig.comm.Gather(np.zeros(2), on_gpu(rig, np.zeros(2 * rig.size)))
    finally:
        rig.device.capturing = False


def test_addresses_of_the_host_beside_a_device_array_are_refused(rig: Rig, engine: Engine) -> None:
    host = np.zeros(3, np.int32)
    datatype = MPI.INT32_T.Create_hindexed([3], [MPI.Get_address(host)]).Commit()
    with pytest.raises(InvalidUsageError, match=r"sendbuf: MPI\.BOTTOM with addresses of the host"):
        rig.comm.Allgather([MPI.BOTTOM, 1, datatype], on_gpu(rig, np.zeros(3 * rig.size, np.int32)))
    datatype.Free()


@pytest.mark.parametrize("topology", ["torus", "adjacent", "star"])  # mpi/api/test_neighbors.py has all of them
def test_calls_of_neighbours_go_to_the_engine_unless_they_ask_for_mpi(rig: Rig, topology: str) -> None:
    made: Any = TOPOLOGIES[topology](rig.comm)
    made.gpu = take_for_gpu(made)
    names = [name for name in CALLS if not fails_in_open_mpi(made, name)]
    with on_host_engine(made) as engine:
        for how in ({"algorithm": "mpi"}, {}):
            for (turn, name), form in itertools.product(enumerate(names), FORMS):
                call = NeighborCall(name, made)
                sent, received = (DeviceArray(made.gpu, content) for content in (call.sent(turn), call.nothing()))
                method = method_name(form, f"Neighbor_{call.name}")
                complete(getattr(made, method)(*call.arguments(sent, received), **how))
                expected = result_of_mpi(made, call, turn)
                assert received.get().tolist() == expected.tolist(), f"{form} {name}"
                call.free()
            assert engine.calls == (0 if how else len(FORMS) * len(names))
    made.Free()


WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1


@pytest.mark.parametrize("host", [0, LAST])
@pytest.mark.parametrize("form", FORMS)
def test_mpi_carries_out_operations_of_users_without_a_name(device: str, form: str, host: int) -> None:
    def add(a: Any, b: Any, datatype: MPI.Datatype) -> None:
        total = np.frombuffer(b, np.int32)
        total += np.frombuffer(a, np.int32)

    own = MPI.Op.Create(add)
    with on_gpus(device) as (comm, make):
        here = np.array if WORLD.rank == host else make
        sent, received = here(np.full(3, WORLD.rank, np.int32)), here(np.zeros(3, np.int32))
        complete(getattr(comm, method_name(form, "Allreduce"))(sent, received, own))
        assert (values_of(received) == sum(range(WORLD.size))).all()
    own.Free()


def test_a_rank_joins_while_it_waits_in_mpi(device: str) -> None:
    """Rank 0 starts a call on the host array. It gets the message after the call of the others is complete."""
    with on_gpus(device) as (comm, make):
        here = np.array if comm.rank == 0 else make
        comm.Allreduce(make(np.ones(3)), make(np.zeros(3)))
        total, note = here(np.zeros(3)), np.zeros(1)
        request = comm.Iallreduce(here(np.ones(3)), total)
        if comm.rank == 0:
            MPI.Intracomm(comm).Recv(note, LAST, 5)
        request.Wait()
        if comm.rank == LAST:
            MPI.Intracomm(comm).Send(note, 0, 5)
        assert (values_of(total) == comm.size).all()


def test_a_thread_that_began_with_work_of_the_host_has_the_device(device: str) -> None:
    """Rank 0 joins a call on GPUs in the thread that has completed a call on the host."""
    with on_gpus(device) as (comm, make):
        comm.Allreduce(make(np.ones(3)), make(np.zeros(3)))
        half = np.ones(3, np.float16)
        complete(comm.Allreduce_init(half, half.copy()))
        here, total = np.array if comm.rank == 0 else make, np.zeros(3)
        if comm.rank:
            WORLD.Barrier()
        request = comm.Iallreduce(here(np.ones(3)), total)
        if comm.rank == 0:
            WORLD.Barrier()
        assert wait_until(lambda: request.over, HANG_S)
        request.Wait()
        assert (total == comm.size).all()


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_a_start_waits_for_no_rank(device: str, where: str) -> None:
    """The last rank starts its call after it has got a message that rank 0 sends after its start."""
    with on_gpus(device) as (comm, make):
        here = make if where == "gpu" and comm.rank == LAST else np.array
        comm.Allreduce(make(np.ones(3)), make(np.zeros(3)))
        total, note = here(np.zeros(3)), np.zeros(1)
        if comm.rank == LAST:
            comm.Recv(note, 0, 5)
        requests = [comm.Iallreduce(here(np.ones(3)), total)]
        requests.append(comm.Iallreduce(make(np.ones(3)), make(np.zeros(3)))) if device != "cpu" else None
        if comm.rank == 0:
            comm.Send(note, LAST, 5)
        MPI.Request.Waitall(requests)
        assert (values_of(total) == comm.size).all()


def test_a_blocking_call_follows_the_calls_that_are_started(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 learns late that its call needs the engine, whose set-up the others begin before their products."""
    with on_gpus(device) as (comm, make):
        comm.Allreduce(np.ones(3), np.zeros(3))
        here = np.array if comm.rank == 0 else make
        total = here(np.zeros(3))
        # Without the thread that begins started calls, which would come first by chance.
        monkeypatch.setattr(comm._collectives._votes.progress_thread, "_threaded", False)
        if comm.rank:
            WORLD.Barrier()
        request = comm.Iallreduce(here(np.ones(3)), total)
        if comm.rank == 0:
            WORLD.Barrier()
        assert (comm.allgather_matmul(np.ones((1, 2)), np.ones((2, 2))) == 2).all()
        request.Wait()
        assert (values_of(total) == comm.size).all()


def test_a_persistent_call_of_mpi_follows_the_calls_that_are_started(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The started call waits for votes on all ranks but the last, and goes over the same communicator of MPI."""
    ring: Any = rig.comm.Create_cart([rig.size], [True])
    ring.gpu = take_for_gpu(ring)
    with on_host_engine(ring):
        ring.Allreduce(np.ones(3), np.zeros(3))
        monkeypatch.setattr(ring._collectives._votes.progress_thread, "_threaded", False)
        if rig.rank == rig.size - 1:
            WORLD.Barrier()
        blocks, total = np.zeros(2), DeviceArray(ring.gpu, np.zeros(rig.size))
        request = ring.Ineighbor_allgather(np.full(1, float(rig.rank)), blocks)
        if rig.rank < rig.size - 1:
            WORLD.Barrier()
        given = DeviceArray(ring.gpu, np.arange(float(rig.size)))
        prepared = ring.Alltoall_init(given, total, algorithm="mpi")
        prepared.Start()
        prepared.Wait()
        request.Wait()
        assert (total.get() == rig.rank).all()
        assert blocks.tolist() == [rig.left, rig.right]
        prepared.Free()
    ring.Free()


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce"])
def test_one_warning_tells_of_the_rank_with_host_arrays(
    device: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    log_once.cache_clear()
    with on_gpus(device) as (comm, make):
        here = np.array if comm.rank == 0 else make
        for _ in range(3):
            complete(getattr(comm, form)(here(np.ones(3)), here(np.zeros(3))))
    said = [each for each in said if "ranks share a GPU" not in each]
    assert len(said) == (WORLD.rank == 0) and all("goes through pinned memory" in each for each in said)


def test_a_refused_call_can_be_made_again(device: str) -> None:
    with on_gpus(device) as (comm, _make):
        total = np.zeros(3)
        if comm.rank == 0:
            with pytest.raises(InvalidUsageError):
                comm.Allreduce(np.ones(3), np.zeros(2))
        comm.Allreduce(np.ones(3), total)
        assert (total == comm.size).all()


def test_a_late_rank_is_in_no_other_call(device: str) -> None:
    with on_gpus(device) as (comm, make):
        ones, total = make(np.ones(3)), make(np.zeros(3))
        for _ in range(2):
            comm.Allreduce(ones, total)
            comm.check()
            comm.Barrier()
        if comm.rank:
            with pytest.raises(CollectiveTimeoutError) as info:
                comm.Allreduce(ones, total)
                comm.check()
            assert info.value.ranks == (0,) and "on the host" not in str(info.value)
        WORLD.Barrier()


@pytest.mark.parametrize("late", [0, LAST])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_rank_that_comes_late_to_a_call_in_mapped_memory_raises_as_the_others(
    device: str, late: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first such call it comes while the others set up their engine for the error."""
    with on_gpus(device, timeout_s=stretched(2.0)) as (comm, _make):
        comm.Allreduce(np.ones(3), np.zeros(3), algorithm="auto" if is_first else "one_shot")
        on_host = Engines.on_host

        def call_late_rank(engines: Engines, operation: str) -> HostEngine:
            monkeypatch.undo()
            WORLD.Barrier()
            return on_host(engines, operation)

        if comm.rank == late:
            WORLD.Barrier()
        else:
            monkeypatch.setattr(Engines, "on_host", call_late_rank)
        with pytest.raises(CollectiveTimeoutError, match=rf"^Allreduce.*: rank {late} did not arrive") as info:
            comm.Allreduce(np.ones(3), np.zeros(3), algorithm="one_shot")
        assert info.value.ranks == (late,)
        WORLD.Barrier()


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_of_host_arrays_is_refused_before_any_rank_waits(device: str, form: str) -> None:
    with on_gpus(device) as (comm, _make):
        for late in range(comm.size):
            if comm.rank == late:
                WORLD.Barrier()
            with pytest.raises(InvalidUsageError, match="stream=5 is for device arrays"):
                getattr(comm, method_name(form, "Allreduce"))(np.ones(3), np.zeros(3), stream=5)
            if comm.rank != late:
                WORLD.Barrier()
        total = np.zeros(3)
        comm.Allreduce(np.ones(3), total)
        assert (total == comm.size).all()
