"""The table of algorithms: its choices, its description, and its file."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.tuning import (
    BUILT_IN,
    TUNED,
    Kind,
    Row,
    Tuning,
    algorithms_of,
    kind_of,
    load,
    scaled,
    to_json,
)
from mpicomm.errors import InvalidUsageError
from tests.helpers.inputs.tuning import GPU, KIB, MIB, NEVER, chosen, row, table


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_quantized_calls_count_quantized_bytes(itemsize: int, registered: bool) -> None:
    bounds = (0, "one_shot"), (MIB, "two_shot")
    measured = table(Row(kind_of("Allreduce", registered=registered, quantized=True), 2, bounds), row("Allreduce", 2))
    choices = measured.choices("Allreduce", 2, registered=registered, quantized_itemsize=itemsize)
    assert choices == [(nbytes * itemsize, name) for nbytes, name in bounds]
    assert measured.choices("Allgather", 2, registered=registered, quantized_itemsize=itemsize) == [(0, "one_shot")]


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
    assert chosen(measured, NEVER, 4, registered=True) == "two_shot"  # there is no row of symmetric outputs


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


@pytest.mark.parametrize("device", ["", GPU, '\N{SNOWMAN} \\ "'])
def test_a_file_holds_all_of_a_table(tmp_path: Path, device: str) -> None:
    kinds = [kind_of(name, registered=each) for name in TUNED for each in (False, True)]
    rows = [Row(kind, 2 + n % 7, ((0, "one_shot"), (1 << n, "copy_engine"))) for n, kind in enumerate({*kinds})]
    rows.append(Row(Kind("Allreduce", False, True), 3, ((0, "two_shot"),), {"date": device, "times": [0.5]}))
    written = Tuning("", (), device).updated(rows)
    (tmp_path / "table.json").write_text(json.dumps(to_json(written)))
    read = load(tmp_path / "table.json")
    assert (read.rows, read.device) == (written.rows, device)
    assert pickle.loads(pickle.dumps(read)) == read


def document() -> dict[str, Any]:
    measured = {"date": "2026-11-20T00:00:00+00:00", "times": [{"nbytes": KIB, "us": {"one_shot": 3.2}}]}
    choices = ((0, "one_shot"), (KIB, "two_shot"), (MIB, "copy_engine"))
    return to_json(table(Row(Kind("Allreduce", True), 4, choices, measured), row("Bcast", 4, (MIB, "two_shot"))))


def put(*keys: Any) -> Callable[[Any], Any]:
    """Return a function that puts the last of ``keys`` into a document, at the place that the other keys name."""
    *path, last, value = keys

    def change(whole: Any) -> Any:
        holder = whole
        for key in path:
            holder = holder[key]
        holder[last] = value
        return whole

    return change


FIRST, SECOND = ("rows", 0), ("rows", 0, "choices", 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda whole: [whole], "TypeError"),
        (put("format", 1), "this mpicomm reads format 2"),
        (put("rows", [{}]), "'operation'"),
        (put(*FIRST, "operation", "Scan"), "no row of Scan"),
        (put(*FIRST, "ranks", 1), "between 1 ranks"),
        (put(*FIRST, "operation", "Gather"), "cannot choose two_shot for Gather"),
        (put(*SECOND, "algorithm", "magic"), "cannot choose magic"),
        (put(*SECOND, "algorithm", "ring"), "cannot choose ring"),
        (put(*SECOND, "from_nbytes", 0), "can begin at [0, 0, "),
        (put(*FIRST, "choices", 0, "from_nbytes", 1), "can begin at [1, "),
        *((content, "") for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000)),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(change: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(change(document())).encode())
    with pytest.raises(InvalidUsageError) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(f"tuning file {path}: ") and problem in text
    assert "delete it and run python -m mpicomm.tune, or set MPICOMM_TUNING=off" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return all places in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in ((*path, key), *places(item, (*path, key)))]


@given(st.data())
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_damaged_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = document()
    place = data.draw(st.sampled_from(places(whole)))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_text(json.dumps(put(*place, data.draw(JSON))(copy.deepcopy(whole))))
    try:
        read = load(path)
    except InvalidUsageError:
        return
    for operation in TUNED:
        for registered in (False, True):
            legal = algorithms_of(operation)
            assert chosen(read, NEVER, 4, operation, registered=registered) in legal


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    pytest.importorskip("cuda.bindings", reason="the directory is that of the kernels, which need cuda-bindings")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MPICOMM_TUNING", raising=False)
    return tmp_path / "mpicomm"


def write(path: Path, *rows: Row) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(table(*rows))))
    return path


MINE = row("Allreduce", 4, (100, "copy_engine"))
OTHER = "NVIDIA H100 80GB HBM3"


def find(device_name: str, link_gb_s: float | None = None) -> Tuning:
    return tuning.find(device_name, lambda: link_gb_s)


def test_the_file_that_is_named_or_else_that_of_the_device_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(GPU) is BUILT_IN
    path = write(cache / "tuning-nvidia-h200.json", MINE)
    named = write(cache / "named.json", row("Allreduce", 4, (100, "two_shot")))
    assert (tuning.default_file(GPU), find(OTHER)) == (path, BUILT_IN)
    assert tuning.default_file(OTHER) == cache / "tuning-nvidia-h100-80gb-hbm3.json"
    assert find(GPU).describe()[0] == f"{path} (NVIDIA H200); for the rest built in, measured on H200s"
    for name, algorithm in (("", "copy_engine"), (str(named), "two_shot")):
        monkeypatch.setenv("MPICOMM_TUNING", name)
        assert chosen(find(GPU), 100, 4) == algorithm
        assert chosen(find(GPU), MIB, 4, "Bcast") == "chain"
    monkeypatch.setenv("MPICOMM_TUNING", "off")
    assert find(GPU) is BUILT_IN


def test_for_other_gpus_the_built_in_table_is_scaled_by_their_links(cache: Path) -> None:
    scaled = find(OTHER, 239)
    assert scaled.source == "built in, measured on H200s, scaled to links of 239 GB/s"
    assert scaled.link_speed == 0.5
    for mine, theirs in zip(scaled.rows, BUILT_IN.rows, strict=True):
        assert (mine.kind, mine.size, mine.measured) == (theirs.kind, theirs.size, None)
        assert [name for _, name in mine.choices] == [name for _, name in theirs.choices]
        for (begin, _), (other, _) in zip(mine.choices, theirs.choices, strict=True):
            assert abs(begin - other / 2) <= 0.5
    assert find(OTHER) is BUILT_IN  # the links are unknown


def test_what_was_measured_is_not_scaled(cache: Path) -> None:
    def never_asked() -> float:
        raise AssertionError

    assert tuning.find(GPU, never_asked) is BUILT_IN
    write(cache / "tuning-nvidia-h100-80gb-hbm3.json", MINE)
    found = find(OTHER, 47.8)
    assert MINE in found.rows
    assert found.link_speed == pytest.approx(0.1)
    assert chosen(found, 58 * KIB, 4, "Bcast") == "chain"  # from 57.6 KiB on
    assert chosen(found, 57 * KIB, 4, "Bcast") == "one_shot"


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_is_named_must_be_one(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(cache.parent / name)
    monkeypatch.setenv("MPICOMM_TUNING", path)
    text = f"^tuning file {re.escape(path)}: .*set MPICOMM_TUNING to a file"
    with pytest.raises(InvalidUsageError, match=text):
        find(GPU)


def test_who_has_no_home_has_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert tuning.default_file(GPU) is None
    assert find(GPU) is BUILT_IN
