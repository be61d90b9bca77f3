"""Random dispatches and combines of ranks, for several tests, and what their results shall be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.inputs.routings import Routing, require_laid_by_token, require_laid_out, require_same
from tests.helpers.references.experts import Laid
from tests.kernels.build import Builds, Change
from tests.kernels.experts_rig import ExpertsRig, Result
from tests.kernels.machine import Place

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
            places.append(self.rig.combine(rank, result.rows, result, dtype, values, weighted=weighted, nap_us=nap_us))
        self.sums.append((places, np.dtype(dtype), weighted))

    def check(self) -> None:
        shape = self.rig.shape
        laid = self.routing.laid(shape.alignment)
        if shape.by_token:
            self._check_by_token(laid)
            return
        for rank, (expected, result) in enumerate(zip(laid, self.results, strict=True)):
            experts = shape.experts_per_rank[rank]
            rows = result.rows.view(shape.dtype).reshape(-1, shape.hidden)
            counts, offsets = result.counts.view(np.int32)[:experts], result.offsets.view(np.int32)
            sources = result.sources.view(np.int32).reshape(-1, 3)
            require_laid_out(expected, rows, counts, offsets, sources, result.weights.view(np.float32))
            rest = rows[expected.offsets[-1] :]
            require_same("rows that no pair has", rest, np.zeros_like(rest))
        for places, dtype, weighted in self.sums:
            for rank, (place, slots) in enumerate(places):
                expected_sums = self.routing.sums(laid, [each.rows for each in laid], rank, dtype, weighted=weighted)
                require_same("sums", place.view(dtype).reshape(expected_sums.shape), expected_sums)
                if not weighted:
                    of_slots = self.routing.of_slots(laid, self.values, rank)
                    require_same("values", slots.view(np.float32).reshape(of_slots.shape), of_slots)

    def _check_by_token(self, places: list[Laid]) -> None:
        shape = self.rig.shape
        laid = self.routing.laid_by_token()
        for rank, (expected, result) in enumerate(zip(laid, self.results, strict=True)):
            words = {name: place.view(np.int32) for name, place in result.of_tokens.items()}
            found = {
                **words,
                "x": result.rows.view(shape.dtype).reshape(-1, shape.hidden),
                "counts": result.counts.view(np.int32)[: shape.experts_per_rank[rank]],
                "offsets": result.offsets.view(np.int32),
                "sources": result.sources.view(np.int32).reshape(-1, 3),
                "weights": result.weights.view(np.float32),
                "tokens": result.tokens.view(np.int32),
                "topk_ids": words["topk_ids"].reshape(-1, shape.top_k),
                "topk_weights": words["topk_weights"].view(np.float32).reshape(-1, shape.top_k),
                "token_rows": words["token_rows"].reshape(shape.size, -1),
            }
            require_laid_by_token(expected, places[rank], found)
        for sums, dtype, has_values in ((places, dtype, not weighted) for places, dtype, weighted in self.sums):
            for rank, (place, slots) in enumerate(sums):
                expected_sums = self.routing.sums_by_token(laid, [each.rows for each in laid], rank, dtype)
                require_same("sums", place.view(dtype).reshape(expected_sums.shape), expected_sums)
                if has_values:
                    of_slots = self.routing.slots_by_token(laid, self.values, rank)
                    require_same("values", slots.view(np.float32).reshape(of_slots.shape), of_slots)


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


def rig_of(builds: Builds, size: int, changes: Sequence[Change] = (), **options: Any) -> ExpertsRig:
    """Return ranks with 3, 0, 2, ... experts, and rows of two parts of odd length."""
    experts = [3, 0, 2, 1][:size] if size > 1 else [4]
    dtype = options.pop("dtype", np.float32)
    hidden = 4112 // np.dtype(dtype).itemsize
    options.setdefault("capacity", 96)
    return ExpertsRig(builds, experts, hidden, 7, options.pop("top_k", 3), dtype, changes=changes, **options)
