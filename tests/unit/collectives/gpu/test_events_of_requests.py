"""The events by which requests of collectives know that they are done, over a CUDA that launches nothing."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.ways.dispatch import OnGpus
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.rigs.fake_engines import Rig

FIRST, SIDE, LATER = 3, 4, 5


def test_a_collective_does_not_wait_for_a_message_that_comes_only_after_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer sends the message behind the same collective, which this rank enqueues after its receive."""
    rig = Rig(cuda, monkeypatch)
    plan = rig.alltoallv(4096)
    context = SimpleNamespace(current=nullcontext)
    backend: Any = importlib.import_module("mpicomm.devices.cuda.streams").StreamsOfGpu(0, context)
    backend.check = backend.prepare_thread = lambda: None

    def enqueue(known: Any, stream: int, send: Any, receive: Any, event: Any, vote: Any) -> bool:
        return rig.engine.enqueue(plan, stream, event)  # type: ignore[no-any-return]

    gpu = SimpleNamespace(engine=rig.engine, find=lambda *call: plan, enqueue=enqueue)
    session: Any = SimpleNamespace(backend=backend)
    engines: Any = SimpleNamespace(gpu=gpu)
    votes: Any = SimpleNamespace(vote_for_gpus=lambda: None)
    way = OnGpus(session, engines, votes)
    request = way.start_known(ALLTOALLV, FIRST, "auto", (None, None, None, 0, None, None, None))
    assert request is not None
    cuda.finish()
    request.Wait()

    collective: list[Any] = []
    cuda.enqueue(SIDE, int, lambda: bool(collective) and cuda.is_over(collective[0]))
    arrived = backend.completion(SIDE)
    rig.engine.enqueue(plan, LATER)
    collective.append(cuda.end_of(LATER))
    cuda.finish()  # it fails if the work of the streams waits in a circle
    assert arrived()
