"""The bench's advice which package to install for a library that is missing."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.bench.nccl import SymmetricNccl
from mpicomm.bench.nvshmem_host import Nvshmem
from mpicomm.bench.torch_peers import TorchSymmetric
from mpicomm.devices.cuda import nccl


@pytest.fixture(params=[12, 13])
def major(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The major version of CuPy's CUDA."""
    major: int = request.param
    runtime = SimpleNamespace(runtimeGetVersion=lambda: major * 1000 + 90)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    return major


def test_packages_fit_the_cuda_in_use(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_path", lambda: "libnccl-of-nowhere.so")
    nccl.load.cache_clear()
    assert str(SymmetricNccl.missing()).endswith(f": pip install nvidia-nccl-cu{major}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Nvshmem.missing() == f"not installed: pip install nvshmem4py-cu{major}"


def test_a_nccl_without_windows_is_too_old(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "has", lambda name: False)
    monkeypatch.setattr(nccl, "version", lambda: "2.26.5")
    reason = f"NCCL 2.26.5 has no symmetric windows: pip install 'nvidia-nccl-cu{major}>=2.27'"
    assert SymmetricNccl.missing() == reason


@pytest.mark.parametrize("cuda", [None, "12.9"])
def test_a_torch_without_cuda_will_not_do(cuda: str | None, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = SimpleNamespace(__version__="2.11.0", version=SimpleNamespace(cuda=cuda))
    torch.__spec__ = ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = f"torch 2.11.0 is without CUDA: install one that is built for CUDA {major}"
    assert TorchSymmetric.missing() == (reason if cuda is None else None)
