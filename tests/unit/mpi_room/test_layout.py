"""Layouts of derived datatypes, against the packing of MPI's messages."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.packed import PackJob, table_of_blocks, table_of_element, table_of_jobs
from mpicomm.kernels.packing import ENTRY_NBYTES
from mpicomm.mpi.layout import DatatypeLayout, concat, layout_of
from mpicomm.mpi.regions import Region, joined
from mpicomm.windows.steps import pack_on_host
from tests.helpers.references.reference_packing import pack, region, runs_of, unpack

_NAMED = (MPI.BYTE, MPI.INT16_T, MPI.FLOAT, MPI.DOUBLE, MPI.C_DOUBLE_COMPLEX)


_KINDS = ("dup", "contiguous", "vector", "hvector", "indexed", "block", "hblock", "struct", "structs", "subarray")


@st.composite
def _datatypes(draw: st.DrawFn, depth: int) -> MPI.Datatype:
    """Draw a datatype whose elements do not overlap, so that it can be unpacked."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(_NAMED)).Dup()
    base = draw(_datatypes(depth - 1))
    low, extent = base.Get_extent()
    true_low, true_extent = base.Get_true_extent()
    # The distance at which elements do not overlap, in bytes and in extents.
    span = max(true_low + true_extent, low + extent) - min(true_low, low)
    apart = -(-span // extent) if extent > 0 else 1
    kind = draw(st.sampled_from(_KINDS))
    count, length = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    backwards = draw(st.booleans())
    if apart > 1 and kind not in ("dup", "hvector", "hblock", "struct", "structs"):
        kind = "dup"
    if kind == "contiguous":
        made = base.Create_contiguous(count)
    elif kind == "vector":
        # MPICH 5 divides by zero when it moves a list of structures with a vector of empty blocks.
        length = max(length, 1)
        stride = length + draw(st.integers(0, 2))
        made = base.Create_vector(count, length, -stride if backwards else stride)
    elif kind == "hvector":
        stride = span + draw(st.integers(0, 9))
        made = base.Create_hvector(count, 1, -stride if backwards else stride)
    elif kind == "indexed":
        lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        places = [sum(lengths[:n]) + 2 * n for n in range(len(lengths))]
        made = base.Create_indexed(lengths, places)
    elif kind == "block":
        # Blocks of three elements may touch each other.
        places = draw(st.permutations(range(draw(st.sampled_from((4, 9, 40))))))
        made = base.Create_indexed_block(max(length, 1), [3 * place for place in places])
    elif kind == "hblock":
        places = draw(st.permutations(range(draw(st.sampled_from((3, 20))))))
        apart_nbytes = span + draw(st.integers(0, 9))
        made = base.Create_hindexed_block(1, [apart_nbytes * place for place in places])
    elif kind == "structs":
        other = draw(st.sampled_from(_NAMED))
        # The last field may touch the first one of the next structure.
        gap = draw(st.integers(0, 3))
        second = span + draw(st.integers(0, 3))
        fields = MPI.Datatype.Create_struct([1, length], [-min(true_low, low), second], [base, other])
        structure = fields.Create_resized(0, second + length * other.size + gap)
        made = structure.Create_contiguous(draw(st.sampled_from((2, 3, 30))))
        fields.Free()
        structure.Free()
    elif kind == "struct":
        other = draw(st.sampled_from(_NAMED))
        made = MPI.Datatype.Create_struct([1, length], [-min(true_low, low), span + 3], [base, other])
    elif kind == "subarray":
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        part = [draw(st.integers(1, size)) for size in sizes]
        starts = [draw(st.integers(0, size - taken)) for size, taken in zip(sizes, part, strict=True)]
        made = base.Create_subarray(sizes, part, starts, draw(st.sampled_from((MPI.ORDER_C, MPI.ORDER_FORTRAN))))
    else:
        made = base.Create_resized(min(true_low, low), span + draw(st.integers(0, 5)))
    base.Free()
    return made


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_datatypes(4), st.integers(0, 3))
def test_packs_as_mpi_does(datatype: MPI.Datatype, count: int) -> None:
    check(datatype, count)


