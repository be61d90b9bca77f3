"""Device arrays in calls that only MPI has: GPUs made of threads get copies, and other communicators refuse them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.api.calls_by_mpi import wrap
from tests.helpers.fakes.fake_driver import OnGpu
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.communicators import array_module, awaited, communicator
from tests.helpers.rigs.message_rigs import Rig, content, same, take_for_gpu


def is_buffer(parameter: inspect.Parameter) -> bool:
    return "Buf" in str(parameter.annotation)


def buffer_methods(cls: type) -> dict[str, dict[str, inspect.Parameter]]:
    """The methods that take buffers, with their parameters after self, by mpi4py's annotations."""
    methods = {
        name: {key: each for key, each in inspect.signature(getattr(cls, name)).parameters.items() if key != "self"}
        for name in dir(cls)
        if name[0].isupper() and inspect.ismethoddescriptor(getattr(cls, name))
    }
    return {name: parameters for name, parameters in methods.items() if any(map(is_buffer, parameters.values()))}


HARMLESS = {"dest": MPI.PROC_NULL, "source": MPI.PROC_NULL, "partitions": 1, "recvcounts": [4]}
TAKES_NO_SPECIFICATION = ("Attach_buffer", "Iagree")


def fake_arguments(name: str, parameters: dict[str, Any], on_device: list[str], *, typed: bool) -> dict[str, Any]:
    """Arguments that do no harm, and wait for no rank, if they get to MPI."""
    arguments: dict[str, Any] = {each: HARMLESS[each] for each in parameters if each in HARMLESS}
    for buffer, parameter in parameters.items():
        if is_buffer(parameter):
            array: Any = OnGpu(np.full(4, 7.0)) if buffer in on_device else np.zeros(4)
            each_typed = "alltoallw" in name.lower()  # it takes no single array
            with_type = [array, ([4], [0]), [MPI.DOUBLE]] if each_typed else [array, MPI.DOUBLE]
            arguments[buffer] = with_type if each_typed or (typed and name not in TAKES_NO_SPECIFICATION) else array
    return arguments


def test_a_device_array_never_gets_to_mpi_from_a_cpu_communicator() -> None:
    # A communicator of only this rank, so that an accepted call does not wait for others.
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu", timeout_s=5) as comm:
        require_refusals(comm, MPI.Intracomm)


def require_refusals(called: Any, cls: type) -> None:
    """Call every method of ``cls`` that takes buffers with each of them on a device."""
    let_through = []
    for name, parameters in buffer_methods(cls).items():
        buffers = [each for each, parameter in parameters.items() if is_buffer(parameter)]
        for on_device, typed in itertools.product([*([each] for each in buffers), buffers], (False, True)):
            try:
                getattr(called, name)(**fake_arguments(name, parameters, on_device, typed=typed))
            except InvalidUsageError as error:
                if "GPU" in str(error) or "host arrays alone" in str(error):
                    continue
                said = str(error)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            else:
                said = "nothing"
            let_through.append(f"{name}, {on_device} on a GPU, typed={typed}: {said}")
    assert not let_through, "\n".join(let_through)


MAKES: dict[str, Callable[[MPI.Intracomm], Any]] = {
    "adjacent graph": lambda comm: comm.Create_dist_graph_adjacent([0], [0]),
    "duplicate": lambda comm: awaited(comm.Create_cart([1, 1]).Sub([True, False]).Idup()),
}


@pytest.mark.parametrize("what", MAKES)
def test_communicators_that_are_no_communicators_refuse_device_arrays(what: str) -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu", timeout_s=5) as comm:
        made = wrap(MAKES[what](MPI.Intracomm(comm)), comm._gpu)
        send, receive = np.arange(3.0), np.zeros(3)
        made.Allreduce(send, recvbuf=receive)
        assert receive.tolist() == send.tolist()
        cls = type(made).__mro__[2]
        assert isinstance(made, MPI.Intracomm) and cls.__module__ == "mpi4py.MPI"
        require_refusals(made, cls)
        made.Free()


def test_intercommunicators_refuse_device_arrays(comm_world: MPI.Intracomm) -> None:
    if comm_world.size == 1:
        pytest.skip("needs two ranks")
    with communicator("cpu") as comm:
        half = comm.Split(comm.rank % 2)
        assert isinstance(half, mpicomm.Communicator)
        between = half.Create_intercomm(0, comm_world, 1 - comm.rank % 2)
        assert isinstance(between, MPI.Intercomm) and between.Get_remote_size() + half.size == comm.size
        if comm.rank == 0:
            require_refusals(between, MPI.Intercomm)
        between.Barrier()
        between.Free()
        half.Free()


