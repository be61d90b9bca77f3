"""Schedules over several peer domains carried out on arrays, one for each rank, without devices and without MPI."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.patterns import Buffers
from mpicomm.domains.schedules import DEPTH, Schedule, pieces_of, run_pipeline
from mpicomm.domains.steps import Combine, DomainLayout, DomainStep, NetworkStep, Pack, Step
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.types import is_narrow

POISON = 0xDB
_GUARD = 512


class Memory:
    """One rank's memory, in which a pointer is an index of its bytes."""

    def __init__(self) -> None:
        self.bytes = np.full(_GUARD, POISON, np.uint8)

    def place(self, content: npt.NDArray[Any]) -> Span:
        """Put an array after all others, between bytes that no rank may touch."""
        start = self.bytes.size
        raw = np.frombuffer(content.tobytes(), np.uint8)
        self.bytes = np.concatenate([self.bytes, raw, np.full(_GUARD - raw.size % 256, POISON, np.uint8)])
        return Span(start, content.size)

    def scratch(self, nbytes: int) -> int:
        return self.place(np.full(nbytes, POISON, np.uint8)).pointer

    def view(self, pointer: int, count: int, dtype: Any) -> npt.NDArray[Any]:
        if count == 0:
            return np.empty(0, dtype)
        assert pointer >= _GUARD, "an address that no buffer has"
        view: npt.NDArray[Any] = self.bytes[pointer : pointer + count * np.dtype(dtype).itemsize].view(dtype)
        return view

    def move(self, target: int, source: int, nbytes: int) -> None:
        self.view(target, nbytes, "u1")[:] = self.view(source, nbytes, "u1").copy()


@dataclass(frozen=True)
class _Arrival:
    """The end of a network step."""

    network_step: NetworkStep


