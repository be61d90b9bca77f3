"""Collectives on device arrays without GPUs: the engine of the host stands for the engine of GPUs.

The dispatcher, the call log and the arguments are real, and so are the ranks. A device array is an array of a
`ThreadDevice`, or only its address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call import Call
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.inputs import patterns
from tests.helpers.references.simulated_neighbors import Part
from tests.helpers.rigs.communicators import array_module, communicator, complete, patience_s
from tests.helpers.rigs.message_rigs import Rig, take_for_gpu

Array = npt.NDArray[Any]

SMALL = 4096  # bytes per slot: many chunks without many bytes
CALL = Signature("Test", "any")
FLOAT32 = np.dtype(np.float32)


class Engine:
    """The engine of GPUs as the dispatcher sees it, and the number of calls that it has carried out."""

    completions = SimpleNamespace(acquire=lambda: SimpleNamespace(is_done=bool))
    """Events that nothing records."""

    def __init__(self, host: HostEngine, post: Callable[[str], None]) -> None:
        self._host = host
        self._post = post
        self.calls = 0

    def prepare_call(self, call: Call, mappings: object, asked: str) -> Any:
        text = str(call.signature)
        self._post(text)
        part = Part(call, strided=True)
        return SimpleNamespace(part=part, text=text, is_new=True, template_of=None, by_output=False, by_address=False)

    def enqueue(self, plan: Any, stream: int, event: object = None, host_barrier: bool = False) -> bool:
        if not plan.is_new:
            self._post(plan.text)
        plan.is_new = False
        self.calls += 1
        plan.part.pack()
        self._host.run([plan.part.exchange], CALL)
        plan.part.unpack()
        return False


@contextlib.contextmanager
def on_host_engine(comm: Any) -> Iterator[Engine]:
    """Let a communicator whose GPU is a `ThreadDevice` carry out calls on device arrays. Collective over all ranks."""
    session = comm._session
    made = engine_of(MPI.COMM_WORLD, timeout_s=session.placement.here.timeout_s, by_mpi=session.call_by_mpi)
    with made as (host, _, _), pytest.MonkeyPatch.context() as patch:
        engines = comm._collectives.engines
        engine = Engine(host, lambda text: engines.node_log("test").post(text))
        cache = PlanCache(comm._session, engine)  # type: ignore[arg-type]

        def on_gpu(operation: str) -> PlanCache:
            if engines.gpu is None:
                comm._session.set_up(operation).group.barrier("set-up of the engine")
                engines.gpu = cache
            return cache

        patch.setattr(engines, "on_gpu", on_gpu)
        yield engine


def on_gpu(rig: Rig, content: Any) -> Any:
    return DeviceArray(rig.device, np.asarray(content))


def values_of(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()  # also an array of CuPy


@contextlib.contextmanager
def on_gpus(
    device: str, derived_layout: Callable[[Any], Any] = lambda comm: comm.Dup(), timeout_s: float | None = None
) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """A communicator of GPUs, real ones or threads, ``derived_layout`` another one, and how its arrays are made."""
    with communicator(device, timeout_s=timeout_s or patience_s(device)) as comm, array_module(comm) as xp:
        child = derived_layout(comm)
        if device == "cpu":
            of_threads = take_for_gpu(child)
            with on_host_engine(child):
                yield child, lambda content: DeviceArray(of_threads, content)
        else:
            yield child, xp.asarray
        child.Free()


MAKERS: dict[str, Callable[[Rig, Any], Any]] = {"gpu": on_gpu, "host": lambda rig, content: np.array(content)}


def call(comm: mpicomm.Communicator, method: str, *arguments: Any, **keywords: Any) -> None:
    complete(getattr(comm, method)(*arguments, **keywords), starts=2)


def require_one_carrier(engine: Engine) -> None:
    """Assert that all ranks have called kernels equally often."""
    assert len(set(MPI.COMM_WORLD.allgather(engine.calls))) == 1


@contextlib.contextmanager
def engine_of(
    comm: MPI.Intracomm,
    *,
    slot_nbytes: int = SMALL,
    slots: int = 2,
    first: int = 0,
    timeout_s: float = 20.0,
    by_mpi: Callable[[int], str] = lambda rank: "",
) -> Iterator[tuple[HostEngine, CallLog, Group]]:
    """An engine of all ranks; given back in two steps, as a communicator does it, also if it is broken."""
    private = comm.Dup()
    node = Group(private, range(comm.size), timeout_s)
    call_log = CallLog(node, by_mpi=by_mpi)
    engine = HostEngine(node, call_log, slot_nbytes=slot_nbytes, slots=slots, first=first)
    try:
        yield engine, call_log, node
    finally:
        for part in (engine, call_log):
            part.close_peers()
            comm.Barrier()
            part.close_own()
        private.Free()


def meet(comm: MPI.Intracomm, engine: HostEngine) -> None:
    """A call that no rank leaves before all have come."""
    met = np.zeros(comm.size, np.float32)
    mine = span(met[comm.rank : comm.rank + 1])
    engine.run(patterns.allgather(comm.rank, comm.size, FLOAT32, mine, spans(met, [1] * comm.size)), CALL)


def span(array: Array) -> Span:
    assert array.flags.c_contiguous
    return Span(array.ctypes.data, array.size)


def spans(array: Array, counts: Sequence[int]) -> list[Span]:
    displs = [sum(counts[:index]) for index in range(len(counts))]
    return patterns.blocks(array.ctypes.data, counts, displs, array.itemsize)
