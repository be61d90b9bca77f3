"""Traces of several ranks become one, by one clock, with the waits of the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpicomm.trace import main

Event = dict[str, Any]


def clock(
    rank: int, time_ns: int = 0, offset_ns: int = 0, reference: int = 0, uncertainty_ns: int = 0, wall_ns: int = 0
) -> Event:
    facts: Event = {"rank": rank, "reference": reference, "time_ns": time_ns, "offset_ns": offset_ns}
    facts |= {"uncertainty_ns": uncertainty_ns, "wall_ns": wall_ns, "host": "host"}
    return {"ph": "M", "name": "mpicomm_clock", "pid": rank, "args": facts}


def call(
    rank: int, begin_us: float, end_us: float, number: str = "1", name: str = "Barrier", track: int = 0, **facts: Any
) -> Event:
    category = facts.pop("cat", "collective")
    event = {"ph": "X", "name": name, "cat": category, "ts": begin_us, "dur": end_us - begin_us, "pid": rank}
    return {**event, "tid": track, "args": {"comm": "0.1", "number": number, **facts}}


def write(folder: Path, *events: Event, end: str = "\n]\n") -> Path:
    path = folder / f"trace-{events[0]['pid']}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + end)
    return path


def merged(folder: Path, *paths: Path) -> list[Event]:
    output = folder / "all.json"
    assert main(["merge", *map(str, paths), "-o", str(output)]) == 0
    events: list[Event] = json.loads(output.read_text())["traceEvents"]
    return events


def calls(events: list[Event], rank: int) -> list[tuple[float, float]]:
    return [(event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["pid"] == rank]


def waits(events: list[Event]) -> dict[tuple[str, int], tuple[int, float]]:
    """The waits by the name of the call and the rank: for which rank, and how long."""
    found = [event for event in events if "waited_for" in event.get("args", ())]
    return {(each["name"], each["pid"]): (each["args"]["waited_for"], each["args"]["waited_us"]) for each in found}


def test_times_are_of_one_clock_from_the_first_event_on(tmp_path: Path) -> None:
    first = write(tmp_path, clock(0), call(0, 100, 130))
    second = write(tmp_path, clock(1, offset_ns=-50_000), call(1, 160, 180))
    third = write(tmp_path, clock(2, offset_ns=1000, reference=1), call(2, 160, 180))  # it follows the second one
    events = merged(tmp_path, first, second, third)
    assert [calls(events, rank) for rank in range(3)] == [[(0, 30)], [(10, 20)], [(11, 20)]]


def test_a_drift_between_two_readings_is_taken_out(tmp_path: Path) -> None:
    first = write(tmp_path, clock(0), call(0, 0, 1))
    # The second clock has lost 100 us after a second, so at 500 ms it has lost 50 us.
    second = write(
        tmp_path, clock(1), clock(1, 10**9, 100_000), call(1, 500_000, 500_100), call(1, 2 * 10**6, 2 * 10**6)
    )
    assert calls(merged(tmp_path, first, second), 1) == [(500_050, 100.01), (2_000_100, 0)]


def test_ranks_that_have_compared_no_clocks_go_by_their_wall_clocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path, clock(0, wall_ns=10**9), call(0, 0, 1))
    second = write(tmp_path, clock(3, reference=3, wall_ns=10**9 + 5000), call(3, 0, 1))
    assert calls(merged(tmp_path, first, second), 3) == [(5, 1)]
    assert "rank 3: aligned by the wall clock" in capsys.readouterr().out


def test_ranks_wait_for_the_last_one_as_long_as_they_are_in_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = (
        write(tmp_path, clock(0), call(0, 0, 120), call(0, 200, 210, "2", "Bcast"), call(0, 600, 800, "3")),
        write(tmp_path, clock(1), call(1, 20, 120), call(1, 500, 510, "2", "Bcast"), call(1, 700, 800, "3")),
        write(tmp_path, clock(2), call(2, 100, 120), call(2, 300, 510, "2", "Bcast"), call(2, 610, 800, "3")),
    )
    events = merged(tmp_path, *paths)
    # The root of the broadcast, rank 0, has left long before rank 1 comes.
    assert waits(events) == {
        ("Barrier", 0): (1, 100),  # of the third call; the wait of the first call is below
        ("Barrier", 1): (2, 80),
        ("Barrier", 2): (1, 90),
        ("Bcast", 0): (1, 10),
        ("Bcast", 2): (1, 200),
    }
    flows = [(each["ph"], each["pid"], each["ts"]) for each in events if each.get("cat") == "waits"]
    assert flows[:4] == [("s", 2, 100), ("f", 0, 100), ("s", 2, 100), ("f", 1, 100)]
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [row[:5] for row in rows] == [
        ["2", "1", "2", "0.290", "0.200"],
        ["0", "1", "2", "0.110", "0.100"],
        ["0", "2", "1", "0.100", "0.100"],
        ["1", "2", "1", "0.080", "0.080"],
    ]
    assert rows[0][5] == "Bcast number 2 of communicator 0.1"


def test_a_nonblocking_call_waits_in_the_wait_for_its_request(tmp_path: Path) -> None:
    first = write(tmp_path, clock(0), call(0, 0, 5, name="Iallreduce"), call(0, 60, 120, name="Wait", cat="wait"))
    second = write(tmp_path, clock(1), call(1, 100, 105, name="Iallreduce"), call(1, 110, 120, name="Wait", cat="wait"))
    assert waits(merged(tmp_path, first, second)) == {("Wait", 0): (1, 45)}


def test_the_work_on_devices_counts_if_all_ranks_have_it(tmp_path: Path) -> None:
    first = write(tmp_path, clock(0), call(0, 0, 5), call(0, 50, 95, track=1000, cat="device"))
    second = write(tmp_path, clock(1), call(1, 30, 35), call(1, 90, 95, track=1000, cat="device"))
    events = merged(tmp_path, first, second)
    assert waits(events) == {("Barrier", 0): (1, 40)}
    assert {(each["pid"], each["tid"]) for each in events if each.get("cat") == "waits"} == {(0, 1000), (1, 1000)}


def test_waits_that_the_clocks_cannot_tell_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path, clock(0), call(0, 0, 50), call(0, 100, 160, "2"))
    second = write(tmp_path, clock(1, uncertainty_ns=30_000), call(1, 29, 50), call(1, 131, 160, "2"))
    assert waits(merged(tmp_path, first, second)) == {("Barrier", 0): (1, 31)}
    write(tmp_path, clock(1, uncertainty_ns=40_000), call(1, 29, 50), call(1, 131, 160, "2"))
    assert waits(merged(tmp_path, first, second)) == {}
    assert "no rank waited for another" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["", ",", ',\n{"ph": "X", "na'])
def test_a_trace_of_a_process_that_was_killed_is_read(tmp_path: Path, end: str) -> None:
    path = write(tmp_path, clock(0), call(0, 0, 1), end=end)
    assert calls(merged(tmp_path, path), 0) == [(0, 1)]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.json": None}, "a.json cannot be read: No such file"),
        ({"a.json": "{}"}, "a.json is no trace of one rank"),
        ({"a.json": "[\n{not JSON},\n{}\n]"}, "a.json is no trace of one rank"),
        ({"a.json": '[\n{"ph": "M", "pid": 0, "name": "process_name"}\n]'}, "a.json is no trace of one rank"),
        ({"a.json": json.dumps(clock(0)), "b.json": json.dumps(clock(0))}, "are both of rank 0"),
        ({"all.json": json.dumps(clock(0))}, "is one of the traces"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str | None], said: str
) -> None:
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as end:
        main(["merge", *(str(tmp_path / name) for name in files), "-o", str(tmp_path / "all.json")])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, clock(0))
    with pytest.raises(SystemExit):
        main(["merge", str(path), "-o", str(tmp_path / "nowhere" / "all.json")])
    assert "all.json cannot be written: No such file" in capsys.readouterr().err
