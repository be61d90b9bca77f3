"""The shards of spans, and a reduce-scatter in place.

test_packed.py carries out the patterns that move data. Kernels on CPU threads (tests/kernels/test_collectives.py) and
the engine of the host (tests/mpi/collectives/host/test_engine.py) carry out all of them.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns


@given(count=st.integers(0, 10**7), size=st.integers(1, 8), itemsize=st.sampled_from([1, 2, 4, 8, 16, 200]))
def test_split_covers_a_span_in_order(count: int, size: int, itemsize: int) -> None:
    span = Span(4096, count)
    shards = patterns.split(span, size, itemsize)
    assert len(shards) == size
    position = span.pointer
    for shard in shards:
        assert shard.pointer == position and shard.count <= shards[0].count
        position += shard.count * itemsize
    assert sum(shard.count for shard in shards) == count


def test_shards_of_a_long_span_begin_at_cache_lines_and_are_balanced() -> None:
    shards = patterns.split(Span(0, 1_000_003), 3, 4)
    assert all(shard.pointer % 128 == 0 for shard in shards)
    assert max(shard.count for shard in shards) - min(shard.count for shard in shards) < 3 * 32


def test_a_reduce_scatter_in_place_moves_its_result_over_input_that_others_have() -> None:
    shared, output, result = patterns.blocks(4096, [3, 2], [0, 3], 4), Span(4096, 2), Span(1 << 20, 2)
    pattern = patterns.reduce_scatter(1, 2, np.dtype(np.float32), shared, output, "sum", scratch=1 << 20)
    (exchange,) = pattern
    assert exchange.reduction is not None and exchange.reduction.output == result
    assert exchange.move == (result, output)
