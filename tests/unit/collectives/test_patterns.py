"""Shards of a span, and buffers that are missing. Patterns: test_movement_patterns, test_reduction_patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.exchange_simulator import DTYPE, SIZES


@given(count=st.integers(0, 10**7), size=SIZES, itemsize=st.sampled_from([1, 2, 4, 8, 16, 200]))
def test_split_covers_a_span_in_order(count: int, size: int, itemsize: int) -> None:
    span = Span(4096, count)
    shards = patterns.split(span, size, itemsize)
    assert len(shards) == size
    position = span.pointer
    for shard in shards:
        assert shard.pointer == position and shard.count <= shards[0].count
        position += shard.count * itemsize
    assert sum(shard.count for shard in shards) == count
    assert patterns.split(Span(0, count), size, itemsize) == [Span(s.pointer - 4096, s.count) for s in shards]


def test_shards_of_a_long_span_begin_at_cache_lines_and_are_balanced() -> None:
    shards = patterns.split(Span(0, 1_000_003), 3, 4)
    assert all(shard.pointer % 128 == 0 for shard in shards)
    assert max(shard.count for shard in shards) - min(shard.count for shard in shards) < 3 * 32


def test_a_missing_buffer_is_an_error() -> None:
    with pytest.raises(InvalidUsageError):
        _ = patterns.gather(0, 2, DTYPE, Span(0, 1), None, 0).steps
    with pytest.raises(InvalidUsageError):
        _ = patterns.reduce(0, 2, DTYPE, Span(0, 1), None, "sum", 0).steps
