from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm import info
from mpicomm.api.communicator import RankInfo
from mpicomm.cli import arguments
from mpicomm.cli import options as report
from mpicomm.cluster import process as cuda_aware
from mpicomm.devices.base import Link
from mpicomm.errors import InvalidUsageError
from mpicomm.info import algorithms
from mpicomm.sizes import format_size


def test_sizes_have_units() -> None:
    units = {"8": 8, "1K": 1024, "4k": 4096, "64M": 64 << 20, "1G": 1 << 30, "1T": 1 << 40, " 2G ": 2 << 30}
    for text, nbytes in (units | {"1000": 1000, "007": 7}).items():
        assert arguments.parse_size(text) == nbytes
    # The largest unit that divides it.
    for nbytes, text in ((0, "0"), (1, "1"), (1536, "1536"), (64 << 20, "64M"), (3 << 30, "3G"), (3 << 40, "3T")):
        assert format_size(nbytes) == text


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


def test_format_uuid() -> None:
    assert arguments.format_uuid(bytes(16)) is None
    assert arguments.format_uuid(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


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


def test_header_names_devices_and_why_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = report.header("ring", [GPU, dataclasses.replace(GPU, rank=1)], "auto")
    assert "2 ranks on here" in lines[0]
    assert lines[1] == " Rank  0 Pid      7 on here device  1 [0000:17:00.0] NVIDIA H200"
    assert lines[-1] == "handle: fd (not ipc: no CUDA IPC in this container)"
    assert report.header("ring", [GPU], "fd")[-1] == "handle: fd (as asked for)"
    assert report.header("ring", [CPU], "auto")[-1] == "handle: memfd (the best for this device)"
    monkeypatch.setenv("MPICOMM_HANDLE", "fd")
    assert report.header("ring", [GPU], "auto")[-1] == "handle: fd (as asked for)"


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