# The parts of these datatypes are not freed.
SPECIAL = {
    "a list of a list and a float": lambda: MPI.Datatype.Create_struct(
        [1, 1], [0, 20], [MPI.INT16_T.Create_indexed_block(1, [0, 5, 2]), MPI.FLOAT]
    ).Create_hindexed_block(1, [0, 300, 100]),
    "long blocks of several lengths": lambda: MPI.INT16_T.Create_indexed([100, 100, 301, 301], [0, 200, 500, 900]),
    "a double in each element, and floats elsewhere": lambda: MPI.Datatype.Create_struct(
        [1, 1], [0, 800], [MPI.DOUBLE, MPI.FLOAT]
    ).Create_resized(0, 8),
    "structures and a tail": lambda: MPI.Datatype.Create_struct(
        [3, 1],
        [0, 5000],
        [MPI.Datatype.Create_struct([1, 1], [0, 20], [MPI.DOUBLE, MPI.FLOAT]).Create_resized(0, 32), MPI.FLOAT],
    ).Create_resized(0, 96),
    "a vector of empty blocks": lambda: MPI.Datatype.Create_struct(
        [1, 2], [0, 47], [MPI.DOUBLE.Create_vector(3, 0, 2), MPI.FLOAT]
    ),
    "backwards": lambda: MPI.SHORT.Create_hvector(4, 1, -6),
    "a pair with a gap": lambda: MPI.SHORT_INT.Dup(),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("count", [1, 2, 20])
def test_packs_special_datatypes_as_mpi_does(name: str, count: int) -> None:
    check(SPECIAL[name](), count)


def test_runs_that_touch_only_in_memory_stay_two_runs() -> None:
    runs = [Region(0, (), 4, 0), Region(4, (), 4, 8)]
    assert places(joined(runs)) == places(runs)


def places(regions: Sequence[Region]) -> list[tuple[int, int, int]]:
    return list(runs_of(table_of_jobs([PackJob(0, DatatypeLayout(tuple(regions), 0, None), 0)])))


def check(datatype: MPI.Datatype, count: int) -> None:
    """Compare with MPI; free the datatype."""
    datatype.Commit()
    one = layout_of(datatype)
    assert one is not None
    assert one.extent == datatype.extent
    assert one.nbytes == datatype.size
    if one.nbytes:
        low, extent = datatype.Get_true_extent()
        assert low <= one.begin  # MPI counts blocks without elements, too
        assert one.end <= low + extent
    layout = one.repeated(count)
    at = max(0, -layout.begin)
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 256, at + max(layout.end, 0) + 8, np.uint8)
    packed = np.zeros(layout.nbytes, np.uint8)
    address = MPI.memory.fromaddress(memory.ctypes.data + at, 0)
    if count and layout.nbytes:
        _move([address, count, datatype], [packed, packed.size, MPI.PACKED])
        np.testing.assert_array_equal(pack(layout, memory, at), packed)
        by_table = np.zeros(layout.nbytes, np.uint8)
        for start, place, nbytes in runs_of(table_of_jobs([PackJob(at, layout, 0)])):
            by_table[place : place + nbytes] = memory[start : start + nbytes]
        np.testing.assert_array_equal(by_table, packed)
        by_steps = np.zeros(layout.nbytes, np.uint8)
        pack_on_host(layout, memory.ctypes.data + at, by_steps.ctypes.data)
        np.testing.assert_array_equal(by_steps, packed)
        ours, theirs = rng.integers(0, 256, (2, memory.size), np.uint8)
        theirs[:], by_steps = ours, ours.copy()
        unpack(layout, packed, ours, at)
        pack_on_host(layout, by_steps.ctypes.data + at, packed.ctypes.data, unpacks=True)
        there = MPI.memory.fromaddress(theirs.ctypes.data + at, 0)
        _move([packed, packed.size, MPI.PACKED], [there, count, datatype])
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(by_steps, theirs)
    datatype.Free()


def _move(source: Any, target: Any) -> None:
    """Let MPI copy elements from one layout to another."""
    MPI.COMM_SELF.Sendrecv(source, 0, 0, target, 0, 0)


def test_the_type_of_all_elements() -> None:
    same = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.DOUBLE, MPI.DOUBLE])
    mixed = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.INT, MPI.DOUBLE])
    for datatype, dtype in ((same, np.dtype(float)), (mixed, None)):
        layout = layout_of(datatype)
        assert layout is not None
        assert layout.dtype == dtype if dtype is not None else layout.dtype is None
        datatype.Free()


def test_a_layout_is_made_once_and_goes_with_its_datatype() -> None:
    """MPI gives the handle of a freed datatype to a later one."""
    datatypes, layouts = [MPI.INT.Create_vector(3, 1, 2)], list[weakref.ref[DatatypeLayout]]()
    first = layout_of(datatypes[0])
    for stride in range(3, 100):
        datatypes.append(MPI.INT.Create_vector(3, 1, stride))
        layout = layout_of(datatypes[-1])
        assert layout is not None and layout.regions == (region(0, ((3, 4 * stride),), 4),)
        layouts.append(weakref.ref(layout))
        datatypes[-1].Free()
    assert layout_of(datatypes[0]) is first
    datatypes[0].Free()
    assert sum(layout() is not None for layout in layouts) <= 33
    assert layout_of(datatypes[-1]) is None


