"""A mixture of experts between the ranks of a machine, random dispatches and combines, and what they shall be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpicomm.experts.arrays import ExpertsConfig
from mpicomm.experts.on_gpu import ExpertsLaunches, ExpertsMemory
from mpicomm.kernels.team import ABSENT, ARENA_HEADER_NBYTES, LINE_NBYTES, MAX_RANKS
from mpicomm.kernels.variant import Launch
from tests.helpers.inputs.routings import Routing, require_laid_by_token, require_laid_out, require_same
from tests.kernels.build import Builds
from tests.kernels.machine import Array, Machine, Place, kernel_of
from tests.kernels.mistakes import Change, Changes

FEW_THREADS = (
    Change("experts_dispatch.cuh", "kDispatchThreads = 384", "kDispatchThreads = 96"),
    Change("experts_combine.cu", "kSumThreads = 256", "kSumThreads = 64"),
)
"""Three warps of a block that dispatches, and two of a block that combines: a CPU runs them sooner."""
_THREADS = {"experts_dispatch.cu": 96, "experts_dispatch_few.cu": 96, "experts_combine.cu": 64}
FEW_TOKENS = 3
"""Up to so many tokens of a rank are few, so that random ranks have few or more."""
OF_TOKENS = ("rows", "topk_ids", "topk_weights", "token_rows", "row_count")
"""The arrays of the layout by token."""


class Result(NamedTuple):
    """A dispatch on one rank: its arrays by their names in `Received`, and the number of its tokens."""

    places: dict[str, Place]
    num_tokens: int

    @property
    def pointers(self) -> dict[str, int]:
        """The addresses of the arrays, as `Received` has them."""
        return dict.fromkeys(OF_TOKENS, 0) | {name: place.address for name, place in self.places.items()}


class ExpertsRig:
    """Ranks with arenas. A launch has ``blocks``: so many senders, and so many receivers."""

    def __init__(
        self,
        builds: Builds,
        experts_per_rank: Sequence[int],
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: Any = np.float32,
        *,
        capacity: int = 64,
        alignment: int = 1,
        blocks: tuple[int, int] = (1, 1),
        changes: Changes = (),
        timeout_s: float = 20,
        all_threads: bool = False,
        by_token: bool = False,
        in_packets: bool = False,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        self.size = len(experts_per_rank)
        self.shape = ExpertsConfig(
            *(tuple(experts_per_rank), hidden, max_tokens, top_k, np.dtype(dtype), capacity, alignment),
            *(None, by_token, wire, max_tokens if in_packets else FEW_TOKENS),
        )
        self.machine = machine = Machine(builds, self.size)
        self._all_threads = all_threads
        self._changes = [*changes, *(() if all_threads else FEW_THREADS)]
        memory = ExpertsMemory(self.shape)
        self.arenas = [machine.allocate(rank, memory.nbytes) for rank in range(self.size)]
        begin, end = memory.absent
        for arena in self.arenas:
            arena.bytes[begin:end].view(np.uint32)[:] = ABSENT
        machine.keep()
        modes = dict.fromkeys(("dispatch", "combine", "dispatch of few", "combine of few"), blocks)
        self._launches = [
            ExpertsLaunches(self.shape, machine.team(self.arenas, rank, timeout_s), modes) for rank in range(self.size)
        ]

    def start_at(self, number: int) -> None:
        """Let all ranks be as if launch ``number``, a dispatch, had been the last."""
        announcements, numbers = LINE_NBYTES // 8, LINE_NBYTES // 8 + 4 * MAX_RANKS
        for arena in self.arenas:
            head = arena.bytes[:ARENA_HEADER_NBYTES].view(np.uint64)
            for rank in range(MAX_RANKS):
                for last in (number - 1, number):
                    head[announcements + 2 * rank + last % 2] = (last & 0xFFFFFFFF) << 32
            head[numbers:] = number << 1

    def dispatch(self, rank: int, x: Array, ids: Array, weights: Array | None, *, nap_us: int = 0) -> Result:
        """Enqueue a rank's part, and return the memory of its result."""
        machine, shape = self.machine, self.shape

        experts, slots = shape.experts_per_rank[rank], shape.capacity * shape.top_k
        words = {
            "scales": shape.capacity * shape.scales,
            "counts": experts,
            "offsets": experts + 1,
            "sources": 3 * shape.places,
            "weights": shape.places,
            "places": self.size * shape.max_tokens * shape.top_k,
            "targets": 2 * shape.max_tokens,
            "tokens": self.size,
        }
        if shape.by_token:
            of_tokens = shape.places, slots, slots, shape.size * shape.max_tokens, 1
            words |= dict(zip(OF_TOKENS, of_tokens, strict=True))
        rows = machine.allocate(rank, shape.capacity * shape.hidden * shape.row_dtype.itemsize)
        places = {"x": rows, **{name: machine.allocate(rank, 4 * count) for name, count in words.items()}}
        result = Result(places, len(x))
        given = machine.place(rank, x).address, 0
        if shape.scales:
            quantize, given = self._launches[rank].quantize(given[0], len(x))
            self._launch(rank, quantize, nap_us)
        made = self._launches[rank].dispatch(
            given,
            machine.place(rank, ids).address,
            0 if weights is None else machine.place(rank, weights).address,
            result.pointers,
            len(x),
            wide_ids=ids.dtype.itemsize == 8,
        )
        self._launch(rank, made, nap_us)
        return result

    def combine(
        self,
        rank: int,
        result: Result,
        dtype: Any,
        values: Array | None = None,
        *,
        weighted: bool = True,
        nap_us: int = 0,
    ) -> tuple[Place, Place]:
        """Enqueue a rank's part, and return the memory of the sums, and of the values of slots."""
        output = self.machine.allocate(rank, result.num_tokens * self.shape.hidden * np.dtype(dtype).itemsize)
        of_slots = self.machine.allocate(rank, result.num_tokens * self.shape.top_k * 4)
        numbers = (0, 0) if values is None else (self.machine.place(rank, values).address, of_slots.address)
        name = np.dtype(dtype).name
        arrays = result.places["x"].address, result.pointers, result.num_tokens
        made = self._launches[rank].combine(*arrays, output.address, name, numbers, weighted=weighted)
        self._launch(rank, made, nap_us)
        return output, of_slots

    def _launch(self, rank: int, made: Launch, nap_us: int) -> None:
        source = made.variant.source.name
        kernel = kernel_of(self.machine.builds, made.variant, self._changes)
        threads = made.threads if self._all_threads else _THREADS.get(source, made.threads)
        self.machine.launch(rank, kernel, [made.arguments], blocks=made.blocks, threads=threads, nap_us=nap_us)