@pytest.mark.parametrize("way", ["Mprobe", "Improbe"])
def test_matched_messages_refuse_device_arrays(way: str) -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu", timeout_s=5) as comm:
        request = comm.Isend(np.full(4, 7.0), 0, 3)
        message = None
        while message is None:
            message = getattr(comm, way)(0, 3)
        require_refusals(message, MPI.Message)
        received = np.zeros(4)
        message.Recv(received)
        assert received.tolist() == [7.0] * 4 and message == MPI.MESSAGE_NULL
        request.Wait()
        assert comm.Improbe() is None


def test_a_wrapped_communicator_takes_objects_without_a_buffer() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu", timeout_s=5) as comm:
        for wrapped in (comm, comm.Create_cart([1])):
            try:
                wrapped.Attach_buffer(MPI.BUFFER_AUTOMATIC)
            except NotImplementedError:
                pytest.skip("this MPI has no buffers of communicators")
            assert wrapped.Detach_buffer() == MPI.BUFFER_AUTOMATIC


def test_partitions_to_oneself(device: str) -> None:
    with communicator(device, MPI.COMM_SELF) as comm, array_module(comm) as xp:
        sent, received = xp.arange(6.0), xp.zeros(6)
        send, receive = comm.Psend_init(sent, 2, 0), comm.Precv_init(received, 2, 0, 0)
        for _ in range(2):
            sent += 1
            receive.Start()
            send.Start()
            send.Pready_list([1, 0])
            while not (receive.Parrived(0) and receive.Parrived(1)):
                pass
            send.Wait()
            receive.Wait()
            assert (received == sent).all()
        send.Free()
        receive.Free()


OPEN_MPI = "Open MPI" in MPI.Get_library_version()

