"""Any forms of buffers on any ranks: device calls against plain mpi4py's on copies in host memory.

Hypothesis chooses the calls, the same on all ranks; each rank draws the forms of its buffers. Some ranks may pass only
host arrays to calls with ``algorithm="mpi"``. On the host the engine of the host stands for the engine of GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.activity.reading import read_activity
from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.inputs.forms_of_buffers import NAMES, Call, Gpu
from tests.helpers.rigs.call_forms import FORMS
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.device_calls import on_host_engine
from tests.helpers.rigs.message_rigs import on_threads

EXAMPLES = int(os.environ.get("TEST_SEQUENCES", "60"))

if MPI.COMM_WORLD.size == 1:
    pytest.skip("one rank has no others that pass other buffers", allow_module_level=True)


@pytest.fixture(scope="module")
def gpus(device: str) -> Iterator[tuple[Any, Gpu]]:
    """A communicator of GPUs, real ones or threads, and how its arrays are made."""
    with communicator(device) as comm, array_module(comm) as xp:
        if device == "cpu":
            on_gpus, made_of_threads = on_threads(comm)
            with on_host_engine(on_gpus):
                gpu = Gpu(
                    lambda content: DeviceArray(made_of_threads, content),
                    lambda array: array.get(),
                    lambda array: int(array.memory.ctypes.data),
                )
                yield on_gpus, gpu
            on_gpus.Free()
        else:
            yield comm, Gpu(xp.asarray, lambda array: np.asarray(array.get()), lambda array: int(array.data.ptr))


@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(FORMS),
            st.integers(0, 1 << 16),
            st.sampled_from((False, False, True)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_forms_of_buffers(gpus: tuple[Any, Gpu], calls: list[tuple[str, str, int, bool]]) -> None:
    comm, gpu = gpus
    comm.Bcast(gpu.make(np.zeros(1, np.int32)))  # there has been a call on GPUs
    for name, form, seed, by_mpi in calls:
        call = Call(name, form, seed, comm.rank, comm.size, gpu, by_mpi=by_mpi)
        expected = call.expected(MPI.COMM_WORLD)
        failure = ""
        try:
            got = call.run(comm)
            comm.check()
            if expected is not None:
                assert got is not None
                np.testing.assert_array_equal(got, expected)
        except Exception as error:
            failure = f"rank {comm.rank}: {type(error).__name__}: {error}"
        # All ranks stop at the same call, and Hypothesis goes on alike on all of them.
        failures = [each for each in MPI.COMM_WORLD.allgather(failure) if each]
        assert not failures, f"{name} {form} {seed} {by_mpi}: " + "\n".join(failures)
        # The doctor compares the counts of calls of all ranks.
        counts = MPI.COMM_WORLD.allgather(_counts())
        assert all(each == counts[0] for each in counts), f"{name} {form} {seed} {by_mpi}: {counts}"


def _counts() -> set[tuple[int, int, int]]:
    """Return how many calls this rank has made of each communicator, and how many of them MPI has carried out."""
    found = read_activity(os.getpid())
    assert found is not None
    return {(calls.key, calls.made, calls.by_mpi) for calls in found.communicators}


@pytest.mark.parametrize("name", ["Allgather", "Allreduce", "Alltoall", "Gather", "Reduce", "Reduce_scatter_block"])
def test_host_arrays_with_every_algorithm(gpus: tuple[Any, Gpu], device: str, name: str) -> None:
    comm, gpu = gpus
    row = OPERATIONS[name]
    for algorithm in ("auto", *names_for(row, in_rank_order=True)):
        for count in (3, 1000, 1_000_003) if device == "cuda" else (3, 1000):
            sent = np.arange(count * (comm.size if row.send == "blocks" else 1), dtype=np.int32) + comm.rank
            got = np.zeros(count * (comm.size if row.receive == "blocks" else 1), np.int32)
            expected, at_root = got.copy(), not row.rooted or comm.rank == 0
            getattr(MPI.COMM_WORLD, name)(sent, expected if at_root else None)
            # In a rooted call the input is on the GPUs, because all ranks pass it.
            for inputs_on_gpu in (True,) if row.rooted else (True, False):
                target = got.copy() if inputs_on_gpu else gpu.make(got)
                source = gpu.make(sent) if inputs_on_gpu else sent
                getattr(comm, name)(source, target if at_root else None, algorithm=algorithm)
                comm.check()
                result = target if inputs_on_gpu else gpu.read(target)
                assert not at_root or np.array_equal(result, expected), (algorithm, count, inputs_on_gpu)
