"""Traces and tables at the end of a process, traces of spawned processes, NVTX ranges, and work on a device.

Work that calls enqueue is measured once for each stream, and tells the algorithm of its call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm import log
from mpicomm.api.communicator import Communicator
from mpicomm.environment import Recording
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import buffers
from mpicomm.mpi.host_calls import log_host_staging
from mpicomm.observation import reader_of
from mpicomm.recording import tracer as tracers
from mpicomm.recording.recorder import Recorder
from mpicomm.recording.tracer import DeviceTracer, Tracer
from mpicomm.trace import main
from tests.helpers.fakes.fake_driver import DeviceArray, read_device_arrays
from tests.helpers.jobs.mpiexec import run_command, run_job

ENDING = """
import os
import numpy as np
import mpicomm
comm = mpicomm.Communicator(device="cpu")
comm.Allreduce(np.ones(4), np.empty(4))
print("output")
{end}
"""


@pytest.mark.parametrize("end", ["comm.Free()", "comm._unfreed = False", "raise SystemExit(comm.Free())"])
def test_the_trace_ends_and_the_table_is_printed(tmp_path: Path, end: str) -> None:
    variables = {"MPICOMM_TRACE": f"{tmp_path}/%r.json", "MPICOMM_STATS": "1"}
    done = run_command(sys.executable, "-c", ENDING.format(end=end), **variables)
    assert (done.returncode, done.stdout) == (0, "output\n")
    assert "mpicomm: calls of this rank" in done.stderr and "Allreduce" in done.stderr
    events = json.loads((tmp_path / "0.json").read_text())
    assert ("Allreduce", 32) in [(event["name"], event["args"].get("bytes")) for event in events]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "


@pytest.mark.parametrize("reason", ["No space left on device", "File too large"])
def test_a_trace_or_log_that_cannot_be_written_ends_with_a_warning(reason: str, tmp_path: Path) -> None:
    name, program = "/dev/full", ENDING.format(end="comm.Free()")
    if reason == "File too large":
        # The limit also holds for the shared memory that MPI and a Communicator make.
        name, program = str(tmp_path / "file"), program.replace("comm.Allreduce", LIMIT + "comm.Allreduce")
    done = run_command(sys.executable, "-c", program, MPICOMM_TRACE=name)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    trace = name if name == "/dev/full" else f"{name}-0"  # a name without %r gets the rank
    assert f"MPICOMM_TRACE={trace!r} cannot be written: {reason}: the trace ends" in done.stderr
    program = program.replace("print", "mpicomm.log.logger.info('x' * 1000); print")
    variables = {"MPICOMM_DEBUG_FILE": name, "MPICOMM_DEBUG": "INFO"}
    done = run_command(sys.executable, "-c", program, **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "output\n", 1)
    assert f"MPICOMM_DEBUG_FILE cannot be written: {reason}: warnings go to stderr" in done.stderr


def test_traces_are_merged_without_mpi(tmp_path: Path) -> None:
    command = (sys.executable, "-X", "importtime", "-m", "mpicomm.trace", "merge", "--help")
    done = run_command(*command)
    assert done.returncode == 0 and "traces of the ranks" in done.stdout
    assert "mpicomm.recording.record" in done.stderr and "mpi4py" not in done.stderr


PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpicomm

parent = MPI.Comm.Get_parent()
spawned = parent != MPI.COMM_NULL
mine, ours = np.ones(3), np.empty(3)
with mpicomm.Communicator(MPI.COMM_WORLD, device="cpu") as world:
    world.Allreduce(mine, ours, algorithm="one_shot")
between = parent if spawned else MPI.COMM_WORLD.Spawn(sys.executable, [__file__], 1)
merged = between.Merge(spawned)
with mpicomm.Communicator(merged, device="cpu") as comm:
    comm.Allreduce(mine, ours, algorithm="one_shot")
    assert (ours == 2).all()
merged.Free()
between.Disconnect()
"""


def test_spawned_processes_have_their_own_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = run_job(1, str(program), MPICOMM_TRACE=f"{tmp_path}/trace-%r.json")
    assert job.returncode == 0, job.stderr
    paths = sorted(tmp_path.glob("trace-*.json"))
    assert len(paths) == 2
    assert main(["merge", *map(str, paths), "-o", f"{tmp_path}/all.json"]) == 0
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    calls = [event for event in events if event["name"] == "Allreduce" and event["ph"] == "X"]
    by_communicator: dict[str, set[int]] = {}
    for call in calls:
        by_communicator.setdefault(call["args"]["comm"], set()).add(call["pid"])
    # Each process in its own world, then both together.
    assert sorted(map(len, by_communicator.values())) == [1, 1, 2]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    nvtx = SimpleNamespace(
        push_range=lambda message, domain: lines.append(f"{domain} {message}"),
        pop_range=lambda domain: lines.append(f"{domain} end"),
        mark=lambda message, domain: lines.append(f"{domain} mark: {message}"),
    )
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    return lines


