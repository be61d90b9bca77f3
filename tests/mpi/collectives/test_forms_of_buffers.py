"""Messages of any form of buffer, empty buffers at one address, and host arrays beside device arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.spelled_buffers import JUNK, Blocks, one_of
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.device_calls import on_gpus, values_of

EXAMPLES = int(os.environ.get("TEST_SEQUENCES", "60"))


# A choice that depends on time, or on the memory of one rank, would take the ranks apart.
@settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    n=st.sampled_from((0, 1, 2, 12, 17, 3000, 40_000)),
    seed=st.integers(0, 1 << 20),
    way=st.sampled_from(("Sendrecv", "Isendrecv", "two", "init")),
)
def test_messages_in_a_row_with_walls(host_comm: mpicomm.Communicator, n: int, seed: int, way: str) -> None:
    comm, rng = host_comm, np.random.default_rng([seed, host_comm.rank])
    left, right = (each if 0 <= each < comm.size else MPI.PROC_NULL for each in (comm.rank - 1, comm.rank + 1))

    def buffer(values: int) -> tuple[Blocks, Any]:
        blocks = Blocks("one", [n], np.dtype(np.int64), rng, derived=True)
        blocks.fill([np.full(n, values)], np.full(blocks.room, -1))
        blocks.placed = Placed(np, blocks.content)
        return blocks, blocks.named(rng, np, copies=values != 99, derived=True, mpis=False)

    sent, received = buffer(comm.rank), buffer(99)
    send = one_of(rng, JUNK) if right == MPI.PROC_NULL else sent[1]
    receive = one_of(rng, JUNK) if left == MPI.PROC_NULL else received[1]
    if way == "Sendrecv":
        comm.Sendrecv(send, right, 3, receive, left, 3)
    elif way == "Isendrecv":
        comm.Isendrecv(send, right, 3, receive, left, 3).Wait()
    elif way == "two":
        MPI.Request.Waitall([comm.Irecv(receive, left, 3), one_of(rng, [comm.Isend, comm.Issend])(send, right, 3)])
    else:
        requests = [comm.Recv_init(receive, left, 3), comm.Send_init(send, right, 3)]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for request in requests:
            request.Free()
    alike = bool((received[0].received(n) == (99 if left == MPI.PROC_NULL else left)).all())
    assert MPI.COMM_WORLD.allreduce(alike, MPI.LAND), f"{way} of {n}, seed {seed}"  # on all ranks, which go on alike


@pytest.mark.parametrize("name", ["Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter_block"])
@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_empty_buffers_at_one_address(host_comm: mpicomm.Communicator, name: str, form: str) -> None:
    for empty in (MPI.memory.fromaddress(0, 0), np.empty(0)):
        complete(getattr(host_comm, method_name(form, name))([empty, MPI.DOUBLE], [empty, MPI.DOUBLE]), starts=2)


@pytest.mark.parametrize("name", ["Allgather", "Allreduce", "Alltoall", "Gather", "Reduce", "Reduce_scatter_block"])
def test_host_arrays_with_every_algorithm(device: str, name: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank has no others that pass other buffers")
    row = OPERATIONS[name]
    with on_gpus(device) as (comm, make):
        for algorithm in ("auto", *names_for(row, in_rank_order=True)):
            for count in (3, 1000, 1_000_003) if device == "cuda" else (3, 1000):
                sent = np.arange(count * (comm.size if row.send == "blocks" else 1), dtype=np.int32) + comm.rank
                got = np.zeros(count * (comm.size if row.receive == "blocks" else 1), np.int32)
                expected, at_root = got.copy(), not row.rooted or comm.rank == 0
                getattr(MPI.COMM_WORLD, name)(sent, expected if at_root else None)
                # In a rooted call the input is on the GPUs, because all ranks pass it.
                for inputs_on_gpu in (True,) if row.rooted else (True, False):
                    target = got.copy() if inputs_on_gpu else make(got)
                    source = make(sent) if inputs_on_gpu else sent
                    getattr(comm, name)(source, target if at_root else None, algorithm=algorithm)
                    comm.check()
                    assert not at_root or np.array_equal(values_of(target), expected), (algorithm, count, inputs_on_gpu)
