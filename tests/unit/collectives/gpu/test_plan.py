"""Plans become graphs, in spite of interrupts, and copy beside kernels, in captures that are open at once, too."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda


class Capturing:
    """A plan that forks a stream and joins it again, and the part of a backend that captures it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._event, self._beside = cuda.Event(disable_timing=True).ptr, cuda.Stream(non_blocking=True).ptr
        self.captured: list[int] = []
        self.steps: list[Any] = [self._fork, self._join]

    def plan(self) -> Any:
        return importlib.import_module("mpicomm.collectives.gpu.plan").Plan("a call", self.steps)

    def capture(self, enqueue: Callable[[int], object]) -> Any:
        return importlib.import_module("mpicomm.devices.cuda.launches").LaunchGraph(None, 8, enqueue)

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
    plan.launch_graph(capturing, 9)
    plan.launch(10)
    (capture,) = capturing.captured
    assert cuda.launched == [(capture, 9), (capture, 10)] and not cuda.captures and not cuda.graphs
    plan.drop_graph()
    assert plan.launch is None and "cuGraphExecDestroy" in cuda.calls


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", [0, 1, 2, "begin", "begun", "instantiate"])
def test_what_interrupts_a_capture_goes_on(
    cuda: FakeCuda, capturing: Capturing, interruption: type[BaseException], where: int | str
) -> None:
    interrupts = True

    def interrupt(stream: int) -> None:
        if interrupts:
            raise interruption

    if isinstance(where, int):
        capturing.steps.insert(where, interrupt)
    elif where == "begin":
        cuda.refuses["cuStreamBeginCapture"] = interruption
    elif where == "begun":
        cuda.interrupts["cuStreamBeginCapture"] = interruption()
    else:
        cuda.refuses["cuGraphInstantiate"] = interruption
    plan = capturing.plan()
    with pytest.raises(interruption):
        plan.launch_graph(capturing, 9)
    assert plan.launch is None and not cuda.captures and not cuda.graphs
    interrupts = False
    cuda.refuses.clear()
    plan.launch_graph(capturing, 9)
    assert plan.launch is not None


@pytest.fixture
def copies(cuda: FakeCuda) -> Iterator[Any]:
    loader = importlib.import_module("mpicomm.collectives.gpu.plan").StepLoader(None, None)
    yield loader
    loader.close()


def enqueue(cuda: FakeCuda, copies: Any, stream: int, source: int) -> None:
    """The streams of plans with copies: two forks with their joins, and a copy after the first fork.

    Kernels beside them show whether the copies follow the work before the fork, and are over after the join.
    """
    capture = cuda.captures.get(stream)
    cuda.copied.clear()
    cuda.enqueue(stream, partial(cuda.copied.append, "ahead"))
    steps = importlib.import_module("mpicomm.collectives.gpu.algorithms.base")  # the one that the loader has
    rows = (3, 2, 1) if source % 2 else ()
    fork, copy, join = copies.enqueuers([steps.Fork(), steps.Copy(0, source, 1, False, *rows), steps.Join()])
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
    """Streams of captures that are over are used again, but none of a failed capture before the capture ends."""
    rng = Random(1)
    for number in range(400):
        stream, action = rng.randrange(1, 4), rng.choice(("begin", "copy", "copy", "fail", "end"))
        capture = cuda.captures.get(stream)
        if action == "copy" and capture not in cuda.invalid:
            enqueue(cuda, copies, stream, number)
        elif capture is None and action == "begin":
            cuda.cuStreamBeginCapture(stream, cuda.relaxed)
        elif capture is not None and action == "fail":
            cuda.invalid.add(capture)
        elif capture is not None and action == "end":
            cuda.cuStreamEndCapture(stream)
    assert len(cuda.streams) <= 4  # one for each open capture, and one beside them
