"""A completion says when the work of a stream is done."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda, Place

STREAMS = (1, 2, 3)


@pytest.fixture
def completions(cuda: FakeCuda) -> Any:
    made = importlib.import_module("mpicomm.devices.cuda.completion").Completions()
    made.grow()
    return made


@pytest.mark.parametrize("cuda", range(20), indirect=True)
def test_it_says_when_the_work_of_its_stream_is_done(cuda: FakeCuda, completions: Any) -> None:
    pending: list[tuple[Place, Callable[[], bool]]] = []
    for _ in range(100):
        stream = cuda.rng.choice(STREAMS)
        cuda.enqueue(stream, int)
        if cuda.rng.random() < 0.7:
            done = completions.after(stream)
            pending.append((cuda.end_of(stream), done))
        if pending and cuda.rng.random() < 0.1:  # the caller drops it
            pending.pop(cuda.rng.randrange(len(pending)))
        cuda.go_on()
        for each in list(pending):
            place, done = each
            assert done() == cuda.is_over(place)
            if cuda.is_over(place):  # no caller comes again
                pending.remove(each)


def test_any_number_of_them_is_in_flight(cuda: FakeCuda, completions: Any) -> None:
    asked = [completions.after(1) for _ in range(3000)]
    assert not any(done() for done in asked)
    cuda.finish()
    assert all(done() for done in asked)


def test_it_raises_after_the_device_has_failed(cuda: FakeCuda, completions: Any) -> None:
    done = completions.after(1)
    cuda.refuses["cuEventQuery"] = HandleError
    with pytest.raises(HandleError):
        for _ in range(1000):
            done()


def test_one_that_is_asked_after_the_end_of_its_pool_answers(cuda: FakeCuda, completions: Any) -> None:
    done = completions.after(1)
    completions.close()
    assert not done()
    cuda.finish()
    assert done()
