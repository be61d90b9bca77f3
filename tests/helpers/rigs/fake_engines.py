"""The engine of GPUs by itself, over a CUDA that launches nothing."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.errors import MpicommError
from mpicomm.kernels.team import Faults
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mappings
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.inputs import patterns

BYTE = np.dtype(np.uint8)
STREAM = 7


class Rig:
    """The engine of one of ``size`` ranks. The others send and know as much."""

    def __init__(
        self,
        cuda: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
        most_nbytes: int | None = None,
        *,
        ranks_per_device: int = 1,
        rank: int = 0,
        size: int = 2,
    ) -> None:
        modules = "collectives.gpu.engine", "collectives.gpu.call_memory", "devices.cuda.launches"
        engine, arena, launches = (importlib.import_module(f"mpicomm.{module}") for module in modules)
        self.launched: list[Any] = []
        """The arguments of each launch."""
        self.shapes: list[dict[str, Any]] = []
        self.expected: list[Variant] = []
        """The kernels that the engine expects to need."""
        self.posted: list[str] = []
        self.failures: dict[str, MpicommError] = {}
        """The errors of memory that the ranks share, by its purpose."""
        self.tried: list[str] = []
        """The purposes of the memory that the ranks have set up, or tried to."""

        def launcher(variant: Variant, x: Any, blocks: int, threads: int, *, early: bool) -> Any:
            def launch(stream: int) -> None:
                self.launched.append(x)
                self.shapes.append({"blocks": blocks, "threads": threads, "early": early, "variant": variant})

            return SimpleNamespace(launch=launch)

        kernels = SimpleNamespace(
            find=lambda variant: SimpleNamespace(launcher=partial(launcher, variant)), expect=self.expected.extend
        )
        monkeypatch.setattr(cuda, "getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(engine, "kernels_of", lambda info: kernels)
        monkeypatch.setattr(arena, "share", self._share)
        monkeypatch.setenv("MPICOMM_TUNING", "off")
        self._size = size
        ranks = [*range(size)]
        node: Any = SimpleNamespace(rank=rank, size=size, ranks=ranks, timeout_s=5.0, allgather=self._allgather)
        backend: Any = SimpleNamespace(
            info=DeviceInfo(0, "NVIDIA H200", b"0" * 16, "", -1, (9, 0)),
            multiprocessors=132,
            total_nbytes=140 << 30,
            faults=Faults(),
            timeout_ns=10**9,
            link=lambda uuid, kind: Link("NVLink", gb_s=478.0),
            loading=contextlib.nullcontext,
            capture=partial(launches.LaunchGraph, None, STREAM + 1),
            current=contextlib.nullcontext,
            permanent_streams={0},
            scratch=lambda nbytes: (3 << 50) + nbytes,
            pack_table=lambda table: 5 << 50,
        )
        call_log: Any = SimpleNamespace(
            post=lambda text, count=0, offset=None, *, ready=False: self.posted.append(text),
            differ=lambda: False,
            behind=list,
            publish_ready=lambda: None,
            not_ready=list,
        )
        self.engine = engine.DeviceEngine(node, backend, "ipc", call_log, ranks_per_device, most_nbytes)

    def alltoallv(self, nbytes: int) -> Any:
        """Return the plan of a call in which each rank sends so much to each."""
        spans = [Span(1 << 50, nbytes), Span(1 << 51, nbytes)]
        pattern = patterns.alltoall(0, 2, BYTE, spans, [Span(1 << 52, nbytes), Span(1 << 53, nbytes)])
        signature = Signature("Alltoallv", "uint8")
        return self.engine.prepare_step(pattern.operation, pattern.buffers, (str(signature), signature.hash32), "auto")

    def run(self, call: Call, asked: str = "auto") -> tuple[Any, list[Any], list[dict[str, Any]]]:
        """Read and enqueue a call; return its plan, and the arguments and shapes of its launches."""
        plan, begin = self.engine.prepare_call(call, Mappings(), asked), len(self.launched)
        self.enqueue(plan)
        return plan, self.launched[begin:], self.shapes[begin:]

    def enqueue(self, plan: Any) -> None:
        self.engine.enqueue(plan, STREAM)

    def _allgather(self, what: str, work: Any) -> list[Any]:
        own = work()
        return [BUILT_IN if own is None else own] * self._size  # the first rank has the table

    def _share(self, node: Any, backend: Any, what: str, produce: Any, signature: Any) -> Any:
        self.tried.append(what)
        if what in self.failures:
            raise self.failures[what]
        segments = [SimpleNamespace(pointer=(rank + 1) << 40, nbytes=signature()) for rank in range(self._size)]
        return _Segments(segments)


class _Segments(list[Any]):
    @property
    def pointers(self) -> list[int]:
        return [each.pointer for each in self]

    @property
    def own(self) -> Any:
        return self[0]
