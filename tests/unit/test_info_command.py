"""``python -m mpicomm.info`` as a user runs it."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
import pytest
from mpi4py import MPI
from rich.console import Console

import mpicomm
from mpicomm.cluster import process as cuda_aware
from mpicomm.info import algorithms, tables
from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import run_job

INFO = ("-m", "mpicomm.info", "--device", "cpu")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The tables of two ranks, and the answer in JSON, on standard output and in a file."""
    file = tmp_path_factory.mktemp("info") / "info.json"
    commands = {"tables": INFO, "json": (*INFO, "--json"), "file": (*INFO, "--json", file)}
    ended, said = run_named(2, commands, MPICOMM_TIMEOUT="12")
    assert (said, ended["tables"][1], ended["json"][1], ended["file"]) == ("", 0, 0, ("", 0))
    found: dict[str, Any] = json.loads(ended["json"][0])
    assert json.loads(file.read_text()) == found
    return ended["tables"][0], found


@pytest.fixture
def answer(shown: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(shown[1])


def test_json_is_one_complete_object(answer: dict[str, Any]) -> None:
    found = answer
    assert [info["rank"] for info in found["ranks"]] == [0, 1]
    assert len({info["pid"] for info in found["ranks"]}) == 2
    for rank, info in enumerate(found["ranks"]):
        assert (info["host"], info["node"], info["device"]) == (socket.gethostname(), 0, "cpu")
        assert (info["handle"], info["rejected"], info["device_uuid"]) == ("memfd", {}, None)
        assert info["environment"] == {"MPICOMM_TIMEOUT": "12"}
        assert info["links"][rank]["path"] == "self"
        assert info["links"][1 - rank]["path"] == "host memory"
        held = {use["purpose"]: (use["device_nbytes"], use["host_nbytes"] > 0) for use in info["memory"]}
        assert held == dict.fromkeys(("signal pads", "call log", "host arena"), (0, True))
    assert found["first_calls"] == "work"
    assert found["versions"]["mpicomm"] == mpicomm.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["mpi4py"] == mpi4py.__version__
    assert found["versions"]["MPI"].split()[0] == MPI.Get_library_version().split()[0]
    assert set(found["cuda_aware_mpi"]) == {"aware", "how"}


def test_tables_for_people(shown: tuple[str, dict[str, Any]]) -> None:
    said, _ = shown
    # All ranks have as much of the arena.
    counts = {"Ranks": 1, "host memory": 2, "MPICOMM_TIMEOUT": 1, "MPI is CUDA-aware": 1, "host arena": 1}
    assert {text: said.count(text) for text in counts} == counts


def test_tables_show_memory_of_gpus_apart_and_the_bandwidth_of_paths(answer: dict[str, Any]) -> None:
    memory = [{"purpose": "collectives: arena", "device_nbytes": 43 << 20, "host_nbytes": 4096}]
    answer["ranks"][1]["memory"] = memory
    assert answer["ranks"][1]["links"][0]["gb_s"] is None
    answer["ranks"][0]["links"][1].update(path="NVLink", gb_s=478.116)
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(*tables(answer))
    said = captured.get()
    assert "collectives: arena │ device: 44,032 KiB, host: 4 KiB" in said
    assert "NVLink 478 GB/s" in said and said.count("GB/s") == 1


def test_a_wrong_variable_is_said_once() -> None:
    job = run_job(2, *INFO, MPICOMM_TIMEOUT="soon")
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr.count("MPICOMM_TIMEOUT") == 1
    assert "Traceback" not in job.stderr


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
