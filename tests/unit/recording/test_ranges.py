"""NVTX ranges of calls, with a double of the package nvtx that writes down its calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpicomm.environment import Recording
from mpicomm.errors import InvalidUsageError
from mpicomm.recording.channel import Channel
from mpicomm.recording.recorder import Recorder


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
    channel = Channel(recorder, "0.1")
    record = channel.begin("Allreduce", "collective", nbytes=80, dtype="float32")
    channel.choose("ring", "by the table")
    channel.end(record)
    assert said == ["mpicomm Allreduce 80 B float32", "mpicomm Allreduce by ring", "mpicomm end", "mpicomm end"]
    said.clear()
    channel.end(channel.begin("Bcast", "collective", nbytes=8))
    assert said == ["mpicomm Bcast 8 B", "mpicomm mark: Bcast by mpi", "mpicomm end"]
    recorder.discard()


def test_the_package_is_needed_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(
        InvalidUsageError, match=r'MPICOMM_TRACE="nvtx" needs the package nvtx: pip install -e "\.\[nvtx\]"'
    ):
        Recorder(Recording("nvtx", stats=False), 0, reports=False)
