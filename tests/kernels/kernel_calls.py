"""Collectives between the ranks of a machine: each enqueues a call on all ranks and returns the check of its results.

``Calls`` draws data, its place in memory, whether a call is in place, and which rank is late. `play` runs calls of
several kinds and sizes, and checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives import operations
from mpicomm.collectives.gpu.algorithms.packets.arguments import QUANTIZED_OF_PACKET, parts_of
from mpicomm.collectives.wire import Wire
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reductions import (
    dtype_named,
    quantized_sum,
    reduced,
    require_same,
    ring_reduced,
    round_trip,
    samples,
    with_sentinels,
)
from tests.kernels.machine import Array, Place
from tests.kernels.rig import SMALL, Rig

Check = Callable[[], None]
BOTH = ("one_shot", "two_shot")
SUM = ("float32", "sum")


class Calls:
    """A rank may be ``nap_us`` late.

    With ``symmetric_at`` the outputs lie in symmetric memory of the rig, from that byte on. Calls that name no
    algorithm take ``algorithm``. With ``ranks`` only these take part. Without a ``root`` each call draws one.
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
        root: int | None = None,
    ) -> None:
        self._rig = rig
        self._rng = rng
        self._nap_us = nap_us
        self._at = symmetric_at
        self._algorithm = algorithm
        self._ranks = range(rig.size) if ranks is None else ranks
        self._root = root

    def of(self, kinds: str, sizes: Iterable[int], reduction: tuple[str, str] = SUM) -> list[Check]:
        """Make a call of each of the ``kinds`` with messages of each size in bytes, or of whole elements.

        A kind is the name of a method, and the algorithm after a colon.
        """
        names = [kind.split(":") for kind in kinds.split()]
        return [self._of(*name, nbytes=nbytes, reduction=reduction) for nbytes in sizes for name in names]

    def _of(self, name: str, algorithm: str = "one_shot", *, nbytes: int, reduction: tuple[str, str]) -> Check:
        count, size = -(-nbytes // dtype_named(reduction[0]).itemsize), self._rig.size
        if name in ("allreduce", "reduce"):
            check: Check = getattr(self, name)(*reduction, count, algorithm)
            return check
        if name == "bcast":
            return self.bcast(nbytes, algorithm)
        if name == "scan":
            return self.scan(*reduction, count)
        if name == "alltoallv":
            return self.alltoallv(random_counts(self._rng, size, (0, 1, nbytes // 2, nbytes)))
        if name == "reduce_scatter":
            return self.reduce_scatter(*reduction, [count] * size, in_place=bool(self._rng.integers(2)))
        if name == "reduce_scatter_of_parts":
            return self.reduce_scatter(*reduction, self._rng.choice((0, 3, count // 2, count), size).tolist())
        made: Check = getattr(self, name)(nbytes)
        return made

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

    def alltoallv(self, counts: Array, block_hashes: tuple[tuple[int, int], ...] = ()) -> Check:
        """Rank a sends ``counts[a][b]`` bytes to rank b; ``block_hashes`` are those of an `Exchange`."""
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
            exchanges = patterns.alltoall(rank, self._rig.size, dtype, sends, receives, block_hashes=block_hashes)
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
        dtype, root = np.dtype(np.uint8), self._draw_root(range(self._rig.size))
        content = self._bytes(nbytes)
        places = [
            self._target(rank, content if rank == root else np.zeros_like(content)) for rank in range(self._rig.size)
        ]
        for rank, place in enumerate(places):
            exchanges = patterns.bcast(rank, self._rig.size, dtype, self._span(place), root, algorithm)
            self._run(rank, exchanges)
        return lambda: self._require(places, [content] * self._rig.size)

    def reduce(self, name: str, op: str, count: int, algorithm: str) -> Check:
        """The root gets the reduction of all ranks; in a chain the root is the first rank or the last one.

        It is never in place but in a chain, and there not for ThreadSanitizer, which does not know that a store that
        depends on a load comes after it: see chain.cu.
        """
        dtype, size = dtype_named(name), self._rig.size
        root = self._draw_root((0, size - 1) if algorithm == "chain" else range(size))
        parts = [samples(dtype, count, self._rng) for _ in range(size)]
        sources = [self._place(rank, part) for rank, part in enumerate(parts)]
        may_be_in_place = algorithm == "chain" and not self._rig.machine.builds.sanitize
        in_place = may_be_in_place and bool(self._rng.integers(2))
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

    def _draw_root(self, ranks: Sequence[int]) -> int:
        return int(self._rng.choice(ranks)) if self._root is None else self._root

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


def play(
    rig: Rig,
    kinds: str,
    sizes: Iterable[int],
    *,
    reduction: tuple[str, str] = SUM,
    seed: int = 0,
    of: Callable[..., Calls] = Calls,
    one_by_one: bool = False,
    limit_s: float = 60,
    **options: Any,
) -> None:
    """Run calls as in `Calls.of`; ``one_by_one`` if they share their outputs. ``of`` makes the `Calls`."""
    calls = of(rig, np.random.default_rng([rig.size, seed]), **{"nap_us": 1000, **options})
    for batch in [[nbytes] for nbytes in sizes] if one_by_one else [sizes]:
        for each in kinds.split() if one_by_one else [kinds]:
            rig.machine.run(calls.of(each, batch, reduction), seed=seed, jitter_us=300, limit_s=limit_s)
        if one_by_one:
            rig.machine.clear()


def sizes_around(*limits: int) -> list[int]:
    """Return numbers of bytes that are none, few, just under, at and just over each limit, also of 4-byte elements."""
    return sorted({0, 1, 9} | {limit + more for limit in limits for more in (-5, 0, 1)})


def random_counts(rng: np.random.Generator, size: int, choices: Sequence[int]) -> Any:
    """Return the counts that each rank sends to each."""
    return rng.choice(choices, (size, size))


def elements_of_step(size: int) -> int:
    """Return the elements of a step between ``size`` ranks, and the bytes of them quantized."""
    return SMALL.threads * QUANTIZED_OF_PACKET * parts_of(size, one_step=False)


def numbers(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Return numbers of all magnitudes, some of them zero; some blocks have NaNs or infinities."""
    values = rng.standard_normal(count) * np.exp2(rng.uniform(-12, 12, -(-count // 50)).repeat(50)[:count])
    values[rng.random(count) < 0.1] = rng.choice([0.0, -0.0])
    with np.errstate(all="ignore"):
        made: Array = values.astype(dtype)
    for _ in range(rng.integers(3)):
        made[rng.integers(count)] = rng.choice([np.nan, -np.inf, np.inf])
    return made


class QuantizedCalls(Calls):
    """Quantized calls between the ranks of a rig."""

    def __init__(self, rig: Rig, rng: np.random.Generator, wire: Wire, dtype: str, **options: Any) -> None:
        super().__init__(rig, rng, **options)
        self._wire = wire
        self._dtype = dtype_named(dtype)

    def _run(self, rank: int, pattern: Pattern, **more: Any) -> None:
        super()._run(rank, pattern, wire=(self._wire, self._dtype))

    def _samples(self, dtype: np.dtype[Any], count: int) -> Array:
        return numbers(dtype, count, self._rng)

    def _bytes(self, nbytes: int) -> Array:
        return numbers(self._dtype, nbytes // self._dtype.itemsize, self._rng).view(np.uint8)

    def _reduced(self, op: str, parts: Sequence[Array], *, shards: bool = False) -> Array:
        return quantized_sum(parts, self._wire.dtype, op, results=self._wire.quantizes_result and not shards)

    def _moved(self, part: Array) -> Array:
        return round_trip(part.view(self._dtype), self._wire.dtype).astype(self._dtype)

    def _require(self, places: Sequence[Place], expected: Sequence[Array]) -> None:
        for rank, (place, right) in enumerate(zip(places, expected, strict=True)):
            got, said = place.bytes.view(right.dtype), f"{right.size} results differ, first at rank {rank}"
            np.testing.assert_array_equal(got.astype(np.float32), right.astype(np.float32), err_msg=said)
            are_numbers = right.astype(np.float32) == right.astype(np.float32)
            assert (np.signbit(got) == np.signbit(right))[are_numbers].all(), f"zeros: {said}"
