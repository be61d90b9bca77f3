"""PyTorch's own tests of ``torch.distributed``, from its wheel, as a class whose tests call the backend ``mpicomm``.

PyTorch's decorators compare the name of the backend when Python imports them, and some tests want ``gloo``, ``mpi`` or,
on GPUs, ``nccl``. So this module imports PyTorch's file for each of them, and takes the tests that are not skipped.
Afterwards it names ``mpicomm`` to the tests.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI
from torch import __version__
from torch.cuda import device_count
from torch.testing._internal import common_distributed, common_utils

from mpicomm.waiting import wait_until


class _Name(str):
    """The name of the backend as the tests compare it: they treat it as the backend ``alike``."""

    alike = "gloo"
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.alike


class _NameOnGpus(_Name):
    alike = "nccl"
    __hash__ = str.__hash__


BACKEND = "mpicomm"

_FILE = "torch.testing._internal.distributed.distributed_test"
_Test = Callable[..., Any]


def _needs_gpus(count: int, **_: Any) -> Callable[[_Test], _Test]:
    return unittest.skipIf(torch.cuda.device_count() < count, f"the test needs {count} GPUs")


def _gpus_of_ranks(size: int, _: str) -> dict[int, list[int]]:
    """Return the GPU of each rank, in a list. Ranks share a GPU if there are too few."""
    return {rank: [rank % torch.cuda.device_count()] for rank in range(size)}


def _shared(device: Any) -> Any:
    """Return the GPU of the rank of that number; other values come back unchanged."""
    if isinstance(device, torch.device) and device.index is not None:
        return torch.device(device.type, _shared(device.index))
    return device % torch.cuda.device_count() if isinstance(device, int) else device


def _on_shared(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose first argument is a GPU, by default the current one."""

    def call(self: Any, device: Any = None, *arguments: Any, **keywords: Any) -> Any:
        return method(self, _shared(device), *arguments, **keywords)

    return call


_choose_gpu = torch.cuda.set_device
_begin_ddp = torch.nn.parallel.DistributedDataParallel.__init__


def _begin_shared_ddp(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **given: Any) -> None:
    gpus = None if device_ids is None else [_shared(device) for device in device_ids]
    _begin_ddp(self, module, gpus, _shared(output_device), **given)


def _import_as_for(backend: str) -> ModuleType:
    """Return a copy of PyTorch's file whose decorators take the backend for ``backend``."""
    environment = {"BACKEND": backend, "WORLD_SIZE": str(MPI.COMM_WORLD.size), "INIT_METHOD": "file://"}
    # PyTorch's decorators for GPUs end the process, but pytest has to know before a test runs. PyTorch keeps the tests
    # of groups from less than 8 ranks, although these tests need 3.
    replaced: dict[str, Any] = {
        "skip_if_lt_x_gpu": _needs_gpus,
        "skip_if_no_gpu": _needs_gpus(1),
        "skip_if_small_worldsize": lambda test: test,
        "init_multigpu_helper": _gpus_of_ranks,
    }
    original = find_spec(_FILE)
    assert original is not None
    assert original.origin is not None
    spec = spec_from_file_location(f"{_FILE}_for_{backend}", original.origin)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # pickle looks there for classes of the tests
    with mock.patch.dict(os.environ, environment), mock.patch.multiple(common_distributed, **replaced):
        spec.loader.exec_module(module)
    module.BACKEND = (_NameOnGpus if backend == "nccl" else _Name)(BACKEND)  # type: ignore[attr-defined]
    return module


_MODULES = [_import_as_for(name) for name in ("gloo", "mpi", *(["nccl"] if torch.cuda.is_available() else []))]


@contextmanager
def shared_gpus() -> Iterator[None]:
    """Let tests choose GPUs by the numbers of ranks, inside a ``with`` block."""
    with (
        mock.patch.object(torch.cuda, "set_device", lambda device: _choose_gpu(_shared(device))),
        mock.patch.object(torch.nn.Module, "cuda", _on_shared(torch.nn.Module.cuda)),
        mock.patch.object(torch.Tensor, "cuda", _on_shared(torch.Tensor.cuda)),
        mock.patch.object(torch.nn.parallel.DistributedDataParallel, "__init__", _begin_shared_ddp),
    ):
        yield


def name_method(init_method: str) -> None:
    """Let a test that makes the group of all ranks again make it by ``init_method``. Local."""
    for module in _MODULES:
        module.INIT_METHOD = init_method  # type: ignore[attr-defined]


class DistributedTests(common_utils.TestCase, _MODULES[0].DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests as methods."""

    __test__ = False  # pytest calls the methods from a test of ours

    def __init__(self, name: str, ranks: MPI.Intracomm) -> None:
        super().__init__(name)
        self._ranks = ranks
        self.rank = ranks.rank
        self.world_size = ranks.size

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # PyTorch's barrier looks ten times a second into files.
        assert wait_until(self._ranks.Ibarrier().Test, timeout), "a rank did not come to the test's barrier"


def _is_skipped(test: _Test) -> bool:
    return getattr(test, "__unittest_skip__", False)


def _tests_of(module: ModuleType) -> dict[str, _Test]:
    tests = vars(module.DistributedTest._DistTestBase)
    return {name: test for name, test in tests.items() if name.startswith("test")}


ALL = list(_tests_of(_MODULES[0]))
"""The names of all tests."""

for _module in _MODULES[1:]:
    for _name, _test in _tests_of(_module).items():
        if _is_skipped(getattr(DistributedTests, _name)) and not _is_skipped(_test):
            setattr(DistributedTests, _name, _test)

RUNNABLE = [name for name in ALL if not _is_skipped(getattr(DistributedTests, name))]
"""The names of the tests that PyTorch runs here for backends like ``mpicomm``."""

SKIPPED = dict.fromkeys(
    ("test_sparse_all_reduce_sum", "test_sparse_all_reduce_sum_cuda"),
    "mpicomm refuses sparse tensors, because it has no reduction of their indices",
) | dict.fromkeys(
    ("test_batch_isend_irecv_mixed_backend_err", "test_nccl_high_priority_stream"),
    "it makes a group of NCCL, which refuses ranks that share a GPU, and does not call the backend",
)
"""The tests that do not run with the backend ``mpicomm``, and why."""

if device_count() < MPI.COMM_WORLD.size:
    SKIPPED |= dict.fromkeys(
        ("test_ddp_logging_data_gpu", "test_DistributedDataParallel_SyncBatchNorm_half"),
        "it uses a GPU by the number of its rank, and ranks share GPUs",
    )

if tuple(map(int, __version__.split(".")[:2])) < (2, 14):
    SKIPPED["test_DistributedDataParallel"] = "later versions of PyTorch skip it on Linux, for its issue 77317"
    SKIPPED |= dict.fromkeys(
        (
            *("test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"),
            *("test_monitored_barrier_failure_order", "test_monitored_barrier_wait_all_ranks"),
        ),
        "monitored_barrier of this PyTorch refuses every backend whose name is not gloo",
    )