def test_a_range_has_operation_bytes_and_algorithm(said: list[str]) -> None:
    recorder = Recorder(Recording("nvtx", stats=False), 0, reports=False)
    tracer = Tracer(recorder, "0.1")
    with tracer.record("Allreduce", "collective", nbytes=80, dtype="float32"):
        tracer.set_algorithm("ring", "by the table")
    assert said == ["mpicomm Allreduce 80 B float32", "mpicomm Allreduce by ring", "mpicomm end", "mpicomm end"]
    said.clear()
    with tracer.record("Bcast", "collective", nbytes=8):
        pass
    assert said == ["mpicomm Bcast 8 B", "mpicomm mark: Bcast by mpi", "mpicomm end"]


def test_the_package_is_needed_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(
        InvalidUsageError, match=r'MPICOMM_TRACE="nvtx" needs the package nvtx: pip install -e "\.\[nvtx\]"'
    ):
        Recorder(Recording("nvtx", stats=False), 0, reports=False)


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
        self.tracer = Tracer(self.recorder, "0.1")
        backend: Any = SimpleNamespace(device=2, is_capturing=lambda stream: stream == CAPTURING)
        self.work = DeviceTracer(self.tracer, backend)
        self.path = folder / "trace-3.json"

    def begin(self, stream: int) -> Interval:
        self.intervals.append(Interval(stream))
        return self.intervals[-1]

    def call(self, *streams: int, nested: bool = False, algorithm: str = "ring") -> None:
        with self.tracer.record("Allreduce", "collective", numbered=True, nbytes=80, dtype="float32"):
            for stream in streams:
                with self.work.enqueued(stream, algorithm, "by the table"):
                    pass
            if nested:
                self.call(*streams)

    def calls(self) -> list[tuple[str, int, float, dict[str, Any]]]:
        self.recorder.flush()
        events = [json.loads(line.strip(",")) for line in self.path.read_text().splitlines() if "{" in line]
        return [(each["cat"], each["tid"], each["dur"], each["args"]) for each in events if each["ph"] == "X"]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    timeline = SimpleNamespace()
    monkeypatch.setattr(tracers, "timeline_of", lambda backend: timeline)
    listeners = [*log.slow_path_listeners]
    rig = Rig(tmp_path)
    timeline.begin = rig.begin
    yield rig
    log.slow_path_listeners[:] = listeners


def test_a_call_has_one_interval_in_each_stream(rig: Rig) -> None:
    rig.call(1, 1, 5, 1)
    assert [(each.stream, each.ends) for each in rig.intervals] == [(1, 3), (5, 1)]
    for interval in rig.intervals:
        interval.over = True
    assert [tid for category, tid, *_ in rig.calls() if category == "device"] == [1000, 1001]
    (row,) = rig.tracer.counts.statistics().rows
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
    (row,) = rig.tracer.counts.statistics().rows
    assert (row.calls, round(row.device_s * 1e9)) == (2, 1500)


def test_a_call_inside_another_counts_once(rig: Rig) -> None:
    rig.call(1, nested=True)
    for interval in rig.intervals:
        interval.over = True
    assert [facts.get("number") for _, _, _, facts in rig.calls()] == [None, "1", None, "1"]
    (row,) = rig.tracer.counts.statistics().rows
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
        with rig.tracer.record("Bcast", "collective"):
            log_host_staging("Bcast", "only MPI can carry it out")
            log_host_staging("Bcast", "only MPI can carry it out")
    reason = "through pinned host memory and MPI: only MPI can carry it out"
    assert rig.tracer.counts.statistics().slow_ways == {("Bcast", reason): 2}
    assert [facts["slow"] for *_, facts in rig.calls()] == [reason] * 2


def test_an_engine_tells_the_choice_of_its_plan(rig: Rig) -> None:
    class Engine:
        def enqueue(self, plan: Any, stream: int, event: Any = None, host_barrier: bool = False) -> bool:
            return host_barrier

    engine: Any = Engine()
    rig.work.trace_engine(engine)
    plan = SimpleNamespace(choice=("two_shot", "by the table", "for want of memory"))
    with rig.tracer.record("Allreduce", "collective") as record:
        assert engine.enqueue(plan, 1, None, host_barrier=True) and not engine.enqueue(plan, 1)
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
