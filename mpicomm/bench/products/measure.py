"""The times of calls, in turns: first each call of a case is checked, then all calls are timed round by round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from mpicomm.api.communicator import Communicator
from mpicomm.bench.contenders import PeerFailureError, together
from mpicomm.bench.machine import Call
from mpicomm.bench.products.cases import Matrices
from mpicomm.bench.products.contenders import Prepare


class Timed(NamedTuple):
    """A measured call."""

    time_us: float
    wrong: int | None
    """The wrong elements of all ranks; None for a part without a result."""
    eager: str = ""
    """Why the calls are no graph, if graphs were asked for."""


class ProductClock:
    """Times calls on one device. Without ``graphs`` the host makes each call."""

    def __init__(self, comm: Communicator, iterations: int, *, graphs: bool) -> None:
        self._comm, self._iterations, self._graphs = comm, iterations, graphs
        self._torch: Any = None
        if isinstance(comm.device, int):
            import torch

            self._torch = torch
            self.stream = torch.cuda.Stream(device=comm.device)

    def current(self) -> AbstractContextManager[Any]:
        """Return a ``with`` block in which the calls belong on the stream of the clock."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._torch is not None:
            context = self._torch.cuda.stream(self.stream)
        return context

    def finish(self) -> None:
        """Wait for the device."""
        if self._torch is not None:
            self._torch.cuda.synchronize()

    def launcher(self, call: Call, *, captures: bool) -> tuple[Call, str]:
        """Return a function that makes the calls of a round, and why it is no graph. Collective."""

        def repeat() -> None:
            for _ in range(self._iterations):
                call()

        if self._torch is None or not self._graphs:
            return repeat, ""

        if not captures:
            return repeat, "it cannot be captured"

        def capture() -> Any:
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                repeat()
            return graph

        try:
            graph = together(self._comm, capture)
        except PeerFailureError as failure:
            return repeat, str(failure)
        replay: Call = graph.replay
        return replay, ""

    def time_us(self, launch: Call) -> float:
        """Return the time of one call on this rank, in a round in which all ranks begin together."""
        self.finish()
        self._comm.barrier()
        if self._torch is None:
            start = time.perf_counter()
            launch()
            return (time.perf_counter() - start) * 1e6 / self._iterations
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self.stream)
        launch()
        end.record(self.stream)
        self.finish()
        return float(begin.elapsed_time(end)) * 1e3 / self._iterations


def measure(
    comm: Communicator,
    clock: ProductClock,
    matrices: Matrices,
    contenders: Mapping[str, Prepare],
    peers: Mapping[str, Any],
    rounds: int,
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Return the times of the contenders, and the reasons of the ``peers`` without a time. Collective.

    Peers are other libraries. A failure of mpicomm itself ends the run.
    """
    launches: dict[str, Call] = {}
    kept: list[Call] = []  # a graph has only the addresses of the arrays of a call
    wrong: dict[str, int | None] = {}
    eager: dict[str, str] = {}
    silent: dict[str, str] = {}
    with clock.current():
        for name, prepare in contenders.items():
            matrices.fill_exactly()
            clock.finish()
            check = partial(_check, clock, matrices, prepare)
            try:
                call, wrong[name] = together(comm, check) if name in peers else check()
            except PeerFailureError as failure:
                silent[name] = str(failure)
                continue
            comm.check(None if comm.device == "cpu" else clock.stream)
            captures = name not in peers or peers[name].capturable
            kept.append(call)
            launches[name], eager[name] = clock.launcher(call, captures=captures)
        matrices.fill_as_in_programs()
        times: dict[str, list[float]] = {name: [] for name in launches}
        for number in range(rounds + 1):
            for name, launch in launches.items():
                taken = clock.time_us(launch)
                if number:  # the first round warms up
                    times[name].append(max(comm.allgather(taken)))
    found = {name: comm.allgather(wrong[name]) for name in launches}
    return {
        name: Timed(
            statistics.median(each), None if found[name][0] is None else sum(map(int, found[name])), eager[name]
        )
        for name, each in times.items()
    }, silent


def _check(clock: ProductClock, matrices: Matrices, prepare: Prepare) -> tuple[Call, int | None]:
    call, result = prepare(matrices)
    call()
    call()
    clock.finish()
    got: Any = result()
    return call, None if got is None else matrices.count_wrong(got)