BY_BLOCKS = Change("experts_counts.cuh", "kFewPairs = 8192", "kFewPairs = 0")
"""As if there were many pairs: each block counts only its own pairs."""
TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
WAYS: dict[str, dict[str, Any]] = {
    "by expert": {},
    "by token": {"by_token": True},
    "in packets": {"by_token": True, "in_packets": True},
}
IN_PACKETS = WAYS["in packets"]
ONE_TYPE = (np.float32,)
"""Each type of the results is one more build of the kernel."""


def require_fault_everywhere(said: str, size: int, operation: int, sequence: int, peer: int) -> None:
    """Require that ranks found this fault, and that all others were told of it: a late rank learns it from another."""
    found = [
        f"fault on rank {rank}: state=2, operation={operation}, sequence={sequence}," in said for rank in range(size)
    ]
    told = [f"fault on rank {rank}: state=2, operation=2, sequence=0," in said for rank in range(size)]
    assert any(found) and all(map(max, found, told)), said
    assert said.count(f"peer={10 + peer}, elapsed_ns=0") >= sum(found), said


class Round:
    """One dispatch of random tokens, and its combines."""

    def __init__(
        self, rig: ExpertsRig, rng: np.random.Generator, *, none: float = 0.2, tokens: Sequence[int] | None = None
    ) -> None:
        self.rig = rig
        shape = rig.shape
        experts = shape.experts_per_rank
        numbers = shape.hidden, shape.max_tokens, shape.top_k, shape.dtype
        self.routing = Routing(rng, experts, *numbers, none=none, tokens=tokens)
        self.results: list[Result] = []
        self.sums: list[tuple[list[tuple[Place, Place]], np.dtype[Any], bool]] = []
        of_rows = (shape.capacity, shape.top_k) if shape.by_token else (shape.capacity,)
        self.values = [rng.random(of_rows, dtype=np.float32) for _ in experts]

    def dispatch(self, ranks: Iterable[int], naps: Sequence[int] | None = None) -> None:
        x = self.routing
        for rank in ranks:
            nap_us = naps[rank] if naps else 0
            self.results.append(self.rig.dispatch(rank, x.xs[rank], x.ids[rank], x.weights[rank], nap_us=nap_us))

    def combine(
        self, ranks: Iterable[int], dtype: Any, naps: Sequence[int] | None = None, *, weighted: bool = True
    ) -> None:
        places = []
        for rank in ranks:
            nap_us, result = naps[rank] if naps else 0, self.results[rank]
            values = None if weighted else self.values[rank]
            places.append(self.rig.combine(rank, result, dtype, values, weighted=weighted, nap_us=nap_us))
        self.sums.append((places, np.dtype(dtype), weighted))

    def check(self) -> None:
        shape, routing = self.rig.shape, self.routing
        places = routing.laid(shape.alignment)
        laid: Any = routing.laid_by_token() if shape.by_token else places
        for rank, result in enumerate(self.results):
            found = self._found(rank, result)
            rows = found["x"]
            if shape.by_token:
                require_laid_by_token(laid[rank], places[rank], found)
                continue
            names = ("x", "counts", "offsets", "sources", "weights")
            require_laid_out(laid[rank], *(found[name] for name in names))
            rest = rows[laid[rank].offsets[-1] :]
            require_same("rows that no pair has", rest, np.zeros_like(rest))
        outputs = [each.rows for each in laid]
        for made, dtype, weighted in self.sums:
            for rank, (place, slots) in enumerate(made):
                if shape.by_token:
                    expected = routing.sums_by_token(laid, outputs, rank, dtype)
                else:
                    expected = routing.sums(laid, outputs, rank, dtype, weighted=weighted)
                require_same("sums", place.view(dtype).reshape(expected.shape), expected)
                if not weighted:
                    values_of = routing.slots_by_token if shape.by_token else routing.of_slots
                    values = values_of(laid, self.values, rank)
                    require_same("values", slots.view(np.float32).reshape(values.shape), values)

    def _found(self, rank: int, result: Result) -> dict[str, Array]:
        """Return the arrays of a dispatch on a rank, by their names in `Received`."""
        shape = self.rig.shape
        found: dict[str, Array] = {name: place.view(np.int32) for name, place in result.places.items()}
        found["x"] = result.places["x"].view(shape.dtype).reshape(-1, shape.hidden)
        found["sources"] = found["sources"].reshape(-1, 3)
        found["weights"] = found["weights"].view(np.float32)
        if shape.by_token:
            found["topk_ids"] = found["topk_ids"].reshape(-1, shape.top_k)
            found["topk_weights"] = found["topk_weights"].view(np.float32).reshape(-1, shape.top_k)
            found["token_rows"] = found["token_rows"].reshape(shape.size, -1)
        return found


