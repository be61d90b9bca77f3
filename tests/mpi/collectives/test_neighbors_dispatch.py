"""Calls of neighbours on device arrays go to the engine of GPUs; here the engine of the host stands for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.host.engine import HostEngine
from tests.helpers.host_engines import CALL, engine_of
from tests.helpers.message_devices import DeviceArray, take_for_gpu
from tests.helpers.message_rigs import Rig
from tests.helpers.simulated_neighbors import Part
from tests.helpers.topologies import CALLS, TOPOLOGIES, NeighborCall, fails_in_open_mpi, result_of_mpi


class Engine:
    """What the dispatcher asks of the engine of GPUs, and the number of the calls that it has carried out."""

    def __init__(self, host: HostEngine) -> None:
        self._host = host
        self.calls = 0

    def prepare_call(self, call: Call, mappings: object, asked: str) -> Any:
        return SimpleNamespace(part=Part(call), text=str(call.signature), is_old=False)

    def enqueue(self, plan: Any, stream: int, *, again: bool = False) -> bool:
        self.calls += 1
        plan.part.pack()
        self._host.run([plan.part.exchange], CALL)
        plan.part.unpack()
        return False

    def completion(self) -> Callable[[], bool]:
        return lambda: True


@pytest.fixture(params=TOPOLOGIES)
def made(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Any]:
    """A communicator with a topology; its ranks have a device of threads."""
    made: Any = TOPOLOGIES[request.param](rig.comm)
    made.gpu = take_for_gpu(made)
    yield made
    made.Free()


@pytest.fixture
def engine(made: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with engine_of(MPI.COMM_WORLD) as (host, _, _):
        engine = Engine(host)
        collectives: Any = made._collectives
        cache = PlanCache(made._session, engine)  # type: ignore[arg-type]
        monkeypatch.setattr(collectives.engines, "on_gpu", lambda operation: cache)
        yield engine


def blocking(made: Any, name: str, given: Any, **how: str) -> None:
    getattr(made, f"Neighbor_{name}")(*given, **how)


def nonblocking(made: Any, name: str, given: Any, **how: str) -> None:
    getattr(made, f"Ineighbor_{name}")(*given, **how).Wait()


def persistent(made: Any, name: str, given: Any, **how: str) -> None:
    request = getattr(made, f"Neighbor_{name}_init")(*given, **how)
    request.Start()
    request.Wait()
    request.Free()


FORMS = (blocking, nonblocking, persistent)


def check_all(made: Any, **how: str) -> None:
    for turn, name in enumerate(CALLS):
        if fails_in_open_mpi(made, name):
            continue
        call = NeighborCall(name, made)
        for form in FORMS:
            sent, received = (DeviceArray(made.gpu, content) for content in (call.sent(turn), call.nothing()))
            form(made, call.name, call.arguments(sent, received), **how)
            assert received.get().tolist() == result_of_mpi(made, call, turn).tolist(), f"{form.__name__} {name}"
        call.free()


def test_every_form_goes_to_the_engine(made: Any, engine: Engine) -> None:
    check_all(made)
    carried_out = sum(not fails_in_open_mpi(made, name) for name in CALLS)
    assert engine.calls == carried_out * len(FORMS)


def test_mpi_carries_out_what_it_is_asked_to(made: Any, engine: Engine) -> None:
    check_all(made, algorithm="mpi")
    assert engine.calls == 0
