from __future__ import annotations

import dataclasses

import pytest

from mpicomm.api.communicator import RankInfo
from mpicomm.cli import options as report
from mpicomm.devices.base import Link
from mpicomm.sizes import Columns

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


def test_header_names_devices_and_why_the_handle() -> None:
    lines = report.header("ring", [GPU, dataclasses.replace(GPU, rank=1)], "auto")
    assert "2 ranks on here" in lines[0]
    assert lines[1] == " Rank  0 Pid      7 on here device  1 [0000:17:00.0] NVIDIA H200"
    assert lines[-1] == "handle: fd (not ipc: no CUDA IPC in this container)"
    assert report.header("ring", [GPU], "fd")[-1] == "handle: fd (as asked for)"
    assert report.header("ring", [CPU], "auto")[-1] == "handle: memfd (the best for this device)"


def test_header_knows_a_handle_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMM_HANDLE", "fd")
    assert report.header("ring", [GPU], "auto")[-1] == "handle: fd (as asked for)"


def test_paths_have_a_row_and_a_column_for_each_rank() -> None:
    assert report.paths(
        [[Link("self"), Link("NVLink", 0, True, True)], [Link("PCIe", 1, True, False), Link("self")]]
    ) == [
        "path (row: rank, column: peer)",
        "           0       1",
        "   0    self  NVLink",
        "   1    PCIe    self",
    ]


def test_columns_line_up() -> None:
    columns = Columns([("size", "(B)", 13), ("put", "(us)", 12), ("#wrong", "", 9)])
    titles, units = columns.head()
    row = columns.line([1 << 30, 4500.0, None])
    assert (titles.split(), units.split()) == (["#", "size", "put", "#wrong"], ["#", "(B)", "(us)"])
    assert row.split() == ["1073741824", "4500.00", "-"]
    ends = [row.index(cell) + len(cell) for cell in row.split()]
    assert ends == [titles.index(name) + len(name) for name in ("size", "put", "#wrong")]