def play(
    rig: ExpertsRig,
    seed: int,
    rounds: int,
    *,
    types: Sequence[Any] = TYPES,
    jitter_us: int = 200,
    napping: bool = True,
    limit_s: float = 60,
) -> None:
    """Random dispatches, each with no combine, one or two."""
    rng = np.random.default_rng([rig.size, seed])
    played, everyone = [], range(rig.size)
    for _ in range(rounds):
        each = Round(rig, rng)
        played.append(each)
        naps = rng.choice((0, 0, 500), rig.size) if napping else [0] * rig.size
        each.dispatch(everyone, [int(nap) for nap in naps])
        for _ in range(int(rng.choice((0, 1, 1, 2)))):
            naps = rng.choice((0, 0, 500), rig.size) if napping else [0] * rig.size
            dtype = types[int(rng.integers(len(types)))]
            each.combine(everyone, dtype, [int(nap) for nap in naps], weighted=bool(rng.integers(2)))
    rig.machine.run(seed=seed, jitter_us=jitter_us, limit_s=limit_s)
    for each in played:
        each.check()


def play_rounds(
    rig: ExpertsRig, rounds: Sequence[Round], combines: Sequence[int], naps: Sequence[int] | None = None, seed: int = 1
) -> None:
    """Dispatch each round, with so many combines after it."""
    for each, count in zip(rounds, combines, strict=True):
        each.dispatch(range(rig.size), naps)
        for number in range(count):
            each.combine(range(rig.size), np.float32, naps, weighted=number != 1)
    rig.machine.run(seed=seed, jitter_us=200)
    for each in rounds:
        each.check()


def rig_of(builds: Builds, size: int, changes: Changes = (), **options: Any) -> ExpertsRig:
    """Return ranks with 3, 0, 2, ... experts, and rows of two parts of odd length."""
    experts = [3, 0, 2, 1][:size] if size > 1 else [4]
    dtype = options.pop("dtype", np.float32)
    hidden = 4112 // np.dtype(dtype).itemsize
    options.setdefault("capacity", 96)
    return ExpertsRig(builds, experts, hidden, 7, options.pop("top_k", 3), dtype, changes=changes, **options)
