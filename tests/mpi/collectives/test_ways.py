"""All ranks of a call go one way, whatever memory, datatypes and counts each of them passes.

The engine of the host stands for the engine of GPUs, so a rank that goes another way than the others waits for them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.session import Session
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.call_forms import FORMS, method_name
from tests.helpers.rigs.device_calls import MAKERS, Engine, call, on_gpu, on_host_engine, require_one_way, values_of
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


def part(n: int, size: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank and the number of its rows: the first ranks have one more."""
    return rank * (n // size) + min(rank, n % size), n // size + (rank < n % size)


@pytest.mark.parametrize("where", MAKERS)
@pytest.mark.parametrize("method", ["Alltoallw", "Ialltoallw", "Alltoallw_init"])
def test_a_matrix_is_split_anew(rig: Rig, engine: Engine, method: str, where: str) -> None:
    """Blocks without elements name another type, and arrays without elements have the address 0."""
    rank, size = rig.rank, rig.size
    for rows, columns in ((1, 7), (3, 3), (2 * size, 5), (7, 1)):
        whole = np.arange(rows * columns, dtype="f").reshape(rows, columns)
        (first, mine), (left, width) = part(rows, size, rank), part(columns, size, rank)
        source = MAKERS[where](rig, whole[first : first + mine])
        target = MAKERS[where](rig, np.full((rows, width), -1, "f"))
        arguments = []
        for array, shape, blocks in (
            (
                source,
                (mine, columns),
                [((mine, n), (0, at)) for at, n in (part(columns, size, r) for r in range(size))],
            ),
            (target, (rows, width), [((n, width), (at, 0)) for at, n in (part(rows, size, r) for r in range(size))]),
        ):
            some = [min(block) > 0 for block, _ in blocks]
            types = [
                MPI.FLOAT.Create_subarray(shape, block, at).Commit() if any_ else MPI.INT
                for (block, at), any_ in zip(blocks, some, strict=True)
            ]
            arguments.append([by_address(array), (list(map(int, some)), [0] * size), types])
        call(rig.comm, method, *arguments)
        assert np.array_equal(values_of(target), whole[:, left : left + width]), (rows, columns)
        for datatype in itertools.chain(arguments[0][2], arguments[1][2]):
            if datatype != MPI.INT:
                datatype.Free()
    require_one_way(engine)


@pytest.mark.parametrize("odd", ["darray", "pair", "empty darray"])
def test_a_rank_may_name_elements_by_types_that_only_it_has(rig: Rig, engine: Engine, odd: str) -> None:
    rank, size = rig.rank, rig.size
    spread = MPI.INT16_T.Create_darray(2, 0, [8], [MPI.DISTRIBUTE_CYCLIC], [1], [2]).Commit()  # every second of 8
    pair = MPI.SHORT_INT
    plain = [MPI.BYTE] * size
    counts = [0 if odd == "empty darray" else 8 if odd == "darray" else 6] * size
    sent, got = on_gpu(rig, np.arange(16 * size, dtype=np.uint8) + rank), on_gpu(rig, np.zeros(16 * size, np.uint8))
    places = [16 * peer for peer in range(size)]
    sends, receives = [sent, (counts, places), plain], [got, (counts, places), plain]
    if rank == size - 1:
        of_rank = [[sent, got][n] for n in range(2)]
        given = [int(odd != "empty darray")] * size
        sends, receives = ([each, (given, places), [pair if odd == "pair" else spread] * size] for each in of_rank)
    rig.comm.Alltoallw(sends, receives)
    expected = np.zeros((size, 16), np.uint8)
    taken: dict[str, list[int]] = {"darray": [0, 1, 4, 5, 8, 9, 12, 13], "pair": [0, 1, 4, 5, 6, 7], "empty darray": []}
    for peer in range(size):
        from_, to = (taken[odd] if r == size - 1 else list(range(counts[0])) for r in (peer, rank))
        data = (np.arange(16 * size, dtype=np.uint8) + peer)[16 * rank : 16 * rank + 16]
        expected[peer, to] = data[from_]
    assert np.array_equal(got.get().reshape(size, 16), expected)
    require_one_way(engine)
    assert engine.calls == 1
    spread.Free()


UNEVEN = ("Allgatherv", "Alltoallv", "Gatherv", "Scatterv", "Reduce_scatter")


class Uneven:
    """A call with uneven counts, in which the ranks of ``empty`` have no data, and its result."""

    def __init__(self, name: str, rig: Rig, empty: set[int]) -> None:
        size, rank = rig.size, rig.rank
        self.name, self.root = name, size - 1
        n = [0 if r in empty else r + 1 for r in range(size)]
        at = [sum(n[:r]) for r in range(size)]
        whole = np.arange(sum(n), dtype=np.int32) * 3
        mine = whole[at[rank] : at[rank] + n[rank]]
        empties = np.zeros(0, np.int32)
        nothing = np.full(sum(n), -1, np.int32)
        self.keywords: dict[str, Any] = {}
        self.counts: list[Any] = [None, None]
        if name == "Allgatherv":
            self.contents, self.counts, self.expected = (mine, nothing), [None, n], whole
        elif name == "Gatherv":
            at_root = rank == self.root
            self.contents = (mine, nothing if at_root else empties)
            self.counts, self.expected = [None, n if at_root else None], whole if at_root else empties
        elif name == "Scatterv":
            at_root = rank == self.root
            self.contents = (whole if at_root else empties, np.full(n[rank], -1, np.int32))
            self.counts, self.expected = [n if at_root else None, None], mine
        elif name == "Reduce_scatter":
            self.contents, self.expected = (
                (whole + rank, np.full(n[rank], -1, np.int32)),
                size * mine + sum(range(size)),
            )
            self.keywords = {"recvcounts": n}
        else:
            out = [n[rank] if n[r] else 0 for r in range(size)]
            into = [n[r] if n[rank] else 0 for r in range(size)]
            self.contents = (np.repeat(np.int32(rank), sum(out)), np.full(sum(into), -1, np.int32))
            self.counts, self.expected = [out, into], np.repeat(np.arange(size, dtype=np.int32), into)
        if name in ("Gatherv", "Scatterv"):
            self.keywords = {"root": self.root}

    def arguments(self, memory: list[Any]) -> list[Any]:
        return [
            [each, counts, MPI.INT32_T] if counts is not None else [each, MPI.INT32_T]
            for each, counts in zip(memory, self.counts, strict=True)
        ]


@pytest.mark.parametrize("where", ["gpu", "host", "host by address", "nowhere"])
@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_without_memory_go_the_way_of_the_others(rig: Rig, engine: Engine, name: str, where: str) -> None:
    size, rank = rig.size, rig.rank
    everybody = set(range(size))
    turns = [everybody] if where == "nowhere" else [{0}, {size - 1}, everybody - {1}]
    for number, (empty, form) in enumerate(itertools.product(turns, FORMS)):
        made = Uneven(name, rig, empty)
        memory = [MAKERS["gpu" if where == "gpu" else "host"](rig, content) for content in made.contents]
        named = [by_address(each) if where != "host" or not values_of(each).size else each for each in memory]
        if (rank + number) % size == 0:
            time.sleep(0.005)
        method = method_name(form, name)
        before = engine.calls
        call(rig.comm, method, *made.arguments(named), **made.keywords)
        assert np.array_equal(values_of(memory[1]), made.expected), (empty, method)
        all_empty = not any(content.size for content in made.contents) and len(empty) == size
        assert all_empty or (engine.calls > before) == (where == "gpu"), (empty, method)
    require_one_way(engine)


def test_turns_of_the_host_and_of_gpus(rig: Rig, engine: Engine) -> None:
    """A rank without data that comes late finds the calls of ranks that are far ahead."""
    size, rank = rig.size, rig.rank
    rng = np.random.default_rng(7)
    calls = [("gpu" if rng.integers(2) else "host", int(rng.integers(size))) for _ in range(60)]
    for where, sender in calls:
        # Only the sender and the next rank have data. On the host MPI lets them go on without the others.
        pair = sender, (sender + 1) % size
        out = [4 * (rank == pair[0] and r == pair[1]) for r in range(size)]
        into = [4 * (rank == pair[1] and r == pair[0]) for r in range(size)]
        sent = MAKERS[where](rig, np.arange(sum(out), dtype=np.float64) + sender)
        got = MAKERS[where](rig, np.zeros(sum(into)))
        if rank == size - 1 and rng.integers(10) == 0:
            time.sleep(0.02)
        # The plan cache recognises None the next time. It must not take the plan of a call on GPUs for a call on the
        # host.
        named = [by_address(each) if values_of(each).size else None for each in (sent, got)]
        rig.comm.Alltoallv([named[0], out, MPI.DOUBLE], [named[1], into, MPI.DOUBLE])
        assert values_of(got).tolist() == [sender + n for n in range(sum(into))]
    require_one_way(engine)
    assert engine.calls == sum(where == "gpu" for where, _ in calls)


@pytest.mark.parametrize("where", MAKERS)
def test_neighbours_without_memory(rig: Rig, where: str) -> None:
    """Rank 0 sends to rank 1. Each has one buffer that lies nowhere, and all other ranks have two."""
    rank = rig.rank
    made: Any = rig.comm.Create_dist_graph_adjacent([0] * (rank == 1), [1] * (rank == 0))
    made.gpu = take_for_gpu(made)
    with on_host_engine(made) as engine:
        names = ["Neighbor_alltoallv", "Neighbor_alltoallw", "Neighbor_alltoall", "Neighbor_allgatherv"]
        # MPI carries out host arrays. Open MPI 5 ends this call of plain mpi4py with MPI_ERR_TRUNCATE, too, if ranks
        # have other numbers of sources than of destinations.
        if where == "host" and MPI.get_vendor()[0] == "Open MPI":
            names.remove("Neighbor_alltoall")
        for name in names:
            for form in FORMS:
                sent = MAKERS[where](rig, np.arange(3.0)[: 3 * (rank == 0)])
                got = MAKERS[where](rig, np.zeros(3 * (rank == 1)))
                named = [[by_address(each), [3] * int(bool(values_of(each).size))] for each in (sent, got)]
                if name == "Neighbor_alltoallw":
                    given = [
                        [memory, (counts, [0] * len(counts)), [MPI.DOUBLE] * len(counts)] for memory, counts in named
                    ]
                elif name == "Neighbor_alltoall":
                    given = [[memory, MPI.DOUBLE] for memory, _ in named]
                else:
                    given = [[memory, counts, MPI.DOUBLE] for memory, counts in named]
                    if name == "Neighbor_allgatherv":
                        given[0] = [named[0][0], MPI.DOUBLE]
                call(made, method_name(form, name), *given)
                assert values_of(got).tolist() == [0.0, 1.0, 2.0][: 3 * (rank == 1)], (name, form)
        require_one_way(engine)
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


def test_an_empty_buffer_fits_every_other_one(rig: Rig, engine: Engine) -> None:
    """With equal counts every rank knows that no rank has data; with one array the other may be nowhere."""
    nothing, some = [NULL, 0, MPI.DOUBLE], on_gpu(rig, np.arange(3.0))
    for each in FORMS:
        for method in ("Allreduce", "Allgather", "Alltoall", "Scan"):
            call(rig.comm, method_name(each, method), nothing, list(nothing))
    rig.comm.Bcast([NULL, MPI.DOUBLE])
    rig.comm.Bcast(some)
    assert some.get().tolist() == [0.0, 1.0, 2.0]
    counts = [3 * (r == 0) for r in range(rig.size)]
    got = on_gpu(rig, np.zeros(3))
    rig.comm.Allgatherv(some if rig.rank == 0 else NULL, [got, counts])
    assert got.get().tolist() == [0.0, 1.0, 2.0]
    require_one_way(engine)
    with pytest.raises(InvalidUsageError, match="the buffer holds 0: pass a larger buffer"):
        rig.comm.Allreduce([NULL, 3, MPI.DOUBLE], np.zeros(3))
