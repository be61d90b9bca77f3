"""Collectives between the ranks of a machine: each enqueues a call on all ranks and returns the check of its results.

``Calls`` draws data, its place in memory, whether a call is in place, and which rank is late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives import operations
from mpicomm.collectives.operations import Operation
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reductions import (
    dtype_named,
    reduced,
    require_same,
    ring_reduced,
    samples,
    with_sentinels,
)
from tests.kernels.machine import Array, Place
from tests.kernels.rig import Rig

Check = Callable[[], None]
BOTH = ("one_shot", "two_shot")


class Calls:
    """A rank may be ``nap_us`` late.

    With ``symmetric_at`` the outputs lie in symmetric memory of the rig, from that byte on. Calls that name no
    algorithm take ``algorithm``. With ``ranks`` only these take part.
    """

    def __init__(
        self,
        rig: Rig,
        rng: np.random.Generator,
        *,
        nap_us: int = 0,
        symmetric_at: int | None = None,
        algorithm: str = "one_shot",
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._rig = rig
        self._rng = rng
        self._nap_us = nap_us
        self._at = symmetric_at
        self._algorithm = algorithm
        self._ranks = range(rig.size) if ranks is None else ranks

    def allreduce(
        self, name: str, op: str, count: int, algorithm: str = "one_shot", *, in_place: bool | None = None
    ) -> Check:
        """All ranks reduce, with NumPy's bits, or in the order of the ring."""
        dtype, size = dtype_named(name), self._rig.size
        parts = [self._samples(dtype, count) for _ in range(size)]
        in_place = self._at is None and (bool(self._rng.integers(2)) if in_place is None else in_place)
        sources = [self._place(rank, part) for rank, part in enumerate(parts)]
        targets = sources if in_place else [self._target(rank, np.zeros_like(part)) for rank, part in enumerate(parts)]
        for rank in range(size):
            send, output = Span(sources[rank].address, count), Span(targets[rank].address, count)
            pattern = replace(patterns.allreduce(rank, size, dtype, send, output, op), algorithm=algorithm)
            self._run(rank, pattern)
        expected = ring_reduced(op, parts) if algorithm == "ring" else self._reduced(op, parts)
        return lambda: self._require(targets, [expected if size > 1 else parts[0]] * size)

    def alltoallv(self, counts: Array, operation: Operation = operations.ALLTOALLV) -> Check:
        """Rank a sends ``counts[a][b]`` bytes to rank b."""
        ranks, dtype = range(self._rig.size), np.dtype(np.uint8)
        data = [[self._bytes(int(counts[a][b])) for b in ranks] for a in ranks]
        targets = []
        for rank in ranks:
            # Blocks that are sent and blocks that receive lie between each other.
            places = [
                (self._place(rank, data[rank][b]), self._place(rank, np.zeros_like(data[b][rank]))) for b in ranks
            ]
            targets.append([target for _, target in places])
            sends, receives = ([self._span(place) for place in side] for side in zip(*places, strict=True))
            exchanges = patterns.alltoall(rank, self._rig.size, dtype, sends, receives, operation)
            self._run(rank, exchanges)

        def check() -> None:
            for b in ranks:
                self._require(targets[b], [data[a][b] for a in ranks])

        return check

    def alltoall(self, nbytes: int) -> Check:
        """Each rank gets a block of each rank."""
        size, dtype = self._rig.size, np.dtype(np.uint8)
        data = [[self._bytes(nbytes) for _ in range(size)] for _ in range(size)]
        targets = [self._target(rank, np.zeros(size * nbytes, np.uint8)) for rank in range(size)]
        for rank, target in enumerate(targets):
            places = self._place(rank, np.concatenate(data[rank])), target
            starts = range(0, size * nbytes, nbytes)
            sends, receives = (patterns.blocks(place.address, [nbytes] * size, starts, 1) for place in places)
            pattern = patterns.alltoall(rank, size, dtype, sends, receives, operations.ALLTOALL)
            self._run(rank, pattern)
        return lambda: self._require(targets, [np.concatenate([of[rank] for of in data]) for rank in range(size)])

    def allgather(self, nbytes: int) -> Check:
        """All ranks get the data of all, some of them in place."""
        dtype, size = np.dtype(np.uint8), self._rig.size
        parts = [self._bytes(nbytes) for _ in range(size)]
        targets = []
        for rank, part in enumerate(parts):
            target = self._target(rank, np.zeros(nbytes * size, np.uint8))
            starts = [index * nbytes for index in range(size)]
            blocks = patterns.blocks(target.address, [nbytes] * size, starts, 1)
            send = self._span(self._place(rank, part))
            if self._rng.integers(2):
                target.bytes[starts[rank] : starts[rank] + nbytes] = part
                send = blocks[rank]
            self._run(rank, patterns.allgather(rank, size, dtype, send, blocks))
            targets.append(target)
        expected = np.concatenate([self._moved(part) for part in parts])
        return lambda: self._require(targets, [expected] * size)

    def bcast(self, nbytes: int, algorithm: str = "one_shot") -> Check:
        """One rank's buffer goes to all. In two shots each rank sends a shard on, and in a chain the whole buffer."""
        dtype, root = np.dtype(np.uint8), int(self._rng.integers(self._rig.size))
        content = self._bytes(nbytes)
        places = [
            self._target(rank, content if rank == root else np.zeros_like(content)) for rank in range(self._rig.size)
        ]
        for rank, place in enumerate(places):
            exchanges = patterns.bcast(rank, self._rig.size, dtype, self._span(place), root, algorithm)
            self._run(rank, exchanges)
        return lambda: self._require(places, [content] * self._rig.size)

    def reduce(self, name: str, op: str, count: int, algorithm: str, *, in_place: bool | None = None) -> Check:
        """The root gets the reduction of all ranks; in a chain the root is the first rank or the last one."""
        dtype, size = dtype_named(name), self._rig.size
        root = int(self._rng.choice((0, size - 1) if algorithm == "chain" else range(size)))
        parts = [samples(dtype, count, self._rng) for _ in range(size)]
        sources = [self._place(rank, part) for rank, part in enumerate(parts)]
        in_place = bool(self._rng.integers(2)) if in_place is None else in_place
        target = sources[root] if in_place else self._place(root, np.zeros_like(parts[0]))
        for rank, source in enumerate(sources):
            output = Span(target.address, count) if rank == root else None
            pattern = patterns.reduce(rank, size, dtype, Span(source.address, count), output, op, root, algorithm)
            self._run(rank, pattern)
        return lambda: self._require([target], [reduced(op, parts)])

    def reduce_scatter(self, name: str, op: str, counts: Sequence[int], *, in_place: bool = False) -> Check:
        """Rank r gets the reduction of all ranks' block r, of ``counts[r]`` elements; in place these are equal."""
        dtype, size = dtype_named(name), self._rig.size
        parts = [self._samples(dtype, sum(counts)) for _ in range(size)]
        starts = [sum(counts[:rank]) for rank in range(size)]
        sources = [self._place(rank, part) for rank, part in enumerate(parts)]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        each = zip(starts, ends, strict=True)
        expected = [self._reduced(op, [part[start:end] for part in parts], shards=True) for start, end in each]
        if in_place:
            targets = sources  # only the result at the start changes
            expected = [np.append(result, part[result.size :]) for result, part in zip(expected, parts, strict=True)]
        else:
            targets = [self._place(rank, np.zeros(counts[rank], dtype)) for rank in range(size)]
        for rank, source in enumerate(sources):
            blocks = patterns.blocks(source.address, counts, starts, dtype.itemsize)
            output = Span(targets[rank].address, counts[rank])
            exchanges = patterns.reduce_scatter(rank, size, dtype, blocks, output, op)
            self._run(rank, exchanges)
        return lambda: self._require(targets, expected)

    def scan(self, name: str, op: str, count: int) -> Check:
        """Each rank reduces the data of the ranks up to itself, in place. So every rank does something else."""
        dtype = dtype_named(name)
        parts = [samples(dtype, count, self._rng) for _ in range(self._rig.size)]
        places = [self._place(rank, part) for rank, part in enumerate(parts)]
        for rank, place in enumerate(places):
            span = Span(place.address, count)
            exchanges = patterns.scan(rank, self._rig.size, dtype, span, span, op)
            self._run(rank, exchanges)
        expected = [parts[0], *(reduced(op, parts[: rank + 1]) for rank in range(1, self._rig.size))]
        return lambda: self._require(places, expected)

    def _run(self, rank: int, pattern: Pattern, **more: Any) -> None:
        late = self._nap_us and self._rng.integers(20) == 0
        nap_us = int(self._rng.integers(self._nap_us)) if late else 0
        if pattern.algorithm == "one_shot":
            pattern = replace(pattern, algorithm=self._algorithm)
        if self._at is not None:
            more["symmetric"] = True
        if rank in self._ranks:
            self._rig.run(rank, pattern, nap_us=nap_us, **more)

    def _target(self, rank: int, content: Array) -> Place:
        if self._at is None:
            return self._place(rank, content)
        memory = self._rig.outputs[rank]
        place = Place(memory.address + self._at, memory.bytes[self._at : self._at + content.nbytes])
        place.bytes[:] = content.view(np.uint8)
        return place

    # What other data and other arithmetic change:

    def _samples(self, dtype: np.dtype[Any], count: int) -> Array:
        return samples(dtype, count, self._rng)

    def _reduced(self, op: str, parts: Sequence[Array], *, shards: bool = False) -> Array:
        return reduced(op, parts)

    def _moved(self, part: Array) -> Array:
        return part

    def _require(self, places: Sequence[Place], expected: Sequence[Array]) -> None:
        for place, array in zip(places, expected, strict=True):
            require_same(place.bytes.copy().view(array.dtype), array)

    def _place(self, rank: int, content: Array) -> Place:
        offset = int(self._rng.choice((0, 0, content.dtype.itemsize % 16, 8, 1)))
        return self._rig.machine.place(rank, content, offset=offset)

    def _bytes(self, nbytes: int) -> Array:
        return with_sentinels(self._rng.integers(0, 256, nbytes, dtype=np.uint8), self._rng)

    def _span(self, place: Place) -> Span:
        return Span(place.address, place.bytes.size)


def sizes_around(*limits: int, itemsize: int = 1) -> list[int]:
    """Return counts of elements whose bytes are none, few, just under, at and just over each limit."""
    counts = {0, 1, 3} | {limit // itemsize + more for limit in limits for more in (-1, 0, 1)}
    return sorted(counts)


def random_counts(rng: np.random.Generator, size: int, choices: Sequence[int]) -> Any:
    """Return the counts that each rank sends to each."""
    return rng.choice(choices, (size, size))