TOPOLOGIES: dict[str, Callable[[mpicomm.Communicator], Any]] = {
    "cartesian": lambda comm: MPI.Intracomm(comm).Create_cart([comm.size], [True]),
    "adjacent graph": lambda comm: MPI.Intracomm(comm).Create_dist_graph_adjacent(
        [(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size],
        [(comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size],
    ),
}


@pytest.fixture(params=TOPOLOGIES)
def made(request: pytest.FixtureRequest, rig: Rig) -> Any:
    """A communicator of mpi4py's with a topology, in which the ranks are in the order of the rig's."""
    made = wrap(TOPOLOGIES[request.param](rig.comm), rig.comm._gpu)
    assert made.rank == rig.rank
    yield made
    made.Free()


def of(rig: Rig, values: Any) -> DeviceArray:
    return DeviceArray(rig.device, np.asarray(values, np.int32))


def received(comm: Any, rig: Rig, x: Any, y: Any, n: int, status: MPI.Status) -> None:
    request = comm.Irecv([y, MPI.INT32_T], rig.left, 2)
    comm.Send(x, rig.right, 2)
    request.Wait(status)


def started(comm: Any, rig: Rig, x: Any, y: Any, n: int, status: MPI.Status) -> None:
    request = comm.Allreduce_init([x, MPI.INT32_T], [y, n, MPI.INT32_T])
    for turn in range(3):
        x.fill(turn + rig.rank)
        request.Start()
        request.Wait()
    request.Free()


def halves(array: Any, n: int, gap: int) -> list[Any]:
    return [array, ([n // 2] * 2, [0, 4 * (n // 2 + gap)]), [MPI.INT32_T] * 2]


INT = MPI.INT32_T
CALLS: dict[str, Callable[[Any, Rig, Any, Any, int, MPI.Status], object]] = {
    "Sendrecv": lambda comm, rig, x, y, n, status: comm.Sendrecv(x, rig.right, 1, y, rig.left, 1, status),
    "Irecv": received,
    "Isendrecv_replace": lambda comm, rig, x, *_: comm.Isendrecv_replace(x, rig.right, 3, rig.left, 3).Wait(),
    "Allreduce": lambda comm, rig, x, y, n, status: comm.Allreduce([x, INT], [y, n, INT]),
    "Iallreduce": lambda comm, rig, x, *_: comm.Iallreduce(MPI.IN_PLACE, x).Wait(),
    "Allreduce_init": started,
    "Bcast": lambda comm, rig, x, *_: comm.Bcast(x, rig.size - 1),
    "Gatherv": lambda comm, rig, x, y, n, status: comm.Gatherv(
        x, [y, [n] * rig.size, [2 * n * rank + 1 for rank in range(rig.size)], INT], rig.size - 1
    ),
    "Neighbor_allgather": lambda comm, rig, x, y, n, status: comm.Neighbor_allgather(x, [y, n, INT]),
    "Ineighbor_alltoall": lambda comm, rig, x, y, n, status: comm.Ineighbor_alltoall(
        [x, n // 2, INT], [y, n // 2, INT]
    ).Wait(),
    "Neighbor_alltoallw": lambda comm, rig, x, y, n, status: comm.Neighbor_alltoallw(halves(x, n, 0), halves(y, n, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_mpi_on_host_arrays(rig: Rig, made: Any, name: str) -> None:
    plain = type(made).__mro__[2](made)
    for n in (0, 5, 70_000):
        around = np.full(2 * rig.size * n + 3, -5, np.int32)  # what lies beside the elements stays
        found, device = [], (made, rig.of(rig.rank, n), of(rig, around))
        sides: list[tuple[Any, Any, Any]] = [(plain, content(rig.rank, n), around.copy()), device]
        for comm, x, y in sides:
            status = MPI.Status()
            CALLS[name](comm, rig, x, y, n, status)
            arrays = [each if comm is plain else each.get() for each in (x, y)]
            found.append([status.source, status.tag, status.Get_count(INT), *(each.tolist() for each in arrays)])
        assert found[0] == found[1]


def test_a_call_follows_the_work_before_it(rig: Rig, made: Any) -> None:
    array, received = rig.empty(1000), rig.empty(1000)
    for turn in range(3):
        array.fill(10 * turn + rig.rank)
        made.Sendrecv(array, rig.right, 0, received, rig.left, 0)
        array.fill(-1)
        same(received, np.full(1000, 10 * turn + rig.left, np.int32))


def test_intercommunicators(rig: Rig) -> None:
    if rig.size < 2:
        pytest.skip("needs two ranks")
    half = rig.comm.Split(rig.rank % 2, rig.rank)
    assert isinstance(half, mpicomm.Communicator)
    part = Rig(half, take_for_gpu(half))
    between = half.Create_intercomm(0, MPI.Intracomm(rig.comm), 1 - rig.rank % 2)
    if half.rank < between.remote_size:
        received = part.empty(5)
        between.Sendrecv(part.of(rig.rank, 5), half.rank, 0, received, half.rank, 0)
        same(received, content(rig.rank + 1 - 2 * (rig.rank % 2), 5))
    sums = of(part, [0])
    between.Allreduce(of(part, [rig.rank]), sums)
    same(sums, np.array([sum(rank for rank in range(rig.size) if rank % 2 != rig.rank % 2)], np.int32))
    message = of(part, [42 if rig.rank == 0 else 0])
    between.Bcast(message, (MPI.ROOT if rig.rank == 0 else MPI.PROC_NULL) if rig.rank % 2 == 0 else 0)
    same(message, np.array([42 if rig.rank == 0 or rig.rank % 2 else 0], np.int32))
    merged = between.Merge(rig.rank % 2 == 1)
    total = of(part, [0])
    merged.Allreduce(of(part, [1]), total)
    same(total, np.array([rig.size], np.int32))
    for comm in (merged, between, half):
        comm.Free()


@pytest.mark.parametrize("count", [0, 2, 3000])
def test_partitioned_messages(rig: Rig, made: Any, count: int) -> None:
    parts = 3
    for comm in (rig.comm, made):
        sent, received, status = rig.empty(parts * count), rig.empty(parts * count + 1), MPI.Status()
        send = comm.Psend_init(sent, parts, rig.right, 4)
        receive = comm.Precv_init([received, count, MPI.INT32_T], parts, rig.left, 4)
        for turn in range(3):
            values = content(rig.rank, parts * count, turn)
            sent.fill(values)
            received.fill(-1)
            receive.Start()
            assert not receive.Parrived(1)
            rig.comm.Barrier()  # no message comes before the look above
            send.Start()
            send.Pready(1)
            send.Pready_list([2])
            sent.fill(values)  # the stream may go on after Pready
            send.Pready_range(0, 0)
            sent.fill(-2)
            expected = content(rig.left, parts * count, turn)
            while not receive.Parrived(1):
                pass
            assert receive.Parrived(1)
            assert received.get()[count : 2 * count].tobytes() == expected[count : 2 * count].tobytes()
            assert send.Wait() and receive.Wait(status)
            assert receive.Parrived(0)
            same(received, expected)
            assert received.get()[-1] == -1
            assert (status.source, status.tag) == (rig.left, 4)
            assert send != MPI.REQUEST_NULL and receive != MPI.REQUEST_NULL and send
        send.Free()
        receive.Free()
        assert send == MPI.REQUEST_NULL == receive and not receive


@pytest.mark.skipif(OPEN_MPI, reason="it loses elements of datatypes with gaps")
def test_partitions_with_gaps(rig: Rig) -> None:
    every_second = MPI.INT32_T.Create_vector(2, 1, 2).Create_resized(0, 16).Commit()
    sent, received = rig.of(rig.rank, 8), of(rig, np.full(8, -1))
    send = rig.comm.Psend_init([sent, 1, every_second], 2, rig.right, 4)
    receive = rig.comm.Precv_init([received, 1, every_second], 2, rig.left, 4)
    receive.Start()
    send.Start()
    send.Pready_list([1, 0])
    send.Wait()
    receive.Wait()
    expected = np.full(8, -1, np.int32)
    expected[::2] = content(rig.left, 8)[::2]
    same(received, expected)
    send.Free()
    receive.Free()


def test_bad_partitions(rig: Rig) -> None:
    with pytest.raises(ValueError, match="5 is not a multiple of required number of blocks 2"):
        rig.comm.Psend_init(rig.empty(5), 2, rig.right)
    send, receive = rig.comm.Psend_init(rig.empty(4), 2, rig.right), rig.comm.Precv_init(rig.empty(4), 2, rig.left, 0)
    receive.Start()
    send.Start()
    for bad in (2, -1):
        for call in (send.Pready, receive.Parrived):
            with pytest.raises(InvalidUsageError, match=f"partition={bad} does not exist: use 0 to 1"):
                call(bad)
    send.Pready_list([0, 1])
    send.Wait()
    receive.Wait()
    send.Free()
    receive.Free()


def test_a_capture_is_refused(rig: Rig, made: Any) -> None:
    rig.device.capturing = True
    try:
        with pytest.raises(InvalidUsageError, match="cannot be part of a CUDA graph"):
            made.Send(rig.of(rig.rank, 5), MPI.PROC_NULL)
    finally:
        rig.device.capturing = False


def test_addresses_of_a_device_are_refused_where_mpi_or_the_host_has_others(rig: Rig, made: Any) -> None:
    array, host = rig.of(rig.rank, 4), np.zeros(4, np.int32)
    address, of_host, none = array.memory.ctypes.data, MPI.Get_address(host), MPI.PROC_NULL
    places = [(address + 4 * peer) // 4 for peer in range(rig.size)]
    alone, of_the_host = (MPI.INT32_T.Create_hindexed([4], [each]).Commit() for each in (address, of_host))
    mixed = MPI.Datatype.Create_struct([4, 4], [of_host, address], [MPI.INT32_T] * 2).Commit()
    long = MPI.INT32_T.Create_hindexed([5], [address]).Commit()
    refused: list[tuple[str, Any, Any]] = [
        (r"MPI\.BOTTOM with address", made.Send, ([MPI.BOTTOM, 1, alone], none)),
        (r"MPI\.BOTTOM with address", made.Allgather, ([MPI.BOTTOM, 1, alone], host)),
        (r"MPI\.BOTTOM with address", made.Alltoallv, [[MPI.BOTTOM, [1] * rig.size, places, "i"]] * 2),
    ]
    text = "lies in no memory of a GPU, and another address on GPU 0"
    for datatype in (mixed, long):
        several = [MPI.BOTTOM, ([1] * rig.size, [0] * rig.size), [datatype] * rig.size]
        refused += [(text, call, ([MPI.BOTTOM, 1, datatype], none)) for call in (rig.comm.Send, rig.comm.Irecv)]
        refused += [
            (text, rig.comm.Bcast, ([MPI.BOTTOM, 1, datatype],)),
            (text, rig.comm.Alltoallw, (several, several)),
        ]
    for said, call, arguments in refused:
        with pytest.raises(InvalidUsageError, match=said):
            call(*arguments)
    rig.comm.Bcast([MPI.BOTTOM, 1, of_the_host])
    for datatype in (alone, of_the_host, mixed, long):
        datatype.Free()
