"""PyTorch's own tests of ``torch.distributed``, from its wheel, as a class whose tests call the backend ``mpicomm``.

PyTorch's decorators compare the name of the backend when Python imports them, and some tests want ``gloo`` or ``mpi``.
So this imports PyTorch's file as for each of the two, takes from each what it does not skip, and names ``mpicomm`` to
the tests afterwards.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI
from torch.testing._internal import common_distributed, common_utils

from mpicomm.waiting import wait_until


class _Name(str):
    """The name of the backend as the tests compare it: they do on the host what they do with gloo."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"


BACKEND = "mpicomm"

_FILE = "torch.testing._internal.distributed.distributed_test"
_Test = Callable[..., Any]


def _needs_gpus(count: int, **_: Any) -> Callable[[_Test], _Test]:
    return unittest.skipIf(torch.cuda.device_count() < count, f"the test needs {count} GPUs")


def _import_as_for(backend: str) -> ModuleType:
    """Return a copy of PyTorch's file whose decorators take the backend for ``backend``."""
    environment = {"BACKEND": backend, "WORLD_SIZE": str(MPI.COMM_WORLD.size), "INIT_METHOD": "file://"}
    # PyTorch's decorators for GPUs end the process, but pytest has to know before a test runs. PyTorch keeps the tests
    # of groups from less than 8 ranks, although these tests need 3.
    decorators: dict[str, Any] = {
        "skip_if_lt_x_gpu": _needs_gpus,
        "skip_if_no_gpu": _needs_gpus(max(1, MPI.COMM_WORLD.size)),
        "skip_if_small_worldsize": lambda test: test,
    }
    original = find_spec(_FILE)
    assert original is not None
    assert original.origin is not None
    spec = spec_from_file_location(f"{_FILE}_for_{backend}", original.origin)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # pickle looks there for classes of the tests
    with mock.patch.dict(os.environ, environment), mock.patch.multiple(common_distributed, **decorators):
        spec.loader.exec_module(module)
    module.BACKEND = _Name(BACKEND)  # type: ignore[attr-defined]
    return module


_MODULES = [_import_as_for(backend) for backend in ("gloo", "mpi")]


def name_method(init_method: str) -> None:
    """Let a test that makes the group of all ranks again make it by ``init_method``. Local."""
    for module in _MODULES:
        module.INIT_METHOD = init_method  # type: ignore[attr-defined]


class DistributedTests(common_utils.TestCase, _MODULES[0].DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, each a method."""

    __test__ = False  # pytest calls the methods from a test of ours

    def __init__(self, name: str, ranks: MPI.Intracomm) -> None:
        super().__init__(name)
        self._ranks = ranks
        self.rank = ranks.rank
        self.world_size = ranks.size

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # PyTorch's own looks ten times a second into files.
        assert wait_until(self._ranks.Ibarrier().Test, timeout), "a rank did not come to the test's barrier"


def _is_skipped(test: _Test) -> bool:
    return getattr(test, "__unittest_skip__", False)


def _tests_of(module: ModuleType) -> dict[str, _Test]:
    tests = vars(module.DistributedTest._DistTestBase)
    return {name: test for name, test in tests.items() if name.startswith("test")}


ALL = list(_tests_of(_MODULES[0]))
"""The names of all tests."""

for _name, _test in _tests_of(_MODULES[1]).items():
    if _is_skipped(getattr(DistributedTests, _name)) and not _is_skipped(_test):
        setattr(DistributedTests, _name, _test)

RUNNABLE = [name for name in ALL if not _is_skipped(getattr(DistributedTests, name))]
"""The names of the tests that PyTorch does not keep from a backend with the calls of gloo and MPI, here."""
