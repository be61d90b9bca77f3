"""Network messages: of device memory that MPI carries, on devices made of threads, and through memory that all map."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.signature import Signature
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.domains import mapped, mpi_transfers
from mpicomm.domains.mapped import MappedChannels
from mpicomm.domains.mpi_transfers import CudaAwareTransport, DirectTransfer, PinnedTransport, Transfers
from mpicomm.domains.steps import NetworkMessage, NetworkStep, Transport
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.waiting import wait_until
from tests.helpers.fakes.message_devices import DeviceArray, ThreadDevice
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.rigs.communicators import communicator

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
OTHERS = [rank for rank in range(SIZE) if rank != RANK]
CALL = Signature("Allreduce", "float32", 10, "sum")
STREAM = 3

if SIZE == 1:
    pytest.skip("there is no other rank", allow_module_level=True)


class Rig:
    """A transport between ranks that are a peer domain each."""

    def __init__(
        self, comm: MPI.Intracomm, transport: type[PinnedTransport | CudaAwareTransport], timeout_s: float
    ) -> None:
        group = Group(comm, range(SIZE), timeout_s)
        self.call_log = CallLog(group.subgroup([RANK], tag=9))
        self.device = ThreadDevice(RANK, timeout_s)
        backend = cast(GpuBackend, self.device)
        self.transport: Transport = transport(Transfers(comm, timeout_s, OTHERS, self.call_log), backend)

    def array(self, content: Any) -> DeviceArray:
        return DeviceArray(self.device, np.asarray(content))

    def close(self) -> None:
        self.transport.close()
        self.call_log.close_peers()
        self.call_log.close_own()
        self.device.close()


class GoneRanks(MPI.Intracomm):
    """MPI refuses to look for a message and to send one, as Open MPI with ULFM does if the other rank is gone."""

    def Iprobe(self, *arguments: Any) -> bool:
        raise MPI.Exception(MPI.ERR_OTHER)

    def Isend(self, *arguments: Any) -> MPI.Request:
        raise MPI.Exception(MPI.ERR_OTHER)


def message(rank: int, array: Any) -> NetworkMessage:
    memory = array.memory if isinstance(array, DeviceArray) else array
    return NetworkMessage(rank, memory.ctypes.data, memory.nbytes)


def step_of(sent: dict[int, Any], received: dict[int, Any]) -> NetworkStep:
    """Return the network step of arrays by the ranks to which they go, or from which they come."""
    sends, receives = (tuple(message(*each) for each in arrays.items()) for arrays in (sent, received))
    return NetworkStep(sends, receives)


@pytest.fixture
def timeout_s() -> float:
    return 20.0


@pytest.fixture(params=[PinnedTransport, CudaAwareTransport])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Iterator[Rig]:
    monkeypatch.setattr("mpicomm.domains.mpi_transfers.CHUNK_NBYTES", 4096)
    # The communicator is not freed if a test leaves messages: another communicator would get its number, and the
    # messages.
    made = Rig(WORLD.Dup(), request.param, timeout_s)
    yield made
    made.close()


def test_messages_follow_the_work_of_the_stream_and_later_work_finds_them(rig: Rig) -> None:
    for turn, count in enumerate((1, 1024, 1025, 30_000)):
        started = []
        for number in range(2):  # network steps that are under way at once
            sent = {peer: rig.array(np.zeros(count, np.int32)) for peer in OTHERS}
            received = {peer: rig.array(np.zeros(count, np.int32)) for peer in OTHERS}
            seen = {peer: rig.array(np.zeros(count, np.int32)) for peer in OTHERS}
            for peer, array in sent.items():
                array.fill(1000 * turn + 100 * number + 10 * RANK + peer, STREAM)
                received[peer].fill(-1, STREAM)  # earlier work may still use the memory
            started.append((rig.transport.start(step_of(sent, received), STREAM, CALL), number, sent, received, seen))
        for finish, number, sent, received, seen in reversed(started):
            finish()
            for peer in OTHERS:
                source, target = received[peer].memory.ctypes.data, seen[peer].memory.ctypes.data
                rig.device.copy(target, source, received[peer].memory.nbytes, STREAM)
                sent[peer].fill(-5, STREAM)  # the memory is the caller's again
            for peer, array in seen.items():
                assert (array.get() == 1000 * turn + 100 * number + 10 * peer + RANK).all()


@pytest.mark.parametrize("timeout_s", [0.5])
def test_a_rank_that_does_not_come_is_named(rig: Rig) -> None:
    if RANK == SIZE - 1:
        return
    array = rig.array(np.zeros(10, np.int32))
    finish = rig.transport.start(step_of({}, {SIZE - 1: array}), STREAM, CALL)
    with pytest.raises(CollectiveTimeoutError, match=rf"rank {SIZE - 1} did not arrive within 0.5 s") as raised:
        finish()
    assert raised.value.ranks == (SIZE - 1,)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("timeout_s", [0.3])
def test_a_rank_whose_wait_has_ended_in_the_grace_is_named_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 2, which comes late but in time. Later rank 1 waits for rank 0."""
    array, transfers = rig.array(np.zeros(10, np.int32)), cast(Any, rig.transport).transfers
    if RANK == 0:
        monkeypatch.setattr(mpi_transfers, "GRACE_S", HANG_S)
        rig.transport.start(step_of({}, {2: array}), STREAM, CALL)()
    elif RANK == 2:
        assert wait_until(lambda: transfers.comm.Iprobe(0, mpi_transfers._WAIT_TAG), HANG_S)
        rig.transport.start(step_of({0: array}, {}), STREAM, CALL)()
    WORLD.Barrier()
    if RANK == 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 did not arrive") as raised:
            rig.transport.start(step_of({}, {0: array}), STREAM, CALL)()
        assert raised.value.ranks == (0,)


