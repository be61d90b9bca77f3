"""Calls of neighbours on device arrays go to the engine of GPUs; here the engine of the host stands for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.device_calls import Engine, on_host_engine
from tests.helpers.rigs.message_rigs import Rig, take_for_gpu
from tests.helpers.rigs.topologies import CALLS, TOPOLOGIES, NeighborCall, fails_in_open_mpi, result_of_mpi


@pytest.fixture(params=TOPOLOGIES)
def made(request: pytest.FixtureRequest, rig: Rig) -> Iterator[Any]:
    """A communicator with a topology; its ranks have a device of threads."""
    made: Any = TOPOLOGIES[request.param](rig.comm)
    made.gpu = take_for_gpu(made)
    yield made
    made.Free()


@pytest.fixture
def engine(made: Any) -> Iterator[Engine]:
    with on_host_engine(made) as engine:
        yield engine


def check_all(made: Any, **how: str) -> None:
    for turn, name in enumerate(CALLS):
        if fails_in_open_mpi(made, name):
            continue
        call = NeighborCall(name, made)
        for form in FORMS:
            sent, received = (DeviceArray(made.gpu, content) for content in (call.sent(turn), call.nothing()))
            method = method_name(form, f"Neighbor_{call.name}")
            complete(getattr(made, method)(*call.arguments(sent, received), **how))
            expected = result_of_mpi(made, call, turn)
            assert received.get().tolist() == expected.tolist(), f"{form} {name}"
        call.free()


def test_every_form_goes_to_the_engine(made: Any, engine: Engine) -> None:
    check_all(made)
    carried_out = sum(not fails_in_open_mpi(made, name) for name in CALLS)
    assert engine.calls == carried_out * len(FORMS)


def test_mpi_carries_out_the_calls_that_ask_for_it(made: Any, engine: Engine) -> None:
    check_all(made, algorithm="mpi")
    assert engine.calls == 0