@pytest.mark.parametrize("order", [MPI.ORDER_C, MPI.ORDER_FORTRAN])
@pytest.mark.parametrize("element", [MPI.INT16_T, MPI.SHORT_INT], ids=["numbers", "pairs"])
def test_distributed_arrays_are_packed_as_mpi_does(order: int, element: MPI.Datatype) -> None:
    """Only MPI has their rules, and the elements of a pair have a gap."""
    spread = [MPI.DISTRIBUTE_CYCLIC, MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_NONE]
    for rank in range(4):
        array = element.Create_darray(4, rank, [7, 6, 3], spread, [2, 3, MPI.DISTRIBUTE_DFLT_DARG], [2, 2, 1], order)
        layout = layout_of(array)
        assert layout is not None and layout.dtype == (np.int16 if element == MPI.INT16_T else None)
        for count in (1, 2):
            check(array.Dup(), count)
        array.Free()


def test_a_datatype_without_elements_has_no_regions_and_no_datatype_no_layout() -> None:
    array = MPI.INT.Create_darray(3, 2, [2], [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [3])
    assert _layout(array).regions == ()
    assert layout_of(MPI.DATATYPE_NULL) is None


_CUBE = [10, 20, 30]


def _layout(datatype: MPI.Datatype, count: int = 1) -> DatatypeLayout:
    layout = layout_of(datatype)
    assert layout is not None
    datatype.Free()
    return layout.repeated(count)


def _irregular(count: int) -> list[int]:
    places: list[int] = np.cumsum(np.random.default_rng(1).integers(2, 9, count)).tolist()
    return places


def _of(part: MPI.Datatype, make: str, *arguments: Any) -> MPI.Datatype:
    made: MPI.Datatype = getattr(part, f"Create_{make}")(*arguments)
    part.Free()
    return made


def _structure() -> MPI.Datatype:
    return _of(MPI.Datatype.Create_struct([1, 1], [0, 16], [MPI.DOUBLE, MPI.FLOAT]), "resized", 0, 32)


F, D = MPI.FLOAT, MPI.DOUBLE
REGIONS: list[tuple[Any, ...]] = [
    ("part of an array", lambda: D.Create_subarray(_CUBE, [4, 5, 6], [1, 2, 3]), 1,
     region(8 * (600 + 60 + 3), ((4, 4800), (5, 240)), 48)),
    ("rows of an array", lambda: D.Create_subarray(_CUBE, [10, 5, 30], [0, 2, 0]), 1,
     region(8 * 60, ((10, 4800),), 1200)),
    ("planes of an array", lambda: D.Create_subarray(_CUBE, [2, 20, 30], [1, 0, 0]), 1, region(4800, (), 9600)),
    ("vector without gaps", lambda: F.Create_vector(5, 2, 2), 1, region(0, (), 40)),
    ("vector with gaps", lambda: F.Create_vector(5, 1, 2), 1, region(0, ((5, 8),), 4)),
    ("blocks at equal distances", lambda: F.Create_indexed([1, 1, 1], [0, 3, 6]), 1, region(0, ((3, 12),), 4)),
    ("elements without gaps", lambda: F.Create_resized(0, 4), 7, region(0, (), 28)),
    ("elements with gaps", lambda: F.Create_resized(0, 8), 7, region(0, ((7, 8),), 4)),
    # equal blocks at irregular places are a list
    ("listed", lambda: F.Create_indexed_block(2, [9, 0, 5]), 1, region(36, ([0, -36, -16],), 8)),
    ("listed by bytes", lambda: F.Create_hindexed_block(1, [0, 5, 30]), 1, region(0, ([0, 5, 30],), 4)),
    ("equal lengths", lambda: F.Create_indexed([3, 3, 3], [0, 4, 9]), 1, region(0, ([0, 16, 36],), 12)),
    ("listed rows", lambda: _of(F.Create_vector(3, 1, 2), "hindexed_block", 1, [0, 50, 300]), 1,
     region(0, ([0, 50, 300], (3, 8)), 4)),
    ("list in a loop", lambda: _of(F.Create_indexed_block(1, [0, 5, 2]), "resized", 0, 64), 9,
     region(0, ((9, 64), [0, 20, 8]), 4)),
    ("touching blocks", lambda: F.Create_indexed_block(2, [0, 2, 4]), 1, region(0, (), 24)),
    ("touching pairs", lambda: F.Create_indexed_block(1, [0, 1, 8, 9, 11, 12]), 1, region(0, ([0, 32, 44],), 8)),
    # blocks of many lengths are cut to one length if they are short, and stay whole if they are long
    ("short blocks", lambda: D.Create_indexed([1, 3, 2], [0, 3, 9]), 1, region(0, ([0, 24, 32, 40, 72, 80],), 8)),
    ("long blocks", lambda: D.Create_indexed([100, 301, 200], [0, 300, 900]), 1,
     region(0, (), 800), region(2400, (), 2408, 800), region(7200, (), 1600, 3208)),
    # each field of a structure is a region
    ("structures", _structure, 1000,
     region(0, ((1000, 32),), 8, 0, (12,)), region(16, ((1000, 32),), 4, 8, (12,))),
    ("arrays of structures", lambda: _of(_structure(), "contiguous", 10), 100,
     region(0, ((1000, 32),), 8, 0, (12,)), region(16, ((1000, 32),), 4, 8, (12,))),
    ("rows of structures", lambda: _of(_structure(), "vector", 5, 2, 3), 1,
     region(0, ((5, 96), (2, 32)), 8, 0, (24, 12)), region(16, ((5, 96), (2, 32)), 4, 8, (24, 12))),
    ("listed structures", lambda: _of(_structure(), "indexed_block", 1, [0, 5, 2]), 1,
     region(0, ([0, 160, 64],), 8, 0, (12,)), region(16, ([0, 160, 64],), 4, 8, (12,))),
]  # fmt: skip


@pytest.mark.parametrize("row", REGIONS, ids=[row[0] for row in REGIONS])
def test_the_regions_of_a_datatype(row: tuple[Any, ...]) -> None:
    _, make, count, *expected = row
    assert [*_layout(make(), count).regions] == expected


def test_long_lists_in_a_list_are_regions_with_one_list_in_the_table() -> None:
    inner = MPI.FLOAT.Create_indexed_block(1, _irregular(1000))
    layout = _layout(_of(inner, "hindexed_block", 1, [0, 60000, 30000]))
    assert len(layout.regions) == 3
    assert len(table_of_element(layout).content) == 3 * ENTRY_NBYTES + 8 * 1000


def test_parts_in_turn() -> None:
    row = _layout(MPI.FLOAT.Create_contiguous(3))
    assert concat([(100, row), (112, row)]).regions == (region(100, (), 24),)
    assert concat([(100, row), (0, row)]).regions == (region(100, (), 12), region(0, (), 12, 12))


@pytest.mark.timeout(20)
def test_a_million_blocks_are_few_regions() -> None:
    table = table_of_element(_layout(MPI.INT.Create_indexed_block(1, _irregular(1_000_000))))
    assert (table.num_regions, len(table.content)) == (1, ENTRY_NBYTES + 8_000_000)
    lengths = np.random.default_rng(2).integers(0, 5, 1_000_000)
    places = np.cumsum(lengths) - lengths + 2 * np.arange(len(lengths))
    layout = _layout(MPI.INT.Create_indexed(lengths.tolist(), places.tolist()))
    assert layout.nbytes == 4 * int(lengths.sum())
    assert len(table_of_element(layout).content) == ENTRY_NBYTES + 2 * layout.nbytes
    layout = _layout(_structure(), 1_000_000)
    assert layout.nbytes == 12_000_000
    assert len(table_of_element(layout).content) == 2 * ENTRY_NBYTES


def test_blocks_of_one_length_are_one_region() -> None:
    places = [100 * (4 * row + column) for column in range(4) for row in range(5)]
    table = table_of_blocks(places, [100] * 20)
    assert table.num_regions == 1
    assert list(runs_of(table)) == [(place, 100 * number, 100) for number, place in enumerate(places)]


def test_blocks_of_any_lengths_are_packed_in_their_order() -> None:
    places, lengths = [1000, 5000, -2000, 3000], [300, 700, 1, 20]
    copied = {}
    for start, packed, nbytes in runs_of(table_of_blocks(places, lengths)):
        copied.update({packed + byte: start + byte for byte in range(nbytes)})
    wanted = [place + byte for place, length in zip(places, lengths, strict=True) for byte in range(length)]
    assert [copied[byte] for byte in range(len(copied))] == [place % (1 << 64) for place in wanted]
