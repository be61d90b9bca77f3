"""Variations of a case, which all ranks draw alike."""

from __future__ import annotations

import pytest

from mpicomm.bench.contenders import ROOM_NBYTES, Variation, draw, mean_share


@pytest.mark.parametrize("largest", [1, 2, 7, 256, 1 << 28])
def test_every_call_is_another_one_within_a_factor_of_two(largest: int) -> None:
    found = draw(largest, 30)
    assert len(found) == len(set(found)) == 30
    assert all(largest < 2 * one.block <= 2 * largest for one in found)
    assert all(0 <= one.shift < ROOM_NBYTES and one.shift % 512 == 0 for one in found)
    assert len({one.shift for one in found}) > 10
    assert len({one.block for one in found}) >= min(largest - largest // 2, 10)


def test_ranks_draw_the_same_calls() -> None:
    assert draw(1000, 50) == draw(1000, 50)
    assert draw(1000, 50) != draw(1001, 50)


def test_a_class_of_few_sizes_gives_all_variations_once() -> None:
    found = draw(2, 1000)
    assert sorted(found, key=lambda one: one.shift) == [Variation(2, shift) for shift in range(0, ROOM_NBYTES, 512)]


@pytest.mark.parametrize("largest", [1, 2, 7, 8])
def test_the_share_counts_all_sizes(largest: int) -> None:
    blocks = {one.block for one in draw(largest, 10_000)}
    assert mean_share(largest) == pytest.approx(sum(blocks) / len(blocks) / largest)
