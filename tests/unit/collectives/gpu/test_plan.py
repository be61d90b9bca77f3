"""Plans become graphs, in spite of interrupts."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda


class Capturing:
    """A plan that forks a stream and joins it again, and a stream that captures it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._event, self._beside = cuda.Event(disable_timing=True).ptr, cuda.Stream(non_blocking=True).ptr
        self.stream = cuda.Stream(non_blocking=True)
        self.captured: list[int] = []
        self.steps: list[Any] = [self._fork, self._join]

    def plan(self) -> Any:
        return importlib.import_module("mpicomm.collectives.gpu.plan").Plan("a call", self.steps)

    def _fork(self, stream: int) -> None:
        self.captured.append(self._cuda.captures[stream])
        self._follow(self._beside, stream)

    def _join(self, stream: int) -> None:
        self._follow(stream, self._beside)

    def _follow(self, stream: int, other: int) -> None:
        self._cuda.eventRecord(self._event, other)
        self._cuda.streamWaitEvent(stream, self._event)


@pytest.fixture
def capturing(cuda: FakeCuda) -> Capturing:
    return Capturing(cuda)


def test_a_graph_is_launched_in_place_of_the_steps(cuda: FakeCuda, capturing: Capturing) -> None:
    plan = capturing.plan()
    plan.make_graph(capturing.stream)
    plan.launch(9)
    (capture,) = capturing.captured
    assert cuda.launched == [(capture, 9)] and not cuda.captures


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["before", "between", "behind"])
def test_what_interrupts_a_capture_goes_on(
    cuda: FakeCuda, capturing: Capturing, interruption: type[BaseException], where: str
) -> None:
    interrupts = True

    def interrupt(stream: int) -> None:
        if interrupts:
            raise interruption

    capturing.steps.insert(["before", "between", "behind"].index(where), interrupt)
    plan = capturing.plan()
    with pytest.raises(interruption):
        plan.make_graph(capturing.stream)
    assert plan.launch is None and not cuda.captures
    interrupts = False
    plan.make_graph(capturing.stream)
    assert plan.launch is not None


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["begin", "begun"])
def test_what_interrupts_the_beginning_of_a_capture_goes_on(
    cuda: FakeCuda, capturing: Capturing, interruption: type[BaseException], where: str
) -> None:
    plan = capturing.plan()
    if where == "begin":
        cuda.refuses["streamBeginCapture"] = interruption
    else:
        cuda.interrupts["streamBeginCapture"] = interruption()
    with pytest.raises(interruption):
        plan.make_graph(capturing.stream)
    assert plan.launch is None and not cuda.captures
    cuda.refuses.clear()
    plan.make_graph(capturing.stream)
    assert plan.launch is not None
