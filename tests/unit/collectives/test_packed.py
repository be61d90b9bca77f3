"""Calls on derived datatypes, of which each rank packs only buffers with gaps in a block; calls of neighbours."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.neighborhood import Neighborhood, neighborhood_of, require_symmetric
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.arguments import Span
from tests.helpers.references.simulated_neighbors import OnDevice, Part, exchange

ELEMENT, ELEMENTS = MPI.INT16_T, np.dtype(np.int16)
UNIT = 6  # the basic elements of each of the datatypes below
NBYTES = 2 * UNIT
MOVEMENTS = [row.name for row in OPERATIONS.values() if not row.reduces]
Indices = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def datatypes() -> Iterator[dict[str, MPI.Datatype]]:
    six = ELEMENT.Create_contiguous(UNIT)
    three = ELEMENT.Create_contiguous(3)
    made = {
        "contiguous": six,
        "contiguous of contiguous": three.Create_contiguous(2),
        "vector without gaps": ELEMENT.Create_vector(2, 3, 3),
        "struct without gaps": MPI.Datatype.Create_struct([2, 4], [0, 4], [ELEMENT, ELEMENT]),
        "resized without gaps": six.Create_resized(0, NBYTES),
        "list without gaps": three.Create_hindexed_block(1, [0, 6]),
        "run at an offset": ELEMENT.Create_indexed([UNIT], [2]),
        "extent of no whole elements": six.Create_resized(0, 15),
        "gap after the element": six.Create_resized(0, 16),
        "gaps": ELEMENT.Create_vector(UNIT, 1, 2),
        "another order": three.Create_hindexed_block(1, [6, 0]),
    }
    for datatype in made.values():
        datatype.Commit()
    yield {"plain": ELEMENT, **made}
    for datatype in (*made.values(), three):
        datatype.Free()


def count_of(datatype: MPI.Datatype, units: int) -> int:
    return units * (UNIT if datatype == ELEMENT else 1)


def bytes_of(datatype: MPI.Datatype, units: int) -> Indices:
    """The places of the bytes that MPI itself takes for so many units, in MPI's order."""
    room = np.arange(40 * NBYTES)
    parts = []
    for digits in (room & 255, room >> 8):
        packed = np.zeros(units * NBYTES, np.uint8)
        sent = [digits.astype(np.uint8), count_of(datatype, units), datatype]
        MPI.COMM_SELF.Sendrecv(sent, 0, 0, [packed, units * UNIT, ELEMENT], 0, 0)
        parts.append(packed.astype(np.int64))
    return parts[0] + (parts[1] << 8)


def is_contiguous(places: Indices) -> bool:
    return bool((np.diff(places) == 1).all())


