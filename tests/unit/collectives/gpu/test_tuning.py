"""The table of algorithms: its choices, and its description."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.collectives.gpu.tuning import BUILT_IN, Kind, Row, Tuning, algorithms_of, scaled
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs.tuning import KIB, MIB, NEVER, chosen, row, table

EVERY_OPERATION = st.sampled_from(list(OPERATIONS))


def test_the_built_in_table_has_bounds_by_the_number_of_ranks_and_the_memory() -> None:
    for begin, size, operation, registered in (
        (256 * KIB + 1, 4, "Allreduce", False),
        (448 * KIB, 6, "Bcast", True),
        (MIB, 3, "Reduce", False),
        (112 * MIB, 2, "Allreduce", True),
        (240 * MIB, 2, "Allreduce", False),
        (80 * MIB, 2, "Bcast", True),
        (160 * MIB, 4, "Allgather", True),
        (200 * MIB - 1, 5, "Alltoall", True),  # by the row of 4 ranks
        (512 * MIB, 2, "Reduce_scatter_block", False),
    ):
        below, above = (chosen(BUILT_IN, begin + step, size, operation, registered=registered) for step in (-1, 0))
        assert below != above, operation


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_calls_with_codes_count_codes(itemsize: int, registered: bool) -> None:
    choices = BUILT_IN.choices("Allreduce", 2, registered=registered, coded=itemsize)
    bounds = (0, "one_shot"), (MIB + 1, "two_shot"), (2944 * KIB + 1, "one_shot"), (3584 * KIB, "two_shot")
    assert choices == [(codes * itemsize, name) for codes, name in bounds]
    assert BUILT_IN.choices("Allgather", 2, registered=registered, coded=itemsize) == [(0, "one_shot")]


@given(EVERY_OPERATION, st.integers(0, 1 << 40), st.integers(1, 8), st.booleans())
def test_what_is_built_in_is_possible(operation: str, nbytes: int, size: int, registered: bool) -> None:
    assert chosen(BUILT_IN, nbytes, size, operation, registered=registered) in algorithms_of(operation)


def test_what_each_operation_can_be_carried_out_with() -> None:
    def possible(*operations: str) -> set[str]:
        return {" ".join(algorithms_of(operation)) for operation in operations}

    assert possible("Allreduce") == {"one_shot two_shot copy_engine"}  # no ring, which reduces in another order
    assert possible("Bcast", "Reduce") == {"one_shot two_shot chain copy_engine"}
    assert possible("Allgather", "Alltoall", "Gather", "Scatter") == {"one_shot copy_engine"}
    assert possible("Alltoallv", "Gatherv", "Reduce_scatter", "Scan") == {"one_shot"}


def test_more_ranks_than_measured_take_scaled_bounds() -> None:
    measured = table(row("Allreduce", 3, (MIB, "two_shot"), (96 * MIB, "copy_engine"), registered=True))
    # Between 5 ranks one hop sends twice as many bytes as between 3, and a copy has 3/5 of the bytes.
    for nbytes, algorithm in (
        (MIB // 2 - 1, "one_shot"),
        (MIB // 2, "two_shot"),
        (160 * MIB - 8, "two_shot"),
        (160 * MIB, "copy_engine"),
    ):
        assert chosen(measured, nbytes, 5, registered=True) == algorithm, nbytes


def test_the_nearest_row_below_counts() -> None:
    measured = table(
        row("Allreduce", 2, (100, "copy_engine")),
        row("Allreduce", 4, (100, "two_shot")),
        row("Allreduce", 6, (100, "copy_engine")),
    )
    found = [chosen(measured, NEVER, size) for size in range(2, 9)]
    # The row of two ranks holds only for two ranks.
    assert found == ["copy_engine", "one_shot", *["two_shot"] * 2, *["copy_engine"] * 3]


def test_a_symmetric_output_takes_the_row_of_any_output_if_it_has_none() -> None:
    measured = table(row("Allreduce", 4, (100, "two_shot")))
    assert chosen(measured, 100, 4, registered=True) == "two_shot"


@pytest.mark.parametrize("above", [0, 99, 100, 60 * MIB, NEVER])
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_choices_above_a_size_are_made_there(size: int, above: int) -> None:
    measured = row("Bcast", 3, (100, "two_shot"), (101, "chain"), (96 * MIB, "two_shot"), (97 * MIB, "copy_engine"))
    choices = tuple(measured.choices_above(above, size))
    own = Row(measured.kind, size, choices)
    begins = [begin for begin, _ in choices]
    assert begins == sorted({*begins})
    assert begins[0] == above + 1
    for nbytes in {above + 1, *(begin + step for begin in begins[1:] for step in (-1, 0))}:
        assert chosen(table(own), nbytes, size, "Bcast") == chosen(table(measured), nbytes, size, "Bcast"), nbytes


def continued(before: Tuning, *choices: tuple[int, str], size: int = 4) -> tuple[tuple[int, str], ...]:
    """Return the choices of a row that was measured up to 256 MiB, continued by the table ``before``."""
    measured = {"times": [{"nbytes": nbytes, "us": {"one_shot": 1.0}} for nbytes in (KIB, 256 * MIB)]}
    return before.continued(replace(row("Allgather", size, *choices), measured=measured)).choices


def test_above_the_measured_sizes_a_row_keeps_its_last_choice() -> None:
    one_shot, behind = (0, "one_shot"), 256 * MIB + 1
    assert continued(BUILT_IN) == (one_shot, (320 * MIB, "copy_engine"))
    assert continued(scaled(239)) == (one_shot, (behind, "copy_engine"))  # the table has it from 160 MiB on
    assert continued(BUILT_IN, size=5) == (one_shot, (400 * MIB - 1, "copy_engine"))  # by the row of 4 ranks
    assert continued(table()) == (one_shot,)
    # A row keeps its last algorithm if the table has this algorithm for larger sizes.
    assert continued(BUILT_IN, (MIB, "copy_engine")) == (one_shot, (MIB, "copy_engine"))
    earlier = table(row("Allgather", 4, (512 * MIB, "copy_engine"), (900 * MIB, "one_shot")))
    assert continued(earlier)[1:] == ((512 * MIB, "copy_engine"), (900 * MIB, "one_shot"))
    assert continued(earlier, (MIB, "copy_engine"))[2:] == ((900 * MIB, "one_shot"),)


def test_rows_are_replaced_by_those_for_the_same() -> None:
    old = table(
        row("Allreduce", 2, (1, "copy_engine")), row("Allreduce", 4, (1, "copy_engine")), row("Bcast", 4, (1, "chain"))
    )
    new = [row("Allreduce", 4, (2, "two_shot")), row("Reduce", 4, (3, "two_shot"))]
    assert old.updated(new).rows == (old.rows[0], new[0], old.rows[2], new[1])


def test_another_table_stands_in_if_there_is_no_row() -> None:
    own = table(row("Allreduce", 3, (100, "two_shot")))
    both = own.completed(BUILT_IN)
    assert both.source == "here; for the rest built in, measured on H200s"
    assert [chosen(both, NEVER, size) for size in (2, 3, 4, 8)] == ["copy_engine", "two_shot", "two_shot", "two_shot"]
    assert chosen(both, NEVER, 4, registered=True) == "two_shot"
    assert chosen(both, MIB, 4, "Bcast") == "chain"
    assert BUILT_IN.completed(own) == BUILT_IN


def test_a_table_without_an_algorithm() -> None:
    measured = table(
        row("Allreduce", 3, (100, "two_shot"), (1000, "copy_engine")),
        Row(Kind("Bcast", False), 3, ((0, "copy_engine"),)),
    )

    def choices(operation: str) -> list[tuple[int, str]]:
        return measured.choices(operation, 3, registered=False, without=["copy_engine"])

    assert choices("Allreduce") == [(0, "one_shot"), (100, "two_shot")]
    assert choices("Bcast") == [(0, "one_shot")]


def test_a_description_has_one_line_for_equal_rows() -> None:
    rows = (
        row("Allreduce", 4, (256 * KIB + 1, "two_shot"), (160 * MIB, "copy_engine"), registered=True),
        row("Allreduce", 4),
        row("Bcast", 4, (100, "two_shot")),
        row("Bcast", 3, (100, "two_shot")),
    )
    assert table(*rows).describe() == [
        "here",
        "Allreduce, symmetric output, 4 ranks: one_shot, two_shot from 256 KiB, copy_engine from 160 MiB",
        "Allreduce, 4 ranks: one_shot",
        "Bcast, 3, 4 ranks: one_shot, two_shot from 0.09766 KiB",
    ]
