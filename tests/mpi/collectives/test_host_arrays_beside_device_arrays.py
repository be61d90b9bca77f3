"""Calls with an array of the host and an array on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.collectives import beside
from mpicomm.log import logger
from tests.helpers.rigs.call_forms import FORMS, method_name
from tests.helpers.rigs.device_calls import MAKERS, Engine, call, on_gpu, on_host_engine, require_one_way, values_of
from tests.helpers.rigs.message_rigs import Rig

if MPI.COMM_WORLD.size == 1:
    pytest.skip("one rank has no others to agree with", allow_module_level=True)


@pytest.fixture
def engine(rig: Rig) -> Iterator[Engine]:
    with on_host_engine(rig.comm) as engine:
        yield engine


MIXTURES = [("host", "gpu"), ("gpu", "host")]


@pytest.mark.parametrize("root_has", MIXTURES)
@pytest.mark.parametrize("form", FORMS)
def test_the_buffers_that_all_ranks_pass_say_where_a_rooted_call_is(
    rig: Rig, engine: Engine, form: str, root_has: tuple[str, str]
) -> None:
    size, rank, root = rig.size, rig.rank, rig.size - 1
    common, alone = root_has
    block = np.arange(3, dtype=np.int32) + 10 * rank
    everybody = (np.arange(3, dtype=np.int32)[None, :] + 10 * np.arange(size)[:, None]).astype(np.int32)
    nothing = np.full(3 * size, -1, np.int32)
    for name in ("Gather", "Gatherv", "Reduce", "Scatter", "Scatterv"):
        method = method_name(form, name)
        scatters = name.startswith("Scatter")
        ours = MAKERS[common](rig, np.full(3, -1, np.int32) if scatters else block)
        roots = MAKERS[alone](rig, everybody if scatters else nothing[:3] if name == "Reduce" else nothing)
        mine = roots if rank == root else None
        call(rig.comm, method, *((mine, ours) if scatters else (ours, mine)), root=root)
        result = ours if scatters else roots
        expected = everybody.sum(0) if name == "Reduce" else block if scatters else everybody
        if scatters or rank == root:
            assert np.array_equal(values_of(result).ravel(), np.ravel(expected)), method
    require_one_way(engine)
    assert (engine.calls > 0) == (common == "gpu")


def test_one_warning_tells_of_host_arrays(rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    beside._warned.clear()
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
