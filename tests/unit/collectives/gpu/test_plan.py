"""Plans become graphs, whatever interrupts that: on streams that only know whether they capture."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="kernels are loaded with cuda-bindings")

MODULES = ("devices.cuda.local_event", "devices.cuda.completion", "devices.cuda.stream_order", "collectives.gpu.plan")


class CUDARuntimeError(RuntimeError):
    pass


class Stream:
    """One that captures, and does not end that well while another stream has not joined it again."""

    ptr = 5

    def __init__(self) -> None:
        self.captures = self.is_forked = False
        self.interruption: tuple[str, type[BaseException]] | None = None
        """At which point of the beginning of a capture, and by what."""

    def begin_capture(self, mode: int) -> None:
        assert not self.captures
        self._interrupt("begin")
        self.captures = True
        self._interrupt("begun")

    def end_capture(self) -> SimpleNamespace:
        if not self.captures:
            raise CUDARuntimeError("cudaErrorIllegalState")
        self.captures = False
        if self.is_forked:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")
        return SimpleNamespace(graphExec=17)

    def fork(self, stream: int) -> None:
        self.is_forked = True

    def join(self, stream: int) -> None:
        self.is_forked = False

    def _interrupt(self, where: str) -> None:
        if self.interruption is not None and self.interruption[0] == where:
            raise self.interruption[1]


@pytest.fixture
def launched() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def plan_type(launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = [f"mpicomm.{name}" for name in MODULES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    runtime = SimpleNamespace(
        streamCaptureModeRelaxed=2, CUDARuntimeError=CUDARuntimeError, graphLaunch=lambda *what: launched.append(what)
    )
    cuda = SimpleNamespace(driver=None, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    yield importlib.import_module(names[-1]).Plan
    for name in names:
        sys.modules.pop(name, None)  # what was there before comes back


def test_a_graph_is_launched_in_place_of_the_steps(plan_type: Any, launched: list[tuple[int, int]]) -> None:
    stream = Stream()
    plan = plan_type("a call", [stream.fork, stream.join])
    plan.make_graph(stream)
    plan.launch(9)
    assert launched == [(17, 9)] and not stream.captures


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["before", "between", "behind"])
def test_what_interrupts_a_capture_goes_on(plan_type: Any, interruption: type[BaseException], where: str) -> None:
    interrupts = True

    def interrupt(stream: int) -> None:
        if interrupts:
            raise interruption

    stream = Stream()
    steps = [stream.fork, stream.join]
    steps.insert(["before", "between", "behind"].index(where), interrupt)
    plan = plan_type("a call", steps)
    with pytest.raises(interruption):
        plan.make_graph(stream)
    assert plan.launch is None and not stream.captures
    interrupts = False
    plan.make_graph(stream)
    assert plan.launch is not None


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["begin", "begun"])
def test_what_interrupts_the_beginning_of_a_capture_goes_on(
    plan_type: Any, interruption: type[BaseException], where: str
) -> None:
    stream = Stream()
    stream.interruption = where, interruption
    plan = plan_type("a call", [stream.fork, stream.join])
    with pytest.raises(interruption):
        plan.make_graph(stream)
    assert plan.launch is None and not stream.captures
    stream.interruption = None
    plan.make_graph(stream)
    assert plan.launch is not None
