"""Some ranks pass arrays of the host, and others arrays on GPUs, in one call. One call on GPUs has all of them.

On the host the engine of the host stands for the engine of GPUs. Its calls on device arrays wait for all ranks, so a
rank with host arrays that does not join keeps the others. test_forms_of_buffers.py has more calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.log import logger
from mpicomm.mpi import host_calls
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.device_calls import on_gpus, values_of

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
if WORLD.size == 1:
    pytest.skip("one rank has no others that pass other arrays", allow_module_level=True)


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


@pytest.mark.parametrize("seed", range(3))
def test_random_mixtures_of_forms_and_memory(device: str, seed: int) -> None:
    """Each rank draws the memory of each call by itself, and when it completes its requests."""
    common, own = np.random.default_rng(seed), np.random.default_rng((seed, WORLD.rank))
    rank, size = WORLD.rank, WORLD.size
    with on_gpus(device) as (comm, make):
        makes = (make, np.array, np.array)  # of two and three ranks often all are on the host
        pending: list[tuple[MPI.Request, Any, Any]] = []
        for call in range(60):
            sent, got = (makes[own.integers(3)](np.full(5, value)) for value in (1.0 * rank + call, -1.0))
            expected: Any = size * call + size * (size - 1) / 2
            kind = common.integers(5)
            if kind == 0:
                comm.Allreduce(sent, got)
                pending.append((MPI.REQUEST_NULL, got, expected))
            elif kind == 1:  # MPI matches it with nothing that waits in this rank
                comm.Barrier()
            elif kind == 2:
                expected = (rank - 1) % size + call
                comm.Sendrecv(sent, (rank + 1) % size, 7, got, (rank - 1) % size, 7)
                pending.append((MPI.REQUEST_NULL, got, expected))
            else:
                pending.append((comm.Iallreduce(sent, got), got, expected))
            if own.integers(4) == 0 or call == 59:
                own.shuffle(pending)
                for request, result, value in pending:
                    request.Wait()
                    assert (values_of(result) == value).all(), call
                pending = []
        comm.check()


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


@pytest.mark.parametrize("forms", [("Allreduce",), ("Iallreduce",)])
def test_one_warning_tells_of_the_rank_with_host_arrays(
    device: str, forms: tuple[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    host_calls._named.clear()
    with on_gpus(device) as (comm, make):
        here = np.array if comm.rank == 0 else make
        for _ in range(3):
            complete(getattr(comm, forms[0])(here(np.ones(3)), here(np.zeros(3))))
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
def test_a_rank_that_comes_late_to_a_call_in_mapped_memory_raises_as_the_others(device: str, late: int) -> None:
    with on_gpus(device) as (comm, _make):
        comm.Allreduce(np.ones(3), np.zeros(3), algorithm="one_shot")
        if comm.rank == late:
            WORLD.Barrier()
        with pytest.raises(CollectiveTimeoutError, match=rf"^Allreduce.*: rank {late} did not arrive"):
            comm.Allreduce(np.ones(3), np.zeros(3), algorithm="one_shot")
        if comm.rank != late:
            WORLD.Barrier()
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