class Buffer:
    """An argument of a call with blocks of so many ``units``, in ``datatypes``: one, or one for each block."""

    def __init__(self, shape: str, units: list[int], datatypes: list[MPI.Datatype], content: int) -> None:
        counts = [count_of(datatype, n) for datatype, n in zip(datatypes, units, strict=True)]
        extents = [datatype.extent for datatype in datatypes]
        self.blocks: list[Indices] = []
        """The places of the bytes of each block."""
        starts, end = [], 0
        for datatype, n, count in zip(datatypes, units, counts, strict=True):
            if shape in ("vector", "typed"):
                end += datatype.extent  # a gap before each block
            starts.append(end)
            self.blocks.append(end + bytes_of(datatype, n))
            end += count * datatype.extent
        self.array = OnDevice((np.arange(end + 64) * 7 + content).astype(np.uint8))
        places = [start // extent for start, extent in zip(starts, extents, strict=True)]
        self.spec: list[Any] = [self.array, counts[0], datatypes[0]]
        if shape == "vector":
            self.spec = [self.array, counts, places, datatypes[0]]
        elif shape == "typed":
            self.spec = [self.array, counts, starts, datatypes]
        self.stays = all(map(is_contiguous, self.blocks))

    def bytes(self, block: int) -> npt.NDArray[np.uint8]:
        return self.array.memory[self.blocks[block]]


@pytest.mark.parametrize("name", MOVEMENTS)
@settings(max_examples=50)
@given(draw=st.randoms(use_true_random=False, note_method_calls=True))
def test_ranks_with_gaps_meet_ranks_without(datatypes: dict[str, MPI.Datatype], name: str, draw: Random) -> None:
    row, strided, in_place = OPERATIONS[name], draw.choice([False, True]), draw.choice([False, True])
    size = draw.randint(2, 3)
    root = draw.randrange(size)
    in_place = in_place and row.rooted == "" and not row.of_neighbors
    everybody = Neighborhood(tuple(range(size)), tuple(range(size))) if row.of_neighbors else None
    same, *of_rank = (draw.randint(0, 2) for _ in range(1 + size))
    of_pair = [[draw.randint(0, 2) for _ in range(size)] for _ in range(size)]
    if in_place:
        of_pair = [[of_pair[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]  # both ways alike

    def between(source: int, target: int) -> int:
        """The units from one rank to another."""
        if not {"vector", "typed"} & {row.send, row.receive}:
            return same
        if "one" in (row.send, row.receive):
            return of_rank[source if row.send == "one" else target]
        return of_pair[source][target]

    def buffer(shape: str, each: list[int], content: int) -> Buffer:
        names = [*datatypes]
        number = len(each) if shape == "typed" else 1
        kinds = [datatypes[draw.choice(names)] for _ in range(number)]
        return Buffer(shape, each, kinds if shape == "typed" else kinds * len(each), content)

    sends: list[Buffer | None] = []
    receives: list[Buffer | None] = []
    parts = []
    for rank in range(size):
        peers = range(size)
        send = receive = None
        if row.rooted == "bcast":
            receive = buffer("one", [same], rank)
        else:
            to, of = [between(rank, peer) for peer in peers], [between(peer, rank) for peer in peers]
            if not in_place and (row.rooted != "send" or rank == root):
                send = buffer(row.send, [to[rank if row.rooted == "" else root]] if row.send == "one" else to, rank)
            if row.rooted != "receive" or rank == root:
                receive = buffer(row.receive, [of[root]] if row.receive == "one" else of, 100 + rank)
        given = MPI.IN_PLACE if in_place else send and send.spec, receive and receive.spec
        call = Call(row, Arguments(*given, None, root), rank, size, neighborhood=everybody)
        parts.append(Part(call, strided=strided))
        sends.append(send)
        receives.append(receive)
        stays = strided or all(each.stays for each in (send, receive) if each is not None)
        assert row.of_neighbors or (parts[-1].blocks.nbytes == 0) == stays

    def sent(source: int, target: int) -> npt.NDArray[np.uint8]:
        """The bytes from one rank to another."""
        given = sends[source]
        if given is None:
            given = receives[source]
            assert given is not None
            return given.bytes(0 if row.rooted else source if row.send == "one" else target)
        return given.bytes(0 if row.send == "one" else target)

    expected = []
    for rank, receive in enumerate(receives):
        if receive is None:
            continue
        memory = receive.array.memory.copy()
        sources = [root] if row.rooted in ("send", "bcast") else range(size)
        for source in sources:
            memory[receive.blocks[0 if row.receive == "one" else source]] = sent(source, rank)
        expected.append((receive, memory))
    exchange(parts)
    for receive, memory in expected:
        np.testing.assert_array_equal(receive.array.memory, memory)


@pytest.fixture
def arrays() -> tuple[OnDevice, OnDevice]:
    """Memory of a rank that sends two units to each of two ranks, also with gaps."""
    return OnDevice(np.zeros(40, np.int16)), OnDevice(np.zeros(80, np.int16))


def call_of(send: Any, receive: Any) -> Call:
    return Call(OPERATIONS["Allgather"], Arguments(send, receive), 0, 2)


def test_a_buffer_without_gaps_is_an_array_of_its_elements(
    datatypes: dict[str, MPI.Datatype], arrays: tuple[OnDevice, OnDevice]
) -> None:
    send, receive = arrays
    names = [name for name, datatype in datatypes.items() if name != "plain" and is_contiguous(bytes_of(datatype, 2))]
    assert len(names) == 7
    for name in names:
        offset = 4 if name == "run at an offset" else 0
        call = call_of([send, 2, datatypes[name]], [receive, 2, datatypes[name]])
        assert not call.blocks.before and not call.blocks.after and call.blocks.nbytes == 0
        at, first, nbytes = send.memory.ctypes.data, receive.memory.ctypes.data, 2 * UNIT * ELEMENTS.itemsize
        assert call.blocks.sends == [Span(at + offset, nbytes)]
        assert call.blocks.receives == [Span(first + offset, nbytes), Span(first + offset + nbytes, nbytes)]


def test_ranks_agree_about_output_of_which_some_of_them_have_derived_datatypes(
    datatypes: dict[str, MPI.Datatype], arrays: tuple[OnDevice, OnDevice]
) -> None:
    """A rank that packs its output has none into which peers could store, and its peers do not know that."""
    send, receive = arrays
    sent, output = [send, 2 * UNIT, ELEMENT], [receive, 2 * UNIT, ELEMENT]
    of_plain = call_of(sent, output).common_output
    assert of_plain is not None
    for name in ("contiguous", "gaps"):
        assert call_of(sent, [receive, 2, datatypes[name]]).common_output is None
        common = call_of([send, 2, datatypes[name]], output).common_output
        assert common is not None
        assert (common.pointer, common.nbytes) == (of_plain.pointer, of_plain.nbytes)


# Neighbours.

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
    crossed = Neighborhood((1, 1), (1, 1), crossed=True)
    of_places = [[array, [2, 2], [4, 0], MPI.DOUBLE] for array in both]
    of_types = [[array, [1, 1], [0, 8], [MPI.DOUBLE] * 2] for array in both]
    for operation, buffers, neighbors, stays in (
        ("Neighbor_alltoall", both, apart, True),
        ("Neighbor_alltoall", both, often, True),  # the two blocks follow each other
        ("Neighbor_alltoall", both, crossed, False),
        ("Neighbor_alltoallv", of_places, apart, True),
        ("Neighbor_alltoallv", of_places, often, False),
        ("Neighbor_alltoallw", of_types, apart, True),
    ):
        assert (call(operation, buffers, neighbors).packed_blocks.nbytes == 0) == stays


def test_an_all_gather_packs_its_block_once() -> None:
    column, receive = MPI.DOUBLE.Create_vector(32, 1, 2).Commit(), OnDevice(np.zeros(96))
    send, three = [OnDevice(np.zeros(64)), 1, column], Neighborhood((1, 2, 3), (1, 2, 3))
    packed = call("Neighbor_allgather", (send, receive), three).packed_blocks
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
        parts = []
        for rank, counts in enumerate(([2, 1], expected)):
            buffers = [OnDevice(np.zeros(3)), [1, 2]], [OnDevice(np.zeros(4)), counts]
            parts.append(Part.of("Neighbor_alltoallv", buffers, rank, 2, ring[rank]))
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
        *(([], [], ""), ([0, 0], [], ""), ([1, 1], [0], ""), ([1, 2], [1, 0], ""), ([3, 5], [1, 1, 0, 0, 0], "")),
    ],
)
def test_a_graph_whose_neighbours_do_not_match_is_refused(index: list[int], edges: list[int], text: str) -> None:
    refused = pytest.raises(InvalidUsageError, match=f"^the graph names {text}: name both equally often")
    with refused if text else contextlib.nullcontext():
        require_symmetric(index, edges)
