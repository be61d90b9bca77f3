"""Calls on derived datatypes, of which each rank packs only buffers with gaps in a block."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import OPERATIONS
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


def is_run(places: Indices) -> bool:
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
        whole = [np.concatenate(self.blocks)] if shape in ("one", "blocks") else self.blocks
        self.stays = all(map(is_run, whole))

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
        packed, buffers = parts[-1].packed, [each for each in (send, receive) if each is not None]
        stays = strided or all(each.stays for each in buffers)
        assert row.of_neighbors or (packed is None or packed.nbytes == 0) == stays

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
    names = [name for name, datatype in datatypes.items() if name != "plain" and is_run(bytes_of(datatype, 2))]
    assert len(names) == 7
    for name in names:
        offset = 4 if name == "run at an offset" else 0
        call = call_of([send, 2, datatypes[name]], [receive, 2, datatypes[name]])
        assert call.packed is not None and not call.packed.before and not call.packed.after
        assert call.scratch_nbytes == 0
        assert [(each.pointer, each.dtype, each.total) for each in call.operands] == [
            (send.memory.ctypes.data + offset, ELEMENTS, 2 * UNIT),
            (receive.memory.ctypes.data + offset, ELEMENTS, 4 * UNIT),
        ]


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
