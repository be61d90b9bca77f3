"""Any forms of buffers on any ranks: device calls against plain mpi4py's on copies in host memory.

Hypothesis chooses the calls, the same on all ranks; each rank draws the forms of its own buffers. On the host the
engine of the host stands for the engine of GPUs.
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

from tests.helpers.communicators import array_module, communicator
from tests.helpers.device_calls import on_host_engine
from tests.helpers.forms_of_buffers import METHODS, NAMES, Call, Gpu
from tests.helpers.message_devices import DeviceArray
from tests.helpers.message_rigs import rig_on

EXAMPLES = int(os.environ.get("TEST_SEQUENCES", "60"))

if MPI.COMM_WORLD.size == 1:
    pytest.skip("one rank has no others that pass other buffers", allow_module_level=True)


@pytest.fixture(scope="module")
def gpus(device: str) -> Iterator[tuple[Any, Gpu]]:
    """A communicator of GPUs, real ones or threads, and how its arrays are made."""
    with communicator(device) as comm, array_module(comm) as xp:
        if device == "cpu":
            with rig_on(comm) as rig, on_host_engine(rig.comm):
                gpu = Gpu(
                    lambda content: DeviceArray(rig.device, content),
                    lambda array: array.get(),
                    lambda array: int(array.memory.ctypes.data),
                )
                yield rig.comm, gpu
        else:
            yield comm, Gpu(xp.asarray, lambda array: np.asarray(array.get()), lambda array: int(array.data.ptr))


@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(METHODS), st.integers(0, 1 << 16)), min_size=1, max_size=6
    )
)
def test_forms_of_buffers(gpus: tuple[Any, Gpu], calls: list[tuple[str, str, int]]) -> None:
    comm, gpu = gpus
    comm.Bcast(gpu.make(np.zeros(1, np.int32)))  # there has been a call on GPUs
    for name, method, seed in calls:
        call = Call(name, method, seed, comm.rank, comm.size, gpu)
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
        assert not failures, f"{name} {method} {seed}: " + "\n".join(failures)
