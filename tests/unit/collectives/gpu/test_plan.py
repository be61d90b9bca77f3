"""Plans become graphs, in spite of interrupts, and copy beside kernels, in captures that are open at once, too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
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


@pytest.fixture
def copies(cuda: FakeCuda) -> Iterator[Any]:
    loader = importlib.import_module("mpicomm.collectives.gpu.plan").StepLoader(None, None)
    yield loader
    loader.close()


def begin_capture(cuda: FakeCuda, stream: int) -> int:
    cuda.streamBeginCapture(stream, cuda.streamCaptureModeRelaxed)
    return cuda.captures[stream]


def enqueue(cuda: FakeCuda, copies: Any, stream: int, source: int) -> None:
    """The streams of plans with copies: two forks with their joins, and a copy after the first fork.

    Kernels beside them show whether the copies follow the work before the fork, and are over after the join.
    """
    capture = cuda.captures.get(stream)
    cuda.copied.clear()
    cuda.enqueue(stream, partial(cuda.copied.append, "ahead"))
    steps = importlib.import_module("mpicomm.collectives.gpu.algorithms.steps")  # the one that the loader has
    fork, copy, join = copies.enqueuers([steps.Fork(), steps.Copy(0, source, 1), steps.Join()])
    for step in (fork, copy, join):
        step(stream)
    cuda.enqueue(stream, partial(cuda.copied.append, "behind"))
    for step in (copy, fork, join):
        step(stream)
    cuda.finish()
    copied = source, capture
    assert cuda.copied[:2] == ["ahead", copied]
    assert cuda.copied[2:] in (["behind", copied], [copied, "behind"])
    assert cuda.captures.get(stream) == capture


def test_copies_go_on_while_captures_are_open(cuda: FakeCuda, copies: Any) -> None:
    for stream in (1, 2):
        begin_capture(cuda, stream)
    for stream in (1, 3, 2, 1, 3, 3, 2, 2, 1):
        enqueue(cuda, copies, stream, 70 + stream)
    cuda.streamEndCapture(1)
    for stream in (1, 2):
        enqueue(cuda, copies, stream, 80 + stream)
    cuda.streamEndCapture(2)


def test_streams_of_captures_that_are_over_are_used_again(cuda: FakeCuda, copies: Any) -> None:
    for _ in range(10):
        for stream in (1, 2):
            begin_capture(cuda, stream)
            enqueue(cuda, copies, stream, 7)
        enqueue(cuda, copies, 3, 7)
        for stream in (1, 2):
            cuda.streamEndCapture(stream)
    assert len(cuda.streams) == 3


def test_a_stream_of_a_failed_capture_is_not_used_until_the_capture_ends(cuda: FakeCuda, copies: Any) -> None:
    failed = begin_capture(cuda, 1)
    enqueue(cuda, copies, 1, 7)
    cuda.invalid.add(failed)
    begin_capture(cuda, 2)
    enqueue(cuda, copies, 2, 8)
    cuda.streamEndCapture(1)
    begin_capture(cuda, 3)
    enqueue(cuda, copies, 3, 9)
    for stream in (2, 3):
        cuda.streamEndCapture(stream)
    assert len(cuda.streams) == 3
