"""The blocks of a rank and of its neighbours that match, and calls of neighbours as all-to-alls between ranks.

test_packed.py has calls with equal blocks and with derived datatypes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.neighborhood import Neighborhood, neighborhood_of, require_symmetric
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.references.simulated_neighbors import OnDevice, Part, exchange

NOBODY = MPI.PROC_NULL


def grid(dims: Sequence[int], periods: Sequence[bool]) -> list[Neighborhood]:
    """The neighbours of all ranks of a Cartesian grid."""
    found = []
    for place in itertools.product(*map(range, dims)):
        ranks = []
        for number, step in itertools.product(range(len(dims)), (-1, 1)):
            beside = place[number] + step
            inside = periods[number] or 0 <= beside < dims[number]
            there = (*place[:number], beside % dims[number], *place[number + 1 :])
            ranks.append(int(np.ravel_multi_index(there, dims)) if inside else NOBODY)
        found.append(Neighborhood(tuple(ranks), tuple(ranks), crossed=True))
    return found


def graph(edges: Sequence[tuple[int, int]], size: int) -> list[Neighborhood]:
    """The neighbours of all ranks of a graph, in the order of its edges."""
    return [
        Neighborhood(tuple(a for a, b in edges if b == rank), tuple(b for a, b in edges if a == rank))
        for rank in range(size)
    ]


def matched(neighbors: Sequence[Neighborhood]) -> dict[tuple[int, int], tuple[int, int]]:
    """The rank and block that each rank and block of a receive buffer gets."""
    size, found = len(neighbors), {}
    for a, b in itertools.product(range(size), repeat=2):
        pairs = zip(neighbors[a].outgoing(size)[b], neighbors[b].incoming(size)[a], strict=True)
        found.update({(b, received): (a, sent) for sent, received in pairs})
    return found


@pytest.mark.parametrize("dims", [[1], [2], [3], [1, 1], [2, 1], [2, 2], [3, 2], [1, 2, 3]])
def test_what_leaves_in_one_direction_arrives_from_the_other(dims: list[int]) -> None:
    for periods in itertools.product((False, True), repeat=len(dims)):
        for (_, received), (_, sent) in matched(grid(dims, periods)).items():
            assert received // 2 == sent // 2 and received != sent


def test_no_rank_gets_the_blocks_beyond_the_edge() -> None:
    assert matched(grid([3], [False])) == {(0, 1): (1, 0), (1, 0): (0, 1), (1, 1): (2, 0), (2, 0): (1, 1)}
    assert matched(grid([1], [False])) == {}


EDGES = st.integers(1, 4).flatmap(
    lambda size: st.tuples(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=12), st.just(size))
)


@given(EDGES)
def test_each_edge_of_a_graph_is_one_match(edges_and_size: tuple[list[tuple[int, int]], int]) -> None:
    edges, size = edges_and_size
    neighbors = graph(edges, size)
    found = matched(neighbors)
    assert Counter((a, b) for (b, _), (a, _) in found.items()) == Counter(edges)
    for a, b in itertools.product(range(size), repeat=2):  # the first of several edges of one rank is the other's first
        sent = [block for (to, _), (of, block) in sorted(found.items()) if (of, to) == (a, b)]
        assert sent == sorted(sent)


def test_the_neighbours_that_mpi_names() -> None:
    alone = MPI.COMM_SELF
    made: list[tuple[MPI.Topocomm, Neighborhood]] = [
        (alone.Create_cart([1, 1], [True, False]), Neighborhood((0, 0, NOBODY, NOBODY), (0, 0, NOBODY, NOBODY))),
        (alone.Create_graph([2], [0, 0]), Neighborhood((0, 0), (0, 0))),
        (alone.Create_dist_graph_adjacent([0, 0, 0], [0, 0, 0]), Neighborhood((0, 0, 0), (0, 0, 0))),
        (alone.Create_dist_graph_adjacent([], []), Neighborhood((), ())),
    ]
    for comm, expected in made:
        found = neighborhood_of(comm)
        assert (found.sources, found.destinations) == (expected.sources, expected.destinations)
        blocks = len(found.sources)
        sent, received = np.arange(blocks), np.full(blocks, -1)
        comm.Neighbor_alltoall(sent, received)
        of_mpi = {(0, block): (0, int(value)) for block, value in enumerate(received) if value >= 0}
        assert matched([found]) == of_mpi
        comm.Free()


def call(operation: str, buffers: Sequence[Any], neighbors: Neighborhood) -> Call:
    """The call of rank 0 of 4."""
    return Part.of(operation, buffers, 0, 4, neighbors).call


def test_blocks_stay_in_place_if_the_blocks_for_each_rank_are_one_run() -> None:
    apart, often = Neighborhood((1, 2), (1, 2)), Neighborhood((1, 1), (1, 1))
    both = OnDevice(np.zeros(6)), OnDevice(np.zeros(6))
    assert call("Neighbor_alltoall", both, apart).packed is None
    assert call("Neighbor_alltoall", both, often).packed is None  # the two blocks follow each other
    assert call("Neighbor_alltoall", both, Neighborhood((1, 1), (1, 1), crossed=True)).packed is not None
    of_places = [[array, [2, 2], [4, 0], MPI.DOUBLE] for array in both]
    assert call("Neighbor_alltoallv", of_places, apart).packed is None
    assert call("Neighbor_alltoallv", of_places, often).packed is not None
    of_types = [[array, [1, 1], [0, 8], [MPI.DOUBLE] * 2] for array in both]
    assert call("Neighbor_alltoallw", of_types, apart).packed is None


def test_an_all_gather_packs_its_block_once() -> None:
    column = MPI.DOUBLE.Create_vector(32, 1, 2).Commit()
    packed = call(
        "Neighbor_allgather",
        ([OnDevice(np.zeros(64)), 1, column], OnDevice(np.zeros(96))),
        Neighborhood((1, 2, 3), (1, 2, 3)),
    ).without_gaps
    assert packed is not None
    assert len(packed.before) == 1 and not packed.after and packed.nbytes == 256
    column.Free()


def test_errors_speak_of_neighbours() -> None:
    neighbors = Neighborhood((1, 2), (1, 2))
    array = OnDevice(np.zeros(6))
    for operation, buffers, text in (
        ("Neighbor_alltoall", [OnDevice(np.zeros(5)), array], "5 elements are no multiple of 2, .* each neighbour"),
        ("Neighbor_alltoallv", [[array, [1, 2, 3]], array], "3 counts for 2 neighbours: pass one for each neighbour"),
        (
            "Neighbor_alltoallw",
            [[array, [1] * 2, [0] * 2, [MPI.DOUBLE]], [array, [MPI.DOUBLE] * 2]],
            "1 datatypes for 2 neighbours: pass one for each neighbour",
        ),
        ("Neighbor_alltoall", [MPI.IN_PLACE, array], "sendbuf=MPI.IN_PLACE.* pass a buffer"),
        ("Neighbor_allgather", [OnDevice(np.zeros(3)), MPI.IN_PLACE], "recvbuf=MPI.IN_PLACE.* pass a buffer"),
        ("Neighbor_alltoall", [array, array], "overlap"),
    ):
        with pytest.raises(InvalidUsageError, match=text):
            call(operation, buffers, neighbors)
    with pytest.raises(TypeError, match="sendbuf is None"):
        call("Neighbor_alltoall", [None, array], neighbors)


def test_mpi_gets_host_arrays_of_types_that_it_lacks_as_bytes() -> None:
    array = np.arange(6).astype(pytest.importorskip("ml_dtypes").bfloat16)
    neighbors = Neighborhood((1, 2), (1, 2))
    for operation, blocks in (("Neighbor_alltoall", []), ("Neighbor_alltoallv", [[6, 6], [0, 6]])):
        given = Call(OPERATIONS[operation], Arguments(array, array.copy()), 0, 4, neighborhood=neighbors).arguments
        data, *rest, datatype = given.send
        assert bytes(data) == array.tobytes() and rest == blocks and datatype == MPI.BYTE


def test_a_rank_that_does_not_fit_itself_is_told() -> None:
    crossed = Neighborhood((0, 0), (0, 0), crossed=True)
    send, receive = OnDevice(np.zeros(6)), OnDevice(np.zeros(6))
    call("Neighbor_alltoallv", ([send, [2, 3]], [receive, [3, 2]]), crossed)
    with pytest.raises(InvalidUsageError, match=r"its own neighbour, .* \[16, 24\] bytes do not fit .* \[24, 16\]"):
        call("Neighbor_alltoallv", ([send, [2, 3]], [receive, [2, 3]]), crossed)


def test_two_ranks_that_disagree_on_blocks_of_the_same_bytes_notice() -> None:
    ring = grid([2], [True])
    for expected, text in (([2, 1], ""), ([1, 2], "other blocks"), ([2, 2], "sends 24 bytes where"), ([3, 0], "other")):
        parts = [
            Part.of(
                "Neighbor_alltoallv",
                ([OnDevice(np.zeros(3)), [1, 2]], [OnDevice(np.zeros(4)), expected if rank else [2, 1]]),
                rank,
                2,
                each,
            )
            for rank, each in enumerate(ring)
        ]
        with pytest.raises(AssertionError, match=text) if text else contextlib.nullcontext():
            exchange(parts)


def test_neighbours_may_have_different_types() -> None:
    """Each pair of ranks agrees on bytes; a rank without data may pass any buffer."""
    neighbors = graph([(0, 1), (1, 0)], 3)
    got = [OnDevice(np.zeros(2, np.int64)), OnDevice(np.zeros(4, np.float32)), OnDevice(np.zeros(0, np.int8))]
    given = [OnDevice(np.ones(4, np.float32)), OnDevice(np.arange(2)), OnDevice(np.zeros(3))]
    parts = [Part.of("Neighbor_alltoall", (given[r], got[r]), r, 3, neighbors[r]) for r in range(3)]
    assert len({part.call.signature for part in parts}) == 1
    exchange(parts)
    assert got[0].memory.tolist() == [0, 1] and got[1].memory.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("index", "edges", "text"),
    [
        ([1, 1], [1], "rank 1 1 times as a neighbour of rank 0, and rank 0 0 times as a neighbour of rank 1"),
        ([2, 3], [1, 1, 0], "rank 1 2 times as a neighbour of rank 0, and rank 0 1 times as a neighbour of rank 1"),
    ],
)
def test_a_graph_whose_neighbours_do_not_match_is_refused(index: list[int], edges: list[int], text: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"^the graph names {text}: name both equally often"):
        require_symmetric(index, edges)


@pytest.mark.parametrize(
    ("index", "edges"), [([], []), ([0, 0], []), ([1, 1], [0]), ([1, 2], [1, 0]), ([3, 5], [1, 1, 0, 0, 0])]
)
def test_a_graph_whose_neighbours_match_is_taken(index: list[int], edges: list[int]) -> None:
    require_symmetric(index, edges)
