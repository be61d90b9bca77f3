"""The table of algorithms: its choices, and its description."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.collectives.gpu.built_in import BUILT_IN, scaled
from mpicomm.collectives.gpu.tuning import TUNED, Kind, Measured, Row, Tuning, algorithms_of
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs.tuning import KIB, MIB, NEVER, chosen, row, table

EVERY_OPERATION = st.sampled_from(list(OPERATIONS))

MEASURED = (2, 3, 4, 6, 8)  # ranks
TWO_SHOT_FROM = {
    "Allreduce": {3: 384 * KIB + 1, 4: 256 * KIB + 1, 6: 152 * KIB + 1, 8: 176 * KIB + 1},
    "Bcast": {6: 448 * KIB, 8: 384 * KIB},
    "Reduce": {3: MIB, 4: MIB, 6: 576 * KIB, 8: 448 * KIB},
}
CHAIN_FROM = {
    "Bcast": {3: 896 * KIB, 4: 576 * KIB, 6: 1280 * KIB, 8: 2048 * KIB},
    "Reduce": {3: 2560 * KIB, 4: 3072 * KIB, 6: 3584 * KIB, 8: 4608 * KIB},
}


@pytest.mark.parametrize("size", MEASURED)
@pytest.mark.parametrize("operation", TUNED)
def test_two_shot_begins_at_the_size_where_it_was_faster(operation: str, size: int) -> None:
    begin = TWO_SHOT_FROM.get(operation, {}).get(size, NEVER)
    near = set() if begin == NEVER else {begin - 1, begin, begin + 1}
    for nbytes in {0, 1, *near, *(1 << exponent for exponent in range(22))}:
        if nbytes >= CHAIN_FROM.get(operation, {}).get(size, NEVER):
            continue
        algorithm = BUILT_IN.algorithm(operation, nbytes, size, registered=False)
        assert algorithm == ("two_shot" if begin <= nbytes and begin != NEVER else "one_shot"), nbytes


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_calls_with_codes_count_codes(itemsize: int, registered: bool) -> None:
    for codes, algorithm in (
        (0, "one_shot"),
        (MIB, "one_shot"),
        (MIB + 1, "two_shot"),
        (3 * MIB, "one_shot"),
        (1 << 30, "two_shot"),
    ):
        nbytes = codes * itemsize
        assert BUILT_IN.algorithm("Allreduce", nbytes, 2, registered=registered, coded=itemsize) == algorithm
        choices = BUILT_IN.choices("Allreduce", 2, registered=registered, coded=itemsize)
        assert [name for begin, name in choices if begin <= nbytes][-1] == algorithm
        assert BUILT_IN.algorithm("Allgather", nbytes, 2, registered=registered, coded=itemsize) == "one_shot"


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("size", MEASURED)
@pytest.mark.parametrize("operation", CHAIN_FROM)
def test_chains_begin_at_the_size_where_they_were_faster(operation: str, size: int, registered: bool) -> None:
    begin = CHAIN_FROM[operation].get(size, NEVER)
    for nbytes in (min(begin, 1 << 30) - 1, min(begin, 1 << 40)):
        algorithm = BUILT_IN.algorithm(operation, nbytes, size, registered=registered)
        assert (algorithm == "chain") == (nbytes >= begin)


BLOCKS_FROM = {2: 152, 3: 120, 4: 160, 5: 200, 6: 144, 7: 168, 8: 176}  # 5 and 7 are scaled


@pytest.mark.parametrize(
    ("operation", "size", "begin"),
    [("Allreduce", 2, 112), ("Allreduce", 3, 112), ("Allreduce", 4, 112), ("Allreduce", 6, 96), ("Allreduce", 8, 120)]
    + [("Bcast", 2, 80)]
    + [(operation, *each) for operation in ("Allgather", "Alltoall") for each in BLOCKS_FROM.items()],
)
def test_copies_begin_at_the_size_where_they_were_faster(operation: str, size: int, begin: int) -> None:
    for nbytes in (begin * MIB - KIB, begin * MIB, 1 << 40):
        copies = nbytes >= begin * MIB
        assert (chosen(BUILT_IN, nbytes, size, operation, registered=True) == "copy_engine") == copies


@pytest.mark.parametrize(
    ("operation", "size", "begin"),
    [("Allreduce", 2, 240), ("Allreduce", 3, 192), ("Allreduce", 4, 176), ("Allreduce", 6, 160), ("Allreduce", 8, 192)]
    + [(operation, size, 80 * size) for operation in ("Allgather", "Alltoall") for size in range(4, 9)]
    + [(operation, 2, 416) for operation in ("Allgather", "Alltoall")]
    + [(operation, 3, 224) for operation in ("Allgather", "Alltoall", "Gather", "Scatter")]
    + [
        ("Bcast", 2, 144),
        ("Bcast", 3, None),
        ("Gather", 2, 224),
        ("Reduce", 2, 160),
        ("Reduce_scatter_block", 2, 512),
        ("Reduce_scatter_block", 4, 240),
        ("Reduce_scatter_block", 8, 176),
        ("Reduce", 4, None),
        ("Scatter", 2, 224),
        ("Gather", 4, 320),
        ("Scatter", 4, 320),
    ],
)
def test_copies_into_ordinary_memory_begin_later(operation: str, size: int, begin: int | None) -> None:
    bound = NEVER if begin is None else begin * MIB
    for nbytes in (min(bound, 1 << 39) - KIB, min(bound, 1 << 39), 1 << 40):
        copies = nbytes >= bound
        assert (chosen(BUILT_IN, nbytes, size, operation, registered=False) == "copy_engine") == copies


@pytest.mark.parametrize("size", range(2, 9))
def test_below_the_copies_a_symmetric_output_changes_nothing(size: int) -> None:
    for operation in TUNED:
        for nbytes in (1 << exponent for exponent in range(26)):
            both = {BUILT_IN.algorithm(operation, nbytes, size, registered=registered) for registered in (False, True)}
            assert len(both) == 1, (operation, nbytes)


@given(EVERY_OPERATION, st.integers(0, 1 << 40), st.integers(1, 8), st.booleans())
def test_what_is_built_in_is_possible(operation: str, nbytes: int, size: int, registered: bool) -> None:
    algorithm = BUILT_IN.algorithm(operation, nbytes, size, registered=registered)
    assert algorithm in algorithms_of(operation)


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
    own = Row(measured.kind, size, tuple(measured.choices_above(above, size)))
    begins = [begin for begin, _ in own.choices]
    assert begins == sorted({*begins})
    assert begins[0] == above + 1
    for nbytes in {above + 1, *(begin + step for begin in begins[1:] for step in (-1, 0))}:
        assert own.algorithm(nbytes, size) == measured.algorithm(nbytes, size), nbytes


def continued(before: Tuning, *choices: tuple[int, str], size: int = 4) -> tuple[tuple[int, str], ...]:
    """Return the choices of a row that was measured up to 256 MiB, continued by the table ``before``."""
    measured = Measured("", "", "float32", {KIB: {"one_shot": 1.0}, 256 * MIB: {"one_shot": 1.0}})
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
    found = measured.without("copy_engine")
    assert found == table(row("Allreduce", 3, (100, "two_shot")), Row(Kind("Bcast", False), 3, ((0, "one_shot"),)))
    assert found.without("copy_engine") == found
    assert not any(name == "copy_engine" for each in BUILT_IN.without("copy_engine").rows for _, name in each.choices)


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
