from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm import info
from mpicomm.api.communicator import RankInfo
from mpicomm.cli import arguments
from mpicomm.cli import options as report
from mpicomm.devices.base import Link
from mpicomm.errors import InvalidUsageError
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
