from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.cli.pattern import Pattern

CHUNK = 1_000_003  # after which it repeats
SIZES = (1, 2, 3, 4, 5, 7, 8, 1024, 4099, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)

pattern = Pattern(np)


def written(nbytes: int, rank: int = 0, iteration: int = 0) -> npt.NDArray[np.uint8]:
    array = np.empty(nbytes, np.uint8)
    pattern.write(array, rank, iteration)
    return array


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_found_right(nbytes: int) -> None:
    assert pattern.count_wrong(written(nbytes, 3, 7), 3, 7) == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_write_covers_every_byte_and_nothing_else(nbytes: int) -> None:
    arrays = []
    for poison in (0x00, 0xFF):
        array = np.full(nbytes + 2, poison, np.uint8)
        pattern.write(array[1:-1], 0, 0)  # at an odd address
        assert array[0] == array[-1] == poison
        arrays.append(array[1:-1])
    assert np.array_equal(arrays[0], arrays[1])


@given(st.data())
def test_a_flipped_bit_anywhere_is_one_wrong_byte(data: Any) -> None:
    nbytes = data.draw(st.sampled_from(SIZES))
    index = data.draw(st.one_of(st.sampled_from([0, nbytes - 1]), st.integers(0, nbytes - 1)))
    array = written(nbytes, 1, 2)
    array[index] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    assert pattern.count_wrong(array, 1, 2) == 1


def test_patterns_of_other_ranks_and_iterations_are_mostly_wrong() -> None:
    ours = written(4096, 2, 2)
    for rank in range(8):
        for iteration in range(8):
            if (rank, iteration) != (2, 2):
                # Independent bytes agree in one of 256 places.
                assert pattern.count_wrong(ours, rank, iteration) > 4096 * 0.98


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8, 16, 64, 4096, 1 << 20])
def test_shifted_data_is_wrong(shift: int) -> None:
    nbytes = 2 * CHUNK
    assert pattern.count_wrong(np.roll(written(nbytes), shift), 0, 0) > nbytes * 0.98


def test_a_longer_pattern_begins_like_a_shorter_one() -> None:
    # Of a message that was cut short, only the missing bytes are wrong.
    assert np.array_equal(written(2 * CHUNK + 3)[: CHUNK + 1], written(CHUNK + 1))
