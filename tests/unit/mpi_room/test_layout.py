"""Layouts of derived datatypes, against the packing of MPI's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.packed import PackJob, table_of
from mpicomm.mpi.layout import DatatypeLayout, layout_of
from mpicomm.mpi.regions import Region, joined
from tests.helpers.inputs.regions import region
from tests.helpers.references.reference_packing import pack, runs_of, unpack

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


def list_and_float() -> MPI.Datatype:
    listed = MPI.INT16_T.Create_indexed_block(1, [0, 5, 2])
    return MPI.Datatype.Create_struct([1, 1], [0, 20], [listed, MPI.FLOAT])


# The parts of these datatypes are not freed.
SPECIAL = {
    "a list of a list and a float": lambda: list_and_float().Create_hindexed_block(1, [0, 300, 100]),
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
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("count", [1, 2, 20])
def test_packs_special_datatypes_as_mpi_does(name: str, count: int) -> None:
    check(SPECIAL[name](), count)


def test_regions_that_are_alike_join_only_at_equal_distances_in_packed_memory() -> None:
    for last, expected in ((10, 2), (8, 1)):
        packed = (0, 4, last)
        runs = [Region(offset, (), 4, at) for offset, at in zip((0, 50, 100), packed, strict=True)]
        loops = [region(offset, ((3, 8),), 4, at, (20,)) for offset, at in zip((0, 30, 60), packed, strict=True)]
        for regions in (runs, loops):
            assert len(joined(regions)) == expected
            assert sorted(places(joined(regions))) == sorted(places(regions))


def test_runs_that_touch_only_in_memory_stay_two_runs() -> None:
    runs = [Region(0, (), 4, 0), Region(4, (), 4, 8)]
    assert places(joined(runs)) == places(runs)


def places(regions: Sequence[Region]) -> list[tuple[int, int, int]]:
    return list(runs_of(table_of([PackJob(0, DatatypeLayout(tuple(regions), 0, None), 0)])))


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
        for start, place, nbytes in runs_of(table_of([PackJob(at, layout, 0)])):
            by_table[place : place + nbytes] = memory[start : start + nbytes]
        np.testing.assert_array_equal(by_table, packed)
        ours, theirs = rng.integers(0, 256, (2, memory.size), np.uint8)
        theirs[:] = ours
        unpack(layout, packed, ours, at)
        there = MPI.memory.fromaddress(theirs.ctypes.data + at, 0)
        _move([packed, packed.size, MPI.PACKED], [there, count, datatype])
        np.testing.assert_array_equal(ours, theirs)
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
    datatype = MPI.INT.Create_vector(3, 1, 2)
    first = layout_of(datatype)
    assert layout_of(datatype) is first
    datatype.Free()
    datatype = MPI.INT.Create_vector(3, 1, 4)
    other = layout_of(datatype)
    assert other is not first and other is not None
    assert other.regions == (region(0, ((3, 16),), 4),)
    datatype.Free()


@pytest.mark.parametrize("order", [MPI.ORDER_C, MPI.ORDER_FORTRAN])
@pytest.mark.parametrize("element", [MPI.INT16_T, MPI.SHORT_INT], ids=["numbers", "pairs"])
def test_distributed_arrays_are_packed_as_mpi_does(order: int, element: MPI.Datatype) -> None:
    """Only MPI has their rules, and the elements of a pair have a gap."""
    spread = [MPI.DISTRIBUTE_CYCLIC, MPI.DISTRIBUTE_BLOCK, MPI.DISTRIBUTE_NONE]
    for rank in range(4):
        array = element.Create_darray(4, rank, [7, 6, 3], spread, [2, 3, MPI.DISTRIBUTE_DFLT_DARG], [2, 2, 1], order)
        layout = layout_of(array)
        assert layout is not None and layout.dtype == (np.dtype(np.int16) if element == MPI.INT16_T else None)
        for count in (1, 2):
            check(array.Dup(), count)
        array.Free()


def test_types_with_empty_parts_of_an_array() -> None:
    array = MPI.INT.Create_darray(3, 2, [2], [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [3])
    layout = layout_of(array)
    assert layout is not None and layout.regions == ()
    array.Free()


def test_no_datatype_has_no_layout() -> None:
    assert layout_of(MPI.DATATYPE_NULL) is None