class Cluster:
    """The memories of all ranks of some peer domains."""

    def __init__(self, domains: Sequence[Sequence[int]]) -> None:
        size = sum(map(len, domains))
        self.layouts = [DomainLayout(domains, rank) for rank in range(size)]
        self.memories = [Memory() for _ in range(size)]
        self._mail: dict[tuple[int, int], collections.deque[npt.NDArray[np.uint8]]] = collections.defaultdict(
            collections.deque
        )
        self.network_steps: collections.Counter[int] = collections.Counter()
        """The number of times that each rank has exchanged network messages."""
        self.locals: collections.Counter[int] = collections.Counter()
        """The number of collectives of its peer domain that each rank has made."""
        self.sent_nbytes: collections.Counter[int] = collections.Counter()
        """The bytes that each rank has sent to other peer domains."""

    def run(self, schedule: Schedule, buffers: Callable[[int], Buffers]) -> None:
        """Carry out a collective whose memory ``buffers`` gives for each rank."""
        works = [self._rank(rank, self._steps(rank, schedule, buffers(rank))) for rank in range(len(self.layouts))]
        waiting: list[Any] = [next(work, None) for work in works]
        while any(each is not None for each in waiting):
            ready = [rank for rank, each in enumerate(waiting) if each is not None and self._can_go_on(rank, waiting)]
            assert ready, f"the ranks wait for each other: {waiting}"
            exchanges = {rank: waiting[rank] for rank in ready if isinstance(waiting[rank], Exchange)}
            self._exchange(exchanges)
            for rank in ready:
                waiting[rank] = next(works[rank], None)
        assert not any(self._mail.values()), "network messages that no rank receives"

    def _steps(self, rank: int, schedule: Schedule, buffers: Buffers) -> list[Step | _Arrival]:
        """Return a rank's steps in the order in which engines carry them out, with an end for each network step."""
        scratch = [0] * DEPTH  # the parts of a call take turns with it, as in engines
        sizes = [-1] * DEPTH

        def memory(turn: int, nbytes: int) -> int:
            if nbytes > sizes[turn]:
                scratch[turn], sizes[turn] = self.memories[rank].scratch(nbytes), nbytes
            return scratch[turn]

        pieces = pieces_of(schedule, buffers, self.layouts[rank], [partial(memory, turn) for turn in range(DEPTH)])
        steps: list[Step | _Arrival] = []

        def start(network_step: NetworkStep) -> Callable[[], object]:
            steps.append(network_step)
            return lambda: steps.append(_Arrival(network_step))

        run_pipeline(pieces, steps.append, start)
        return steps

    def _rank(self, rank: int, steps: Sequence[Step | _Arrival]) -> Iterator[Exchange | NetworkStep]:
        memory = self.memories[rank]
        for step in steps:
            if isinstance(step, Pack):
                for copy in step.copies():
                    memory.move(*copy)
            elif isinstance(step, Combine):
                combine(memory, step)
            elif isinstance(step, DomainStep):
                self.locals[rank] += 1
                yield step.operation.one_shot(step.buffers)
            elif isinstance(step, NetworkStep):
                # A network may read the data that it sends as late as the end of the step, and write received data at
                # once.
                for message in step.receives:
                    memory.view(message.pointer, message.nbytes, "u1")[:] = POISON
            else:
                network_step = step.network_step
                self.network_steps[rank] += bool(network_step.sends or network_step.receives)
                for message in network_step.sends:
                    assert message.rank not in self.layouts[rank].ranks
                    data = memory.view(message.pointer, message.nbytes, "u1").copy()
                    self._mail[rank, message.rank].append(data)
                    self.sent_nbytes[rank] += message.nbytes
                yield network_step
                for message in network_step.receives:
                    data = self._mail[message.rank, rank].popleft()
                    assert data.size == message.nbytes
                    memory.view(message.pointer, message.nbytes, "u1")[:] = data

    def _can_go_on(self, rank: int, waiting: Sequence[Any]) -> bool:
        work = waiting[rank]
        if isinstance(work, NetworkStep):
            needed = collections.Counter(message.rank for message in work.receives)
            return all(len(self._mail[source, rank]) >= count for source, count in needed.items())
        return all(isinstance(waiting[mate], Exchange) for mate in self.layouts[rank].ranks)

    def _exchange(self, exchanges: dict[int, Exchange]) -> None:
        before = {rank: self.memories[rank].bytes.copy() for rank in exchanges}

        def sent(source: int, index: int) -> npt.NDArray[Any]:
            exchange, span = exchanges[source], exchanges[source].sends[index]
            assert span is not None
            end = span.pointer + span.count * exchange.dtype.itemsize
            data: npt.NDArray[Any] = before[source][span.pointer : end].view(exchange.dtype)
            return data

        for rank, exchange in exchanges.items():
            layout, memory = self.layouts[rank], self.memories[rank]
            reduction = exchange.reduction
            for peer, span in enumerate(exchange.receives):
                if span is not None and span.count and not (reduction and peer in reduction.sources):
                    memory.view(span.pointer, span.count, exchange.dtype)[:] = sent(layout.ranks[peer], layout.index)
            if reduction and reduction.output.count:
                own = reduction.own
                assert own is not None
                raw = before[rank][own.pointer : own.pointer + own.count * exchange.dtype.itemsize]
                parts = [
                    raw.view(exchange.dtype) if peer == layout.index else sent(layout.ranks[peer], layout.index)
                    for peer in reduction.sources
                ]
                output = memory.view(reduction.output.pointer, reduction.output.count, exchange.dtype)
                Reducer(reduction.op, exchange.dtype).reduce(parts, output)


def combine(memory: Memory, step: Combine) -> None:
    if step.count == 0:
        return
    parts = [memory.view(source, step.count, step.dtype) for source in step.sources]
    narrow = is_narrow(step.dtype) or is_narrow(step.result)
    wide = np.dtype(np.float32) if narrow else step.dtype
    total = np.empty(step.count, wide)
    Reducer(step.op, wide).reduce([part.astype(wide) for part in parts], total)
    if step.divisor != 1:
        total = total / wide.type(step.divisor)
    memory.view(step.output, step.count, step.result)[:] = total.astype(step.result)
