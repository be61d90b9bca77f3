"""Programs that ask for records find their calls in trace, counts and table; all others record nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.recording import record, tracer
from mpicomm.trace import main
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.message_rigs import rig_on

Event = dict[str, Any]
LATE_S = 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks have."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path)))


@pytest.fixture
def traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/trace-%r.json")
    with communicator("cpu") as comm:
        yield comm


def calls_of(folder: Path, rank: int = MPI.COMM_WORLD.rank) -> list[Event]:
    """The calls in the trace of a rank, which may not have its end yet."""
    lines = (folder / f"trace-{rank}.json").read_text().splitlines()
    events = [json.loads(line.strip(",")) for line in lines if line.strip(",") not in ("", "[", "]")]
    return [event for event in events if event["ph"] == "X"]


def facts(event: Event, *names: str) -> tuple[Any, ...]:
    return event["name"], *(event["args"].get(name) for name in names)


def test_the_trace_has_operation_bytes_type_and_algorithm(traced: mpicomm.Communicator, folder: Path) -> None:
    size, peer = traced.size, (traced.rank + 1) % traced.size
    small, large, out = np.ones(10), np.ones(1 << 16, "f4"), np.empty(1 << 16, "f4")
    traced.Bcast(small, root=size - 1)
    traced.Allreduce(large, out, algorithm="ring")
    traced.Allreduce([large, 5, MPI.FLOAT], [out, 5, MPI.FLOAT], algorithm="one_shot", wire_dtype="int8")
    traced.Alltoallv([np.ones(size), [1] * size], [np.ones(size), [1] * size])
    traced.allreduce(1)
    traced.matmul_allreduce(np.ones((2, 3), "f4"), np.ones((3, 2), "f4"))
    traced.Sendrecv(small, peer, 0, np.empty(10), (traced.rank - 1) % size)
    with traced.zeros(6, "i2") as array:
        array.put(np.ones(3, "i2"), peer)
        array.signal(peer)
        array.wait_signal((traced.rank - 1) % size)
    with pytest.raises(mpicomm.InvalidUsageError):
        traced.Allreduce(small, small[:5], algorithm="one_shot")
    traced.check()
    found = calls_of(folder)
    assert [facts(event, "bytes", "dtype", "algorithm") for event in found] == [
        ("Bcast", 80, "float64", "mpi"),
        ("Allreduce", 1 << 18, "float32", "ring"),
        ("Allreduce", 20, "float32", "one_shot"),
        ("Alltoallv", 8 * size, "float64", "mpi"),
        ("allreduce", None, None, "mpi"),
        ("matmul_allreduce", 24, "float32", "one after the other"),
        ("Sendrecv", 80, "float64", "mpi"),
        ("zeros", None, None, None),
        ("SymmetricArray.put", 6, "int16", None),
        ("SymmetricArray.signal", None, None, None),
        ("SymmetricArray.wait_signal", None, None, None),
        ("SymmetricArray.close", None, None, None),
        ("Allreduce", 80, "float64", None),
        ("check", None, None, None),
    ]
    assert facts(found[0], "root", "number") == ("Bcast", size - 1, "1")
    assert facts(found[1], "why", "number") == ("Allreduce", 'algorithm="ring"', "2")
    assert facts(found[2], "wire_dtype") == ("Allreduce", "int8")
    assert facts(found[6], "dest", "number") == ("Sendrecv", peer, None)
    assert facts(found[-2], "error") == ("Allreduce", "RefusedByMpiError")


def test_requests_are_waited_for_in_the_trace(traced: mpicomm.Communicator, folder: Path) -> None:
    values, sums = np.ones(4), np.empty(4)
    traced.Iallreduce(values, sums).Wait()
    assert (sums == traced.size).all()
    prepared = traced.Allreduce_init(values, sums)
    for _ in range(2):
        prepared.Start()
        prepared.Wait()
    prepared.Free()
    requests = [traced.Ibarrier(), traced.Ibcast(values)]
    MPI.Request.Waitall(requests)
    assert all(request == MPI.REQUEST_NULL for request in requests)
    traced.check()
    assert [facts(event, "number", "of") for event in calls_of(folder)][:6] == [
        ("Iallreduce", "1", None),
        ("Wait", "1", "Iallreduce"),
        ("Allreduce_init", "2", None),
        ("Allreduce Start", "2.1", None),
        ("Wait", "2.1", "Allreduce_init"),
        ("Allreduce Start", "2.2", None),
    ]


def test_merged_traces_say_who_waited_for_whom(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/trace-%r.json")
    # Each rank's clock is hours ahead of the clock of the rank before.
    monkeypatch.setattr(tracer, "clock_key", lambda: str(rank))
    ahead_ns = rank * 7_200_000_000_000
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + ahead_ns))
    with communicator("cpu") as comm:
        part = comm.Split(0)
        part.Barrier()
        if rank == size - 1:
            time.sleep(LATE_S)
        part.Barrier()
        part.Free()
    MPI.COMM_WORLD.Barrier()
    if rank == 0:
        capsys.readouterr()
        paths = [f"{folder}/trace-{each}.json" for each in range(size)]
        assert main(["merge", *paths, "-o", f"{folder}/all.json"]) == 0
        events = json.loads((folder / "all.json").read_text())["traceEvents"]
        waited = [
            (event["pid"], event["args"]["waited_for"])
            for event in events
            if event["name"] == "Barrier" and event["args"].get("waited_us", 0) > LATE_S * 0.9e6
        ]
        assert sorted(waited) == [(each, size - 1) for each in range(size - 1)]
        ranks = {event["pid"] for event in events if event.get("cat") == "collective"}
        assert ranks == set(range(size))
        # Ranks leave a barrier together, so by one clock the ends are together.
        ends = [
            event["ts"] + event["dur"]
            for event in events
            if event["name"] == "Barrier" and event["args"]["number"] == "2"
        ]
        assert len(ends) == size and max(ends) - min(ends) < LATE_S * 1e6
        assert ("Barrier number 2" in capsys.readouterr().out) == (size > 1)


def test_stats_count_calls_bytes_and_time_and_keep_failed_calls_apart(traced: mpicomm.Communicator) -> None:
    values, sums = np.ones(200, "f4"), np.empty(200, "f4")
    for _ in range(3):
        traced.Allreduce(values, sums)
    traced.Allreduce(values, sums, algorithm="one_shot")
    for _ in range(2):
        with pytest.raises(mpicomm.InvalidUsageError):
            traced.Allreduce(values, sums[:5], algorithm="one_shot")
    stats = traced.stats()
    plain, mapped, failed = sorted(stats.rows, key=lambda row: -row.calls * (not row.error))
    counted = plain.operation, plain.sizes, plain.algorithm, plain.calls, plain.nbytes
    assert counted == ("Allreduce", "<= 4K", "mpi", 3, 2400)
    assert (mapped.algorithm, mapped.calls, mapped.device_s, mapped.error) == ("one_shot", 1, 0, "")
    assert (failed.algorithm, failed.calls, failed.error) == ("", 2, "InvalidUsageError")
    assert 0 < plain.longest_s <= plain.host_s < 60
    assert stats.slow_ways == {}
    assert "Allreduce" in str(stats) and "failed: InvalidUsageError" in str(stats)


class Threads:
    """A timeline of devices that are threads: their work has only the time of the host."""

    def begin(self, stream: int) -> SimpleNamespace:
        begin_ns = record.now_ns()
        return SimpleNamespace(stream=stream, times_ns=lambda: (begin_ns, record.now_ns()), extend=lambda: None)


def test_messages_of_device_arrays_have_tracks_of_their_streams(
    traced: mpicomm.Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if traced.size == 1:
        pytest.skip("a rank that sends to itself before it receives waits for ever in some MPIs")
    monkeypatch.setattr(tracer, "timeline_of", lambda backend: Threads())
    with rig_on(traced) as rig:
        out = rig.empty(5000)
        rig.comm.Sendrecv(rig.of(rig.rank, 5000), rig.right, 0, out, rig.left)
        rig.device.synchronize()
        rows = rig.comm.stats().rows
    assert [(row.algorithm, row.device_s > 0) for row in rows if row.operation == "Sendrecv"] == [("rendezvous", True)]
    traced.check()
    (host, *device) = [event for event in calls_of(folder) if event["name"] == "Sendrecv"]
    assert host["cat"] == "message" and device
    assert {(event["cat"], event["tid"] >= 1000) for event in device} == {("device", True)}


def test_prepared_receives_of_device_arrays_are_waited_for_in_the_trace(
    traced: mpicomm.Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "timeline_of", lambda backend: Threads())
    with rig_on(traced) as rig:
        prepared = rig.comm.Recv_init(rig.empty(5000), rig.left)
        prepared.Wait()  # nothing is started
        for _ in range(2):
            prepared.Start()
            rig.comm.Isend(rig.of(rig.rank, 5000), rig.right).Wait()
            prepared.Wait()
        prepared.Free()
    traced.check()
    calls = [event for event in calls_of(folder) if event["tid"] < 1000]  # without the tracks of streams
    waits = [event["args"]["of"] for event in calls if event["name"] == "Wait"]
    assert waits[:5] == ["Recv_init", "Isend", "Recv_init", "Isend", "Recv_init"]


def test_calls_of_windows_are_in_the_trace(traced: mpicomm.Communicator, folder: Path) -> None:
    win = mpicomm.Win.Allocate(80, 8, comm=traced)
    peer, ones, before = (traced.rank + 1) % traced.size, np.ones(3), np.zeros(1)
    win.Fence()
    win.Put(ones, peer, 1)
    win.Fence()
    win.Lock(peer, MPI.LOCK_SHARED)
    win.Accumulate([ones, 2, MPI.DOUBLE], peer)
    win.Rget(np.empty(3), peer).Wait()
    win.Fetch_and_op(np.ones(1), before, peer)
    with pytest.raises((MPI.Exception, mpicomm.InvalidUsageError)):
        win.Put(ones, traced.size)
    win.Unlock(peer)
    win.Free()
    traced.check()
    found = calls_of(folder)
    start = next(number for number, event in enumerate(found) if event["name"] == "Win.Fence")
    assert [facts(event, "bytes", "dtype", "target_rank", "rank") for event in found[start:]] == [
        ("Win.Fence", None, None, None, None),
        ("Win.Put", 24, "float64", peer, None),
        ("Win.Fence", None, None, None, None),
        ("Win.Lock", None, None, None, peer),
        ("Win.Accumulate", 16, "float64", peer, None),
        ("Win.Rget", 24, "float64", peer, None),
        ("Wait", 24, None, None, None),
        ("Win.Fetch_and_op", 8, "float64", peer, None),
        ("Win.Put", 24, "float64", traced.size, None),
        ("Win.Unlock", None, None, None, peer),
        ("Win.Free", None, None, None, None),
        ("check", None, None, None, None),
    ]
    assert [event["name"] for event in found[start:] if "error" in event["args"]] == ["Win.Put"]
    fences = [event["args"]["number"] for event in found if event["name"] == "Win.Fence"]
    assert MPI.COMM_WORLD.allgather(fences) == [fences] * traced.size


def test_work_of_a_gpu_is_in_the_track_of_its_stream(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/trace-%r.json")
    with communicator(device) as comm, array_module(comm) as xp:
        values, sums = xp.ones(1000, "f4"), xp.empty(1000, "f4")
        for algorithm in ("auto", "auto", "one_shot"):
            comm.Allreduce(values, sums, algorithm=algorithm)
        with comm.zeros(1000, "f4") as array:
            array.put(sums, comm.rank)
            array.signal(comm.rank)
            array.wait_signal(comm.rank)
            comm.check()
            assert (array.local == comm.size).all()
        win = mpicomm.Win.Allocate(8, 8, comm=comm, place="device")
        win.Lock(comm.rank)
        win.Accumulate(sums[:1], comm.rank)
        win.Unlock(comm.rank)
        comm.check()
        if device == "cuda":
            with xp.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                comm.Allreduce(values, sums)
                stream.end_capture()
        comm.check()
        win.Free()
        rows = comm.stats().rows
    calls = [event for event in calls_of(folder) if event["cat"] in ("collective", "memory")]
    work = {(event["name"], event["ts"]): event for event in calls_of(folder) if event["cat"] == "device"}
    if device == "cpu":
        assert not work and len(calls) == 9
        return
    assert [event["name"] for event in work.values()] == [event["name"] for event in calls[:9]]
    for host, device_event in zip(calls, work.values(), strict=False):
        assert device_event["args"] == host["args"]
        assert 0 <= device_event["dur"] < 60e6
        # A stream comes to a call after the host has begun it; the two clocks are compared to some microseconds.
        assert -100 < device_event["ts"] - host["ts"] < 60e6
    assert {event["tid"] for event in work.values()} == {1000}
    assert [facts(event, "captured") for event in calls[9:]] == [("Allreduce", True)]
    assert facts(calls[0], "why") == ("Allreduce", "by the table") or comm.size == 1
    assert facts(calls[2], "algorithm", "why") == ("Allreduce", "one_shot", 'algorithm="one_shot"')
    assert facts(calls[3], "algorithm", "bytes") == ("SymmetricArray.put", "copy_engine", 4000)
    assert all(row.device_s > 0 for row in rows if row.operation == "SymmetricArray.put")


def test_without_the_variables_no_call_has_count(host_comm: mpicomm.Communicator) -> None:
    with pytest.raises(mpicomm.InvalidUsageError, match="set MPICOMM_STATS=1 or MPICOMM_TRACE"):
        host_comm.stats()


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, last = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size - 1
    if rank == last:
        (folder / f"trace-{rank}.json").mkdir()
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/trace-%r.json")
    said = f"rank {last}: MPICOMM_TRACE=.*trace-{last}.json' cannot be opened: Is a directory"
    with pytest.raises(mpicomm.InvalidUsageError, match=said):
        communicator("cpu")


def test_each_rank_has_a_file_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/trace.json")
    with communicator("cpu") as comm:
        comm.Barrier()
        comm.check()
        assert [event["name"] for event in calls_of(folder)] == ["Barrier", "check"]


@pytest.mark.parametrize("name", ["MPICOMM_TRACE", "MPICOMM_STATS"])
def test_a_variable_of_one_rank_holds_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        monkeypatch.setenv(name, "1" if name == "MPICOMM_STATS" else f"{folder}/trace-%r.json")
    with communicator("cpu") as comm:
        comm.Bcast(np.ones(3))
        assert [(row.operation, row.calls) for row in comm.stats().rows] == [("Bcast", 1)]
    assert (folder / f"trace-{MPI.COMM_WORLD.rank}.json").exists() == (name == "MPICOMM_TRACE")
