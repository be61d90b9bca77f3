"""Layouts of derived datatypes, against the packing of MPI's messages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.mpi.layout import Region, layout_of
from tests.helpers.reference_packing import pack, unpack

_NAMED = (MPI.BYTE, MPI.INT16_T, MPI.FLOAT, MPI.DOUBLE, MPI.C_DOUBLE_COMPLEX)


@st.composite
def _datatypes(draw: st.DrawFn, depth: int) -> MPI.Datatype:
    """Draw a datatype of which no two elements overlap, so that it can be unpacked."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return draw(st.sampled_from(_NAMED)).Dup()
    base = draw(_datatypes(depth - 1))
    low, extent = base.Get_extent()
    true_low, true_extent = base.Get_true_extent()
    # The distance at which elements do not overlap, in bytes and in extents.
    span = max(true_low + true_extent, low + extent) - min(true_low, low)
    apart = -(-span // extent) if extent > 0 else 1
    kind = draw(st.sampled_from(("dup", "contiguous", "vector", "hvector", "indexed", "block", "struct", "subarray")))
    count, length = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    backwards = draw(st.booleans())
    if apart > 1 and kind not in ("dup", "hvector", "struct"):
        kind = "dup"
    if kind == "contiguous":
        made = base.Create_contiguous(count)
    elif kind == "vector":
        stride = max(length, 1) + draw(st.integers(0, 2))
        made = base.Create_vector(count, length, -stride if backwards else stride)
    elif kind == "hvector":
        stride = span + draw(st.integers(0, 9))
        made = base.Create_hvector(count, 1, -stride if backwards else stride)
    elif kind == "indexed":
        lengths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        places = [sum(lengths[:n]) + 2 * n for n in range(len(lengths))]
        made = base.Create_indexed(lengths, places)
    elif kind == "block":
        places = draw(st.permutations(range(4)))
        made = base.Create_indexed_block(max(length, 1), [3 * place for place in places])
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


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_datatypes(4), st.integers(0, 3))
def test_packs_as_mpi_does(datatype: MPI.Datatype, count: int) -> None:
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


def _regions(datatype: MPI.Datatype, count: int = 1) -> tuple[Region, ...]:
    layout = layout_of(datatype)
    assert layout is not None
    datatype.Free()
    return layout.repeated(count).regions


def test_few_loops() -> None:
    cube = [10, 20, 30]
    part = MPI.DOUBLE.Create_subarray(cube, [4, 5, 6], [1, 2, 3])
    assert _regions(part) == (Region(8 * (600 + 60 + 3), ((4, 4800), (5, 240)), 48),)
    rows = MPI.DOUBLE.Create_subarray(cube, [10, 5, 30], [0, 2, 0])
    assert _regions(rows) == (Region(8 * 60, ((10, 4800),), 1200),)
    assert _regions(MPI.DOUBLE.Create_subarray(cube, [2, 20, 30], [1, 0, 0])) == (Region(4800, (), 9600),)
    assert _regions(MPI.FLOAT.Create_vector(5, 2, 2)) == (Region(0, (), 40),)
    assert _regions(MPI.FLOAT.Create_vector(5, 1, 2)) == (Region(0, ((5, 8),), 4),)
    assert _regions(MPI.FLOAT.Create_indexed([1, 1, 1], [0, 3, 6])) == (Region(0, ((3, 12),), 4),)
    assert _regions(MPI.FLOAT.Create_resized(0, 4), 7) == (Region(0, (), 28),)
    assert _regions(MPI.FLOAT.Create_resized(0, 8), 7) == (Region(0, ((7, 8),), 4),)


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
    assert other.regions == (Region(0, ((3, 16),), 4),)
    datatype.Free()


def test_only_mpi_knows_other_datatypes() -> None:
    kinds, arguments, sizes = [MPI.DISTRIBUTE_BLOCK], [MPI.DISTRIBUTE_DFLT_DARG], [1]
    array = MPI.INT.Create_darray(1, 0, [8], kinds, arguments, sizes)
    assert layout_of(array) is None
    array.Free()
    assert layout_of(MPI.SHORT_INT) is None
    assert layout_of(MPI.DATATYPE_NULL) is None


@pytest.mark.timeout(20)
def test_many_irregular_blocks_take_little_time() -> None:
    places = np.cumsum(np.random.default_rng(1).integers(2, 9, 100_000)).tolist()
    datatype = MPI.INT.Create_indexed_block(1, places)
    begin = time.perf_counter()
    layout = layout_of(datatype)
    assert layout is not None
    assert layout.nbytes == 400_000
    assert time.perf_counter() - begin < 10
    datatype.Free()
