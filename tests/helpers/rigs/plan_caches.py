"""Caches of plans on a device that carries nothing out, and arrays of libraries that are not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, in_order
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.symmetric.registry import Mappings
from mpicomm.ways.dispatch import OnGpus


class Array:
    """The attributes of CuPy's arrays that distinguish them."""

    def __init__(self, pointer: int, shape: tuple[int, ...] = (4,), dtype: str = "f4", order: str = "C") -> None:
        like = np.zeros(shape, dtype, order="F" if order == "F" else "C")
        if order == "pieces":
            like = np.zeros((*shape, 2), dtype)[..., 0]
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.shape, self.strides, self.size, self.dtype = like.shape, like.strides, like.size, like.dtype
        self.itemsize = like.itemsize
        self._c_contiguous, self._f_contiguous = like.flags.c_contiguous, like.flags.f_contiguous


class Dtype(str):
    """The type of elements of a `Tensor`."""

    __slots__ = ()
    is_complex = True  # so that a tensor may be a view with conjugate numbers


class Tensor:
    """The attributes of PyTorch's tensors that distinguish them."""

    def __init__(
        self, pointer: int | None, count: int = 4, dtype: str = "float32", step: int = 1, **says: bool
    ) -> None:
        self._pointer, self._step = pointer, step
        self.is_cuda = not says.get("on_host", False)
        self.shape, self.dtype = (count,), Dtype(dtype)
        self._says = says
        self.requires_grad = says.get("requires_grad", False)

    def data_ptr(self) -> int:
        if self._pointer is None:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self._pointer

    itemsize = 4

    def get_device(self) -> int:
        return 0

    def numel(self) -> int:
        return self.shape[0]

    def stride(self) -> tuple[int, ...]:
        return (self._step,)

    def is_contiguous(self) -> bool:
        return self._step == 1

    def dim(self) -> int:
        return 1

    def is_conj(self) -> bool:
        return self._says.get("conj", False)

    def is_neg(self) -> bool:
        return self._says.get("neg", False)


def arguments(send: Any, receive: Any, op: MPI.Op | None = MPI.SUM, **others: Any) -> Arguments:
    return Arguments(send, receive, op, **others)


class Known:
    """The known calls of a device that carries nothing out."""

    def __init__(self) -> None:
        self.mappings = Mappings()
        self.usable: Exception | None = None
        self.enqueued: list[tuple[Any, Any]] = []
        self.met: list[bool] = []
        """Whether the ranks met on the host before each of these."""
        self.streams: list[Any] = []
        self.done = False
        event = SimpleNamespace(passed=lambda: self.done)
        completions = SimpleNamespace(take=lambda: event)
        backend = SimpleNamespace(stream=lambda stream, array: stream or array, completes=False)
        session: Any = SimpleNamespace(mappings=self.mappings, backend=backend, require_usable=self._require_usable)
        self.runs = True  # the stream is not in a capture
        engine: Any = SimpleNamespace(enqueue=self._enqueue, completions=completions)
        self._calls = PlanCache(session, engine)

    def _require_usable(self, what: str) -> None:
        if self.usable is not None:
            raise self.usable

    def _enqueue(self, plan: Any, stream: Any, event: Any = None, meets: bool = False) -> bool:
        self.enqueued.append((plan, stream))
        self.met.append(meets)
        return self.runs

    def add(self, operation: str, given: Arguments, algorithm: str = "auto", *, by_output: bool = False) -> Any:
        plan: Any = SimpleNamespace(text=operation)
        call = (OPERATIONS[operation], algorithm, *in_order(given))
        self._calls.add(plan, call, by_output=by_output)
        return plan

    def find(self, operation: str, given: Arguments, algorithm: str = "auto", stream: Any = 7) -> Any:
        """Return the plan that is enqueued, if any."""
        call = (OPERATIONS[operation], algorithm, *in_order(given))
        found = self._calls.find(*call)
        if found is None:
            return None
        assert self._calls.enqueue(found, stream, given.send, given.receive) == self.runs
        plan, where = self.enqueued.pop()
        self.streams.append(where)
        return plan

    def start(self, operation: str, given: Arguments) -> MPI.Request:
        """Start a known call; return its request."""
        session: Any = self._calls._session
        session.backend.check, session.backend.prepare_thread = (lambda: None), lambda: None
        engines: Any = SimpleNamespace(gpu=self._calls)
        votes: Any = SimpleNamespace(vote_for_gpus=lambda: None)
        way = OnGpus(session, engines, votes)
        fields = [getattr(given, name) for name in Arguments.__slots__]
        request = way.start_known(OPERATIONS[operation], 7, "auto", tuple(fields))
        assert request is not None
        return request


def install_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `Array` be CuPy's array and `Tensor` PyTorch's."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
