"""Work that calls enqueue on a device is measured, once for each stream, and tells the algorithm of its call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm import log
from mpicomm.api.communicator import Communicator
from mpicomm.environment import Recording
from mpicomm.mpi import buffers
from mpicomm.mpi.host_calls import announce
from mpicomm.observation import reader_of
from mpicomm.recording import channel as channels
from mpicomm.recording.channel import Channel, DeviceWork
from mpicomm.recording.recorder import Recorder
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays

CAPTURING = 7


class Interval:
    def __init__(self, stream: int) -> None:
        self.stream, self.ends, self.over = stream, 0, False

    def extend(self) -> None:
        self.ends += 1

    def times_ns(self) -> tuple[int, int] | None:
        return (1000, 1000 + 500 * self.ends) if self.over else None


class Rig:
    def __init__(self, folder: Path) -> None:
        self.intervals: list[Interval] = []
        self.recorder = Recorder(Recording(f"{folder}/trace.json", stats=False), 3, reports=False)
        self.channel = Channel(self.recorder, "0.1")
        backend: Any = SimpleNamespace(device=2, is_capturing=lambda stream: stream == CAPTURING)
        self.work = DeviceWork(self.channel, backend)
        self.path = folder / "trace-3.json"

    def begin(self, stream: int) -> Interval:
        self.intervals.append(Interval(stream))
        return self.intervals[-1]

    def call(self, *streams: int, nested: bool = False, algorithm: str = "ring") -> None:
        record = self.channel.begin("Allreduce", "collective", numbered=True, nbytes=80, dtype="float32")
        for stream in streams:
            with self.work.enqueued(stream, algorithm, "by the table"):
                pass
        if nested:
            self.call(*streams)
        self.channel.end(record)

    def calls(self) -> list[tuple[str, int, float, dict[str, Any]]]:
        self.recorder.flush()
        events = [json.loads(line.strip(",")) for line in self.path.read_text().splitlines() if "{" in line]
        return [(each["cat"], each["tid"], each["dur"], each["args"]) for each in events if each["ph"] == "X"]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    timeline = SimpleNamespace()
    monkeypatch.setattr(channels, "timeline_of", lambda backend: timeline)
    listeners = [*log.slow_way_listeners]
    rig = Rig(tmp_path)
    timeline.begin = rig.begin
    yield rig
    log.slow_way_listeners[:] = listeners


def test_a_call_has_one_interval_in_each_stream(rig: Rig) -> None:
    rig.call(1, 1, 5, 1)
    assert [(each.stream, each.ends) for each in rig.intervals] == [(1, 3), (5, 1)]
    for interval in rig.intervals:
        interval.over = True
    assert [tid for category, tid, *_ in rig.calls() if category == "device"] == [1000, 1001]
    (row,) = rig.channel.counts.statistics().rows
    assert round(row.device_s * 1e9) == 1500  # of the first stream, which waits for the others


def test_times_are_written_when_the_work_is_over_and_not_before(rig: Rig) -> None:
    rig.call(1, 1)
    rig.call(1)
    facts = rig.calls()[0][3]
    assert (facts["algorithm"], facts["why"], facts["number"]) == ("ring", "by the table", "1")
    assert [category for category, *_ in rig.calls()] == ["collective"] * 2
    rig.intervals[0].over = True
    assert [(category, dur) for category, _, dur, _ in rig.calls()][2:] == [("device", 1)]
    rig.intervals[1].over = True
    (device,) = rig.calls()[3:]
    assert device[:3] == ("device", 1000, 0.5) and device[3]["number"] == "2"
    (row,) = rig.channel.counts.statistics().rows
    assert (row.calls, round(row.device_s * 1e9)) == (2, 1500)


def test_a_call_inside_another_counts_once(rig: Rig) -> None:
    rig.call(1, nested=True)
    for interval in rig.intervals:
        interval.over = True
    assert [facts.get("number") for _, _, _, facts in rig.calls()] == [None, "1", None, "1"]
    (row,) = rig.channel.counts.statistics().rows
    assert (row.calls, round(row.device_s * 1e9)) == (1, 500)


def test_work_of_a_capture_is_marked_and_not_measured_nor_work_outside_of_calls(rig: Rig) -> None:
    with rig.work.enqueued(1, "ring"):
        pass
    assert not rig.calls()
    rig.call(CAPTURING)
    assert not rig.intervals
    ((_, _, _, facts),) = rig.calls()
    assert facts["captured"] is True and facts["algorithm"] == "ring"


def test_slow_ways_are_counted_for_each_call(rig: Rig) -> None:
    for _ in range(2):
        record = rig.channel.begin("Bcast", "collective")
        announce("Bcast", "only MPI can carry it out")
        announce("Bcast", "only MPI can carry it out")
        rig.channel.end(record)
    reason = "through pinned host memory and MPI: only MPI can carry it out"
    assert rig.channel.counts.statistics().slow_ways == {("Bcast", reason): 2}
    assert [facts["slow"] for *_, facts in rig.calls()] == [reason] * 2


def test_an_engine_tells_the_choice_of_its_plan(rig: Rig) -> None:
    class Engine:
        def enqueue(self, plan: Any, stream: int, event: Any = None, meets: bool = False) -> bool:
            return meets

    engine: Any = Engine()
    rig.work.watch(engine)
    record = rig.channel.begin("Allreduce", "collective")
    plan = SimpleNamespace(choice=("two_shot", "by the table", "for want of memory"))
    assert engine.enqueue(plan, 1, None, meets=True) and not engine.enqueue(plan, 1)
    rig.channel.end(record)
    assert (record.algorithm, record.why, record.slow_ways) == ("two_shot", "by the table", ["for want of memory"])
    assert [interval.ends for interval in rig.intervals] == [2]
    assert isinstance(engine, Engine)


def test_counts_on_the_device_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)

    class Counts(DeviceArray):
        def __len__(self) -> int:
            raise AssertionError("the host would wait for the device")

    x, y = (DeviceArray(address, 100, np.dtype("f4")) for address in (0x1000, 0x2000))
    counts, came = (Counts(address, 2, np.dtype("i8")) for address in (0x3000, 0x4000))
    monkeypatch.setitem(buffers._readers, Counts, buffers._readers[DeviceArray])
    facts_of = reader_of("Alltoallv", Communicator.Alltoallv)
    nbytes, dtype, _ = facts_of(SimpleNamespace(size=2), ([x, counts], [y, (came, [0, 50])]), {})
    assert (nbytes, dtype) == (400, "float32")
