"""Options and files of the command lines, what ``info`` says, and the choices and files of ``tune``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm import info, tune
from mpicomm.api.communicator import RankInfo
from mpicomm.bench.measure import Measured, Outcome
from mpicomm.bench.operations import Case
from mpicomm.cli import arguments
from mpicomm.cli import options as report
from mpicomm.cluster import process as cuda_aware
from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.tuning import TUNED, Kind, Row, Tuning, to_json
from mpicomm.devices.base import Link
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.info import algorithms
from mpicomm.sizes import format_size
from mpicomm.tune import Measure, Subject, choose, subjects_of, sweep
from tests.helpers.inputs.tuning import row as tuning_row
from tests.helpers.inputs.tuning import table


def test_sizes_and_identifiers_have_a_text() -> None:
    units = {"8": 8, "1K": 1024, "4k": 4096, "64M": 64 << 20, "1G": 1 << 30, "1T": 1 << 40, " 2G ": 2 << 30}
    for text, nbytes in (units | {"1000": 1000, "007": 7}).items():
        assert arguments.parse_size(text) == nbytes
    # The largest unit that divides it.
    for nbytes, text in ((0, "0"), (1, "1"), (1536, "1536"), (64 << 20, "64M"), (3 << 30, "3G"), (3 << 40, "3T")):
        assert format_size(nbytes) == text
    assert report.rank_record(CPU)["device_uuid"] is None
    assert report.rank_record(GPU)["device_uuid"] == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.parametrize(
    "text", ["", "K", "0", "0K", "-1", "+1", "1.5M", "1P", "1KB", "1 K", "1_000", "0x10", "²", "٣", "1e3"]
)
def test_bad_sizes_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        arguments.parse_size(text)
    assert repr(text) in str(raised.value)


@given(st.one_of(st.integers(1, 1 << 50), st.integers(1, 2048).map(lambda n: n << 20)))
def test_sizes_survive_the_round_trip(nbytes: int) -> None:
    assert arguments.parse_size(format_size(nbytes)) == nbytes


def test_output_file_needs_a_directory_to_write_to(tmp_path: Path) -> None:
    assert arguments.output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    # Even root, for whom every directory is writable, cannot make a file in /proc.
    for bad in (tmp_path, tmp_path / "missing" / "new.json", Path("/dev/null"), Path("/proc/new.json")):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.output_file(str(bad))
    assert list(tmp_path.iterdir()) == []


def test_write_json_replaces_the_file_or_leaves_it_and_leaves_nothing_else(tmp_path: Path) -> None:
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    arguments.write_json(path, {"a": 1})
    os.link(path, link)
    arguments.write_json(path, {"a": 2})
    with pytest.raises(TypeError):
        arguments.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 2}
    assert json.loads(link.read_text()) == {"a": 1}  # a reader of the old file still sees all of its content
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidUsageError, match=r"folder cannot be written: Is a directory: name a file on another"):
        arguments.write_json(tmp_path / "folder", {})
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", link, path]


def test_ranks_with_equal_settings_share_a_line() -> None:
    assert info.group_ranks([{"A": "1"}, {"A": "1"}]) == [("all", "A", "1")]
    assert info.group_ranks([{"A": "1"}, {"A": "2"}, {"A": "1"}]) == [("0, 2", "A", "1"), ("1", "A", "2")]
    assert info.group_ranks([{}, {}]) == []


CPU = RankInfo(
    rank=0,
    host="here",
    pid=7,
    node=0,
    device="cpu",
    device_name="cpu",
    device_uuid=bytes(16),
    pci_bus_id="",
    numa_node=-1,
    handle="memfd",
    rejected={},
    links=(Link("self"),),
)
GPU = dataclasses.replace(
    CPU,
    device=1,
    device_name="NVIDIA H200",
    device_uuid=bytes(range(16)),
    pci_bus_id="0000:17:00.0",
    handle="fd",
    rejected={"ipc": "no CUDA IPC in this container"},
)


def test_header_names_devices_and_why_the_handle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def header(ranks: list[RankInfo], handle: str) -> list[str]:
        run: Any = SimpleNamespace(ranks=ranks, options=SimpleNamespace(handle=handle))
        report.Run.print_header(run, "ring")
        return capsys.readouterr().out.splitlines()

    lines = header([GPU, dataclasses.replace(GPU, rank=1)], "auto")
    assert "2 ranks on here" in lines[0]
    assert lines[1] == "#  Rank  0 Pid      7 on here device  1 [0000:17:00.0] NVIDIA H200"
    assert lines[-1] == "# handle: fd (not ipc: no CUDA IPC in this container)"
    assert header([GPU], "fd")[-1] == "# handle: fd (as asked for)"
    assert header([CPU], "auto")[-1] == "# handle: memfd (the best for this device)"
    monkeypatch.setenv("MPICOMM_HANDLE", "fd")
    assert header([GPU], "auto")[-1] == "# handle: fd (as asked for)"


class FakeInfo:
    def __init__(self, kinds: str | None) -> None:
        self.kinds = kinds

    def Get(self, key: str) -> str | None:
        assert key == "mpi_memory_alloc_kinds"
        return self.kinds


class FakeLibrary:
    """An MPI library that has the query functions whose answers are given."""

    _name = "libmpi.so.12"

    def __init__(self, cuda: int | None = None, gpu: tuple[int, int] | None = None) -> None:
        if cuda is not None:
            self.MPIX_Query_cuda_support = lambda: cuda
        if gpu is not None:
            self._gpu = gpu
            self.MPIX_GPU_query_support = self._query

    def _query(self, kind: int, supported: object) -> int:
        assert kind == 0
        error, supported._obj.value = self._gpu  # type: ignore[attr-defined]  # the object that ctypes.byref points to
        return error


@pytest.mark.parametrize(
    ("kinds", "libraries", "aware", "how"),
    [
        ("mpi,system,cuda:device", [FakeLibrary(cuda=0)], True, "mpi_memory_alloc_kinds=mpi,system,cuda:device"),
        ("mpi,cuda", [], True, "mpi_memory_alloc_kinds=mpi,cuda"),
        ("mpi,cudazilla", [], False, "mpi_memory_alloc_kinds=mpi,cudazilla"),
        ("mpi,system", [FakeLibrary(cuda=1)], True, "MPIX_Query_cuda_support of libmpi.so.12"),
        (None, [FakeLibrary(cuda=0, gpu=(0, 1))], False, "MPIX_Query_cuda_support of libmpi.so.12"),
        (None, [FakeLibrary(), FakeLibrary(gpu=(0, 1))], True, "MPIX_GPU_query_support of libmpi.so.12"),
        (None, [FakeLibrary(gpu=(0, 0))], False, "MPIX_GPU_query_support of libmpi.so.12"),
        (None, [FakeLibrary(gpu=(1, 1))], None, "this MPI has neither mpi_memory_alloc_kinds nor a query function"),
        (None, [], None, "this MPI has neither mpi_memory_alloc_kinds nor a query function"),
    ],
)
def test_cuda_awareness(
    kinds: str | None, libraries: list[FakeLibrary], aware: bool | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeWorld:
        @staticmethod
        def Get_info() -> FakeInfo:
            return FakeInfo(kinds)

    monkeypatch.setattr(MPI, "COMM_WORLD", FakeWorld)
    monkeypatch.setattr(cuda_aware, "_loaded_libraries", lambda: libraries)
    assert cuda_aware.query_cuda_aware() == cuda_aware.CudaAwareness(aware, how)


def test_the_library_that_is_asked_is_the_one_that_is_loaded() -> None:
    paths = [library._name for library in cuda_aware._loaded_libraries()]
    assert paths
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    for path in paths:
        assert path in maps


def test_algorithms_that_collectives_on_gpus_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMM_TUNING", "off")
    source, *choices = algorithms("NVIDIA H200", [])
    assert source.startswith("built in")
    assert any(choice.startswith("Allreduce, ") and "two_shot from" in choice for choice in choices)
    assert all(": " in choice for choice in choices)
    monkeypatch.setenv("MPICOMM_TUNING", str(tmp_path / "none"))
    (refusal,) = algorithms("NVIDIA H200", [])
    assert str(tmp_path / "none") in refusal


KIB, MIB = 1 << 10, 1 << 20
EVERY_NAME = ["allreduce", "reduce_scatter", "allgather", "bcast", "reduce", "gather", "scatter", "alltoall"]


@pytest.mark.parametrize(
    ("current", "times_us", "chosen"),
    [
        (None, {"one_shot": 3.0, "two_shot": 2.99}, "two_shot"),
        ("one_shot", {"one_shot": 3.0, "two_shot": 4.0}, "one_shot"),
        ("one_shot", {"one_shot": 100.0, "two_shot": 97.1}, "one_shot"),
        ("one_shot", {"one_shot": 100.0, "two_shot": 96.9}, "two_shot"),
        ("two_shot", {"one_shot": 100.0, "two_shot": 102.0, "chain": 101.0}, "two_shot"),
        ("two_shot", {"one_shot": 101.0, "two_shot": 110.0, "chain": 100.0}, "chain"),
        ("copy_engine", {"one_shot": 5.0, "two_shot": 6.0}, "one_shot"),
    ],
)
def test_a_change_has_to_gain_three_per_cent(current: str | None, times_us: Mapping[str, float], chosen: str) -> None:
    assert choose(current, times_us) == chosen


def test_all_that_has_a_choice_is_a_subject() -> None:
    kinds = [subject.kind for subject in subjects_of(EVERY_NAME)]
    assert not any(kind.quantized for kind in kinds)
    found = [(kind.operation, kind.registered) for kind in kinds]
    names = ("Allreduce", "Reduce_scatter_block", "Allgather", "Bcast", "Reduce", "Gather", "Scatter", "Alltoall")
    mapped = ("Allreduce", "Allgather", "Bcast", "Alltoall")
    assert found == [(name, registered) for name in names for registered in (False, True)[: 1 + (name in mapped)]]
    assert {operation for operation, _ in found} == {*TUNED}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_cases_are_as_large_as_the_call_they_stand_for(size: int) -> None:
    for subject in subjects_of(EVERY_NAME):
        cases = subject.cases([1, 2, 4, KIB, 64 * KIB], 1, size)
        assert len({case.nbytes for case in cases}) == len(cases)
        for case, nbytes in zip(cases[-2:], (KIB, 64 * KIB), strict=True):
            assert nbytes - 4 * size < case.nbytes <= nbytes
            assert (case.rank, case.size, case.in_place) == (1, size, subject.kind.operation == "Bcast")


def allreduce() -> Subject:
    subject = subjects_of(["allreduce"])[1]
    assert subject.kind == Kind("Allreduce", True)
    return subject


def timed(times_us: Mapping[str, float], *, eager: str = "", wrong: int = 0) -> dict[str, Outcome]:
    return {name: Outcome(time, None, wrong, eager, "") for name, time in times_us.items()}


def played(table: Mapping[int, Mapping[str, float]]) -> Measure:
    """Measure as a machine that takes these times, and that cannot carry out algorithms without a time."""

    def measure(case: Case) -> Measured:
        found = table[case.nbytes]
        return Measured(timed(found), {name: "not here" for name in allreduce().algorithms if name not in found})

    return measure


def test_a_row_comes_of_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    times_us = {
        1 * KIB: {"one_shot": 3.0, "two_shot": 4.0},
        2 * KIB: {"one_shot": 4.0, "two_shot": 3.9},
        4 * KIB: {"one_shot": 8.0, "two_shot": 5.0},
        8 * KIB: {"one_shot": 16.0, "two_shot": 8.0, "copy_engine": 7.0},
    }
    row, wrong = sweep(allreduce(), allreduce().cases(list(times_us), 0, 4), played(times_us), table())
    assert (row.kind, row.size, wrong) == (Kind("Allreduce", True), 4, 0)
    assert row.choices == ((0, "one_shot"), (4 * KIB, "two_shot"), (8 * KIB, "copy_engine"))
    assert row.measured is not None
    assert {times["nbytes"]: times["us"] for times in row.measured["times"]} == times_us
    assert (row.measured["mpicomm"], row.measured["datatype"]) == (mpicomm.__version__, "float32")
    assert abs((datetime.fromisoformat(row.measured["date"]) - datetime.now().astimezone()).total_seconds()) < 60
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "# Allreduce of float32, symmetric arrays"
    assert shown[1].split() == ["#", "size", "one_shot", "two_shot", "copy_engine", "chosen"]
    assert [line.split() for line in shown if not line.startswith("#")] == [
        ["1024", "3.00", "4.00", "-", "one_shot"],
        ["2048", "4.00", "3.90", "-", "one_shot"],
        ["4096", "8.00", "5.00", "-", "two_shot"],
        ["8192", "16.00", "8.00", "7.00", "copy_engine"],
    ]
    assert shown[-2:] == ["# - copy_engine: not here", "#"]
    # Bounds are sizes that were measured.
    cases = allreduce().cases([1000, 2001], 0, 3)
    row, _ = sweep(allreduce(), cases, played({1000: {"two_shot": 2.0}, 2000: {"one_shot": 1.0}}), table())
    assert row.choices == ((0, "two_shot"), (2000, "one_shot"))


def test_larger_sizes_keep_the_last_choice_and_the_table_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = table(tuning_row("Allreduce", 4, (KIB, "two_shot"), (8 * KIB, "copy_engine"), registered=True))
    times_us = {KIB: {"one_shot": 1.0, "two_shot": 2.0}, 4 * KIB: {"one_shot": 1.0, "two_shot": 2.0}}
    row, _ = sweep(allreduce(), allreduce().cases(list(times_us), 0, 4), played(times_us), before)
    assert row.choices == ((0, "one_shot"), (4 * KIB + 1, "two_shot"), (8 * KIB, "copy_engine"))
    shown = capsys.readouterr().out.splitlines()
    assert shown[4].split() == ["4096", "1.00", "2.00", "-", "one_shot"]
    assert shown[5] == "# not measured, as before: two_shot from 4097 B, copy_engine from 8192 B"


def test_what_is_wrong_and_what_is_no_graph_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(case: Case) -> Measured:
        eager = timed({"copy_engine": 2.0}, eager="it cannot be captured")
        return Measured(timed({"one_shot": 1.0}, wrong=2) | eager, {})

    _, wrong = sweep(allreduce(), allreduce().cases([KIB, MIB], 0, 4), measure, table())
    assert wrong == 4
    shown = capsys.readouterr().out
    assert shown.count("2.00*") == 2
    assert shown.count("# * copy_engine, call by call: it cannot be captured\n") == 1
    assert "# - one_shot: 2 wrong at 1024 B\n" in shown
    assert "# - one_shot: 2 wrong at 1048576 B\n" in shown


def test_where_nothing_works_there_is_no_row() -> None:
    with pytest.raises(
        MpicommError, match="Allreduce of float32, symmetric arrays: no algorithm works: - one_shot: no"
    ):
        sweep(allreduce(), allreduce().cases([KIB], 0, 4), played({KIB: {}}), table())


@pytest.mark.parametrize(
    ("device", "size", "nodes", "names", "message"),
    [
        ("cpu", 2, 1, ["cpu", "cpu"], "these ranks are on the cpu"),
        (0, 1, 1, ["H200"], "these are 1 on 1"),
        (0, 4, 2, ["H200"] * 4, "these are 4 on 2"),
        (0, 3, 1, ["H200", "L4", "H200"], "the ranks are on H200 and L4"),
        (0, 2, 1, ["H200", "H200"], ""),
    ],
)
def test_ranks_that_can_have_no_table_are_refused(
    device: int | str, size: int, nodes: int, names: list[str], message: str
) -> None:
    comm: Any = SimpleNamespace(device=device, size=size, num_nodes=nodes)
    ranks: list[Any] = [SimpleNamespace(device_name=name) for name in names]
    with pytest.raises(InvalidUsageError, match=message) if message else nullcontext():
        tune.require_possible(comm, ranks)


def test_a_new_table_is_empty_and_its_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings", reason="the directory is that of the kernels, which need cuda-bindings")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, table = tune.open_table(None, "NVIDIA H200")
    assert path == tmp_path / "cache/mpicomm/tuning-nvidia-h200.json"
    assert path.parent.is_dir()
    assert table == Tuning(f"{path} (NVIDIA H200)", (), "NVIDIA H200")


def test_a_table_that_is_there_is_kept_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    old = Tuning("", (Row(Kind("Bcast", False), 8, ((0, "two_shot"),)),), "NVIDIA H200")
    path.write_text(json.dumps(to_json(old)))
    (tmp_path / "broken.json").write_text("{")
    assert tune.open_table(path, "NVIDIA H200")[1].rows == old.rows
    monkeypatch.setattr(tuning, "default_file", lambda device: None)
    refused: dict[Path | None, str] = {
        path: r"table\.json is for NVIDIA H200, this is NVIDIA L4: name another",
        tmp_path / "broken.json": r"broken\.json: JSONDecodeError",
        path / "table.json": r"the table cannot be kept: .*; name another file with --output",
        tmp_path: r"the table cannot be kept: .*; name another file with --output",
        None: "no cache directory",
    }
    for file, said in refused.items():
        with pytest.raises(InvalidUsageError, match=said):
            tune.open_table(file, "NVIDIA L4")
