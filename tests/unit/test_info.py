"""What ``python -m mpicomm.info`` says of MPI and of the choice of algorithms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mpi4py import MPI

from mpicomm.cluster import process as cuda_aware
from mpicomm.info import algorithms


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
