"""One rank passes arrays of the host, and the others arrays on GPUs: MPI carries out such calls, and kernels cannot.

The errors of the others tell of the call of the rank with host arrays.

On the host the engine of the host stands for the engine of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import CollectiveTimeoutError, PeerError
from mpicomm.log import logger
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.communicators import array_module, communicator, patience_s
from tests.helpers.rigs.device_calls import on_host_engine
from tests.helpers.rigs.message_rigs import on_threads

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1
WAY_OUT = 'pass a device array on every rank, or on no rank, or algorithm="mpi" on every rank'

if WORLD.size == 1:
    pytest.skip("one rank has no others that pass other arrays", allow_module_level=True)


@contextmanager
def on_gpus(device: str) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """A communicator of GPUs, real ones or threads, and how its arrays are made."""
    timeout_s = patience_s(device)
    with communicator(device, timeout_s=timeout_s) as comm, array_module(comm) as xp:
        if device == "cpu":
            child, made_of_threads = on_threads(comm)
            with on_host_engine(child):
                yield child, lambda content: DeviceArray(made_of_threads, content)
            child.Free()
        else:
            child = comm.Dup()
            yield child, xp.asarray
            child.Free()


def arguments(name: str, make: Callable[[Any], Any]) -> list[Any]:
    size = WORLD.size
    block, whole = make(np.ones(3)), make(np.zeros(3 * size))
    return {
        "Bcast": [block],
        "Allreduce": [block, make(np.zeros(3))],
        "Allgather": [block, whole],
        "Gather": [block, whole if WORLD.rank == 0 else None],
        "Alltoallv": [[make(np.ones(3 * size)), [3] * size], [whole, [3] * size]],
    }[name]


@pytest.mark.parametrize("host", [0, LAST])
@pytest.mark.parametrize("form", FORMS)
def test_mpi_takes_host_arrays_on_one_rank(device: str, form: str, host: int) -> None:
    rank, size, root = WORLD.rank, WORLD.size, LAST
    everybody = (10 * np.arange(size)[:, None] + np.arange(3)).astype(np.int32)
    block, blocks, counts = everybody[rank], np.tile(everybody[rank], size), [3] * size

    def add(a: Any, b: Any, datatype: MPI.Datatype) -> None:
        total = np.frombuffer(b, np.int32)
        total += np.frombuffer(a, np.int32)

    own = MPI.Op.Create(add)
    by_mpi = {"algorithm": "mpi"}
    with on_gpus(device) as (comm, make):
        here = np.array if rank == host else make
        for name, sent, result, options in (
            ("Bcast", None, everybody[root], by_mpi),  # the first call of the communicator
            ("Allreduce", block, everybody.sum(0, np.int32), by_mpi),
            ("Allreduce", block, everybody.sum(0, np.int32), {"op": own}),  # MPI carries it out without a name
            ("Allgather", block, everybody, by_mpi),
            ("Gather", block, everybody if rank == root else None, {"root": root, **by_mpi}),
            ("Scatter", everybody if rank == root else None, block, {"root": root, **by_mpi}),
            ("Alltoallv", blocks, everybody, by_mpi),
            ("Reduce_scatter", np.concatenate(everybody), size * block, by_mpi),
        ):
            received: Any = None if result is None else here(np.full(result.size, -1, np.int32))
            given = [None if sent is None else here(sent.copy()), received]
            if name == "Bcast":
                received = here(block.copy())
                given, options = [received], {"root": root, **options}
            elif name == "Alltoallv":
                given = [[array, counts] for array in given]
            complete(getattr(comm, method_name(form, name))(*given, **options), starts=2)
            if result is not None:
                got = received if isinstance(received, np.ndarray) else received.get()
                assert np.array_equal(got.ravel(), result.ravel()), (name, options)
    own.Free()


@pytest.mark.parametrize(
    ("name", "host"), [("Bcast", 0), ("Bcast", LAST), ("Allreduce", 0), ("Allgather", LAST), ("Gather", 0)]
)
def test_a_rank_in_a_call_on_the_host_is_named(device: str, name: str, host: int) -> None:
    with on_gpus(device) as (comm, make):
        total = make(np.zeros(3))
        comm.Allreduce(make(np.ones(3)), total)
        comm.check()
        WORLD.Barrier()
        if comm.rank == host:  # it would wait for ever in the blocking form
            request = getattr(comm, f"I{name.lower()}")(*arguments(name, np.asarray))
            WORLD.Barrier()
        else:
            text = rf"ranks called different things: .*rank {host}: {name} on the host; .*{WAY_OUT}"
            with pytest.raises(PeerError, match=text):
                getattr(comm, name)(*arguments(name, make))
                comm.check()
                comm.Allreduce(make(np.ones(3)), total)  # a rank that had nothing to wait for is told here
                comm.check()
            WORLD.Barrier()
            request = getattr(MPI.Intracomm(comm), f"I{name.lower()}")(*arguments(name, np.asarray))
        request.Wait()


def test_a_rank_in_a_call_on_the_host_is_named_in_the_set_up(device: str) -> None:
    with on_gpus(device) as (comm, make):
        if comm.rank == 0:
            comm.Bcast(np.ones(3))  # MPI's root does not wait for the others
            WORLD.Barrier()
            with pytest.raises(CollectiveTimeoutError, match="rank 0 did not arrive"):
                comm.Bcast(make(np.ones(3)))
        else:
            text = f"rank 0 did not arrive .*: rank 0 is in Bcast on the host, or has left it; {WAY_OUT}"
            with pytest.raises(CollectiveTimeoutError, match=text):
                comm.Bcast(make(np.ones(3)))
            WORLD.Barrier()
            MPI.Intracomm(comm).Bcast(np.ones(3))


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


def test_free_tells_of_a_call_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        pytest.skip("calls of the host's engine raise at once")
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
    with on_gpus(device) as (comm, make):
        total = make(np.zeros(3))
        comm.Allreduce(make(np.ones(3)), total)
        comm.check()
        WORLD.Barrier()
        if comm.rank == 0:
            request = comm.Iallreduce(np.ones(3), np.zeros(3))
            WORLD.Barrier()
        else:
            comm.Allreduce(make(np.ones(3)), total)
            total.get()  # waits for the kernel, and gets a wrong result
            WORLD.Barrier()
            request = MPI.Intracomm(comm).Iallreduce(np.ones(3), np.zeros(3))
        request.Wait()
    assert len(said) == (WORLD.rank != 0)
    assert all("Free: earlier calls on GPUs have failed" in each for each in said)
    assert all("rank 0: Allreduce on the host" in each for each in said)
