"""Layouts have as few regions, loops and lists as possible, so that the kernel's tables are short and made quickly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.packed import table_for, table_of_blocks
from mpicomm.kernels.packing import ENTRY_NBYTES
from mpicomm.mpi.layout import DatatypeLayout, layout_of, together
from mpicomm.mpi.regions import Region
from tests.helpers.inputs.regions import region
from tests.helpers.references.reference_packing import runs_of

_CUBE = [10, 20, 30]


def _layout(datatype: MPI.Datatype, count: int = 1) -> DatatypeLayout:
    layout = layout_of(datatype)
    assert layout is not None
    datatype.Free()
    return layout.repeated(count)


def _regions(datatype: MPI.Datatype, count: int = 1) -> tuple[Region, ...]:
    return _layout(datatype, count).regions


def _freed(part: MPI.Datatype, made: MPI.Datatype) -> MPI.Datatype:
    part.Free()
    return made


def _structures(extent: int, second: int, of_second: MPI.Datatype) -> MPI.Datatype:
    """A structure of a double and another field."""
    fields = MPI.Datatype.Create_struct([1, 1], [0, second], [MPI.DOUBLE, of_second])
    return _freed(fields, fields.Create_resized(0, extent))


def _irregular(count: int) -> list[int]:
    places: list[int] = np.cumsum(np.random.default_rng(1).integers(2, 9, count)).tolist()
    return places


def _of(part: MPI.Datatype, make: str, *arguments: Any) -> MPI.Datatype:
    return _freed(part, getattr(part, f"Create_{make}")(*arguments))


F, D = MPI.FLOAT, MPI.DOUBLE
ONE_REGION: list[tuple[str, Callable[[], MPI.Datatype], int, Region]] = [
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
    # blocks of many lengths are cut to one length if they are short
    ("short blocks", lambda: D.Create_indexed([1, 3, 2], [0, 3, 9]), 1, region(0, ([0, 24, 32, 40, 72, 80],), 8)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "count", "expected"), [each[1:] for each in ONE_REGION], ids=[x[0] for x in ONE_REGION]
)
def test_one_region(make: Callable[[], MPI.Datatype], count: int, expected: Region) -> None:
    assert _regions(make(), count) == (expected,)


def test_long_blocks_of_many_lengths_stay_whole() -> None:
    long = MPI.DOUBLE.Create_indexed([100, 301, 200], [0, 300, 900])
    assert [each.nbytes for each in _regions(long)] == [800, 2408, 1600]


def test_long_lists_in_a_list_are_regions_with_one_list_in_the_table() -> None:
    inner = MPI.FLOAT.Create_indexed_block(1, _irregular(1000))
    layout = _layout(_freed(inner, inner.Create_hindexed_block(1, [0, 60000, 30000])))
    assert len(layout.regions) == 3
    assert len(table_for(layout).content) == 3 * ENTRY_NBYTES + 8 * 1000


def test_each_field_of_an_array_of_structures_is_a_region() -> None:
    expected = (region(0, ((1000, 32),), 8, 0, (12,)), region(16, ((1000, 32),), 4, 8, (12,)))
    assert _regions(_structures(32, 16, MPI.FLOAT), 1000) == expected
    structure = _structures(32, 16, MPI.FLOAT)
    assert _regions(_freed(structure, structure.Create_contiguous(10)), 100) == expected
    structure = _structures(32, 16, MPI.FLOAT)
    rows = _freed(structure, structure.Create_vector(5, 2, 3))
    assert _regions(rows) == (
        region(0, ((5, 96), (2, 32)), 8, 0, (24, 12)),
        region(16, ((5, 96), (2, 32)), 4, 8, (24, 12)),
    )
    structure = _structures(32, 16, MPI.FLOAT)
    assert _regions(_freed(structure, structure.Create_indexed_block(1, [0, 5, 2]))) == (
        region(0, ([0, 160, 64],), 8, 0, (12,)),
        region(16, ([0, 160, 64],), 4, 8, (12,)),
    )


def test_parts_in_turn() -> None:
    row = _layout(MPI.FLOAT.Create_contiguous(3))
    assert together([(100, row), (112, row)]).regions == (region(100, (), 24),)
    assert together([(100, row), (0, row)]).regions == (region(100, (), 12), region(0, (), 12, 12))


@pytest.mark.timeout(20)
def test_a_million_blocks_are_few_regions() -> None:
    table = table_for(_layout(MPI.INT.Create_indexed_block(1, _irregular(1_000_000))))
    assert (table.num_regions, len(table.content)) == (1, ENTRY_NBYTES + 8_000_000)
    lengths = np.random.default_rng(2).integers(0, 5, 1_000_000)
    places = np.cumsum(lengths) - lengths + 2 * np.arange(len(lengths))
    layout = _layout(MPI.INT.Create_indexed(lengths.tolist(), places.tolist()))
    assert layout.nbytes == 4 * int(lengths.sum())
    assert len(table_for(layout).content) == ENTRY_NBYTES + 2 * layout.nbytes
    layout = _layout(_structures(32, 16, MPI.FLOAT), 1_000_000)
    assert layout.nbytes == 12_000_000
    assert len(table_for(layout).content) == 2 * ENTRY_NBYTES


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