def test_ranks_in_different_calls_name_both(rig: Rig) -> None:
    call = CALL if RANK else Signature("Bcast", "float32", 10, root=0)
    sent, received = (rig.array(np.zeros(10, np.int32)) for _ in range(2))
    peer = 1 if RANK == 0 else 0
    if RANK < 2:
        network_step = step_of({peer: sent}, {peer: received})
        with pytest.raises(PeerError, match=r"ranks called different things: .*(Bcast|Allreduce)"):
            rig.transport.start(network_step, STREAM, call)()


@pytest.mark.parametrize("rig", [PinnedTransport], indirect=True)
def test_pinned_memory_stays_until_its_copy_is_done_after_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    array, short = rig.array(np.zeros(10, np.int32)), rig.array(np.zeros(6, np.int32))
    if RANK == 0:
        rig.transport.start(step_of({1: array}, {}), STREAM, CALL)()
    elif RANK == 1:
        take, taken, gate = rig.device.pinned, list[weakref.ref[Any]](), threading.Event()

        def pinned(nbytes: int) -> Any:
            memory = take(nbytes)
            taken.append(weakref.ref(memory))
            return memory

        monkeypatch.setattr(rig.device, "pinned", pinned)
        rig.device.enqueue(STREAM, lambda: gate.wait(HANG_S))
        rig.transport.start(step_of({0: array}, {}), STREAM, CALL)  # its copy waits behind the gate
        with pytest.raises(PeerError, match="rank 0 sends"):
            rig.transport.start(step_of({}, {0: short}), STREAM + 1, CALL)()
        assert taken[0]() is not None
        gate.set()
        rig.device.synchronize()


@pytest.mark.parametrize("more", [4, -4])
def test_another_length_is_an_error(rig: Rig, more: int) -> None:
    if RANK == 0:
        rig.transport.start(step_of({1: rig.array(np.zeros(10, np.int32))}, {}), STREAM, CALL)()
    elif RANK == 1:
        array = rig.array(np.zeros(10 + more, np.int32))
        with pytest.raises(PeerError, match=r"rank 0 sends .* bytes.* expected on rank 1"):
            rig.transport.start(step_of({}, {0: array}), STREAM, CALL)()


def test_the_error_of_the_rank_that_is_awaited_arrives(rig: Rig) -> None:
    if RANK == 0:
        rig.transport.publish_error(CollectiveTimeoutError("rank 7 did not come", ranks=[7]))
    elif RANK == 1:
        array = rig.array(np.zeros(10, np.int32))
        finish = rig.transport.start(step_of({}, {0: array}), STREAM, CALL)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 7 did not come") as raised:
            finish()
        assert raised.value.ranks == (7,)


@pytest.mark.parametrize("transport", [PinnedTransport, CudaAwareTransport])
def test_a_rank_that_mpi_reports_as_gone_is_an_error(
    transport: type[PinnedTransport | CudaAwareTransport],
) -> None:
    rig = Rig(GoneRanks(WORLD.Dup()), transport, 20.0)
    array = rig.array(np.zeros(10, np.int32))
    finish = rig.transport.start(step_of({}, {OTHERS[0]: array}), STREAM, CALL)
    with pytest.raises(PeerError, match=r"MPI reports that a rank is gone"):
        finish()
    rig.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_late_message_is_not_written_after_its_receive_was_given_up(refused: bool) -> None:
    """It goes to the next receive. A send that MPI refuses gives up the receives of its step, too."""
    comm = GoneRanks(WORLD.Dup()) if refused else WORLD.Dup()
    given_up, received, sent = np.zeros((3, 10), np.int32)
    peer = OTHERS[0]
    if refused:
        with pytest.raises(MPI.Exception):
            DirectTransfer(comm, step_of({peer: sent}, {peer: given_up}), 5)
    else:
        DirectTransfer(comm, step_of({}, {peer: given_up}), 5).cancel()
    comm.Barrier()
    for rank in OTHERS if RANK == 0 else [0] * (RANK == 1):  # this is the first other rank of these ranks
        comm.Send(np.full(10, 7, np.int32), rank, 5)
    comm.Recv(received, peer, 5)
    assert (received == 7).all() and not given_up.any()
    comm.Free()


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Iterator[MappedChannels]:
    monkeypatch.setattr(mapped, "SLOT_NBYTES", 4096)
    with communicator("cpu", timeout_s=timeout_s) as comm:
        session = comm._session.set_up("test")
        yield session.keep(MappedChannels(session.node, session.backend, "memfd", session.pads))


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 50_000])
def test_all_ranks_exchange_with_all(channels: MappedChannels, nbytes: int) -> None:
    for turn in range(5):
        lengths = {peer: nbytes + 100 * (peer + RANK) for peer in OTHERS}
        sent = {peer: np.full(lengths[peer], 16 * RANK + peer + turn, np.uint8) for peer in OTHERS}
        received = {peer: np.zeros(lengths[peer], np.uint8) for peer in OTHERS}
        channels.exchange(step_of(sent, received), 0, 0)
        for peer, array in received.items():
            assert (array == 16 * peer + RANK + turn).all()


@pytest.mark.parametrize("timeout_s", [0.5])
def test_a_rank_that_does_not_come_to_mapped_channels_is_named(channels: MappedChannels) -> None:
    if RANK == 0:
        array = np.zeros(10, np.uint8)
        with pytest.raises(CollectiveTimeoutError, match=rf"rank {SIZE - 1} did not come"):
            channels.exchange(step_of({}, {SIZE - 1: array}), 0, 0)
