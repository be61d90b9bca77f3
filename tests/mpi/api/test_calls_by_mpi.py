"""Calls that take only host memory refuse device arrays, and so do all communicators except Communicators of GPUs."""

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
from mpicomm.api.host_staging import wrap
from tests.helpers.fakes.fake_driver import OnGpu
from tests.helpers.rigs.communicators import array_module, communicator


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


def waited_for(duplicate: tuple[Any, MPI.Request]) -> Any:
    comm, request = duplicate
    request.Wait()
    return comm


MAKES: dict[str, Callable[[MPI.Intracomm], Any]] = {
    "adjacent graph": lambda comm: comm.Create_dist_graph_adjacent([0], [0]),
    "duplicate": lambda comm: waited_for(comm.Create_cart([1, 1]).Sub([True, False]).Idup()),
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
