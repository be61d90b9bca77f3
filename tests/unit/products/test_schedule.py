"""The actions of all ranks give the right product in every order that streams and barriers allow."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.collectives.gpu.algorithms.base import Copy, Fork, Join
from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce
from mpicomm.products.schedule import (
    Action,
    AddBias,
    JoinLane,
    Multiply,
    Place,
    RowCut,
    gathering,
    is_possible,
    pieces_of,
    reducing,
    scattering,
)

Array = npt.NDArray[Any]
INNER, COLUMNS = 5, 3


def integers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-9, 10, shape).astype(np.float64)


class Job:
    """Two calls of all ranks after each other, in the same memory, with other inputs in the second call."""

    def __init__(self, kind: str, size: int, rows: int, cut: RowCut, seed: int, *, without: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.bias = integers(rng, COLUMNS)
        out_rows = {"gather": size * rows, "scatter": rows, "reduce": rows}[kind]
        a_rows = rows * size if kind == "scatter" else rows
        self.a = [[integers(rng, a_rows, INNER) for _ in range(size)] for _ in range(2)]
        self.b = [integers(rng, INNER, COLUMNS) for _ in range(size)]
        self.out = [[np.full((out_rows, COLUMNS), np.nan) for _ in range(size)] for _ in range(2)]
        self.kept = [[np.full((size * rows, INNER), np.nan) for _ in range(size)] for _ in range(2)]
        memory = [np.full(10000, np.nan) for _ in range(size)]
        landing = [np.full(10000, np.nan) for _ in range(size)]
        partial = [np.full((size * rows, COLUMNS), np.nan) for _ in range(size)]
        self.memory = memory, landing, partial  # the actions have only addresses
        shared, landed = [address(each) for each in memory], [address(each) for each in landing]
        self.ranks = []
        for rank in range(size):
            actions: list[tuple[Action, dict[str, Array]]] = []
            place = Place(rank, size, rows)
            for call in range(2):
                a, out = address(self.a[call][rank]), address(self.out[call][rank])
                if kind == "gather":
                    kept = address(self.kept[call][rank])
                    steps = [*gathering(place, cut, 8 * INNER, a, shared, kept)]
                elif kind == "scatter":
                    steps = [*scattering(place, cut, 8 * COLUMNS, address(partial[rank]), shared, out, bias=True)]
                else:
                    steps = [*reducing(place, cut, 8 * COLUMNS, landed, shared, out, bias=True)]
                matrices = {"a": self.a[call][rank], "out": self.out[call][rank], "partial": partial[rank]}
                shard = rows * COLUMNS
                matrices["pulled"] = memory[rank][(size - 1) * shard : (size + 1) * shard].reshape(2 * rows, COLUMNS)
                matrices["gathered"] = memory[rank][: size * rows * INNER].reshape(size * rows, INNER)
                actions += [(step, matrices) for step in steps]
            order = [at for at, (each, _) in enumerate(actions) if isinstance(each, (Barrier, Fork, Join, JoinLane))]
            self.orders = len(order)
            if without is not None:
                actions.pop(order[without])
            self.ranks.append(Rank(actions, self.b[rank], self.bias))
        self.kind, self.size, self.rows = kind, size, rows

    def check(self) -> None:
        for call in range(2):
            if self.kind == "gather":
                whole = np.concatenate(self.a[call])
                for rank in range(self.size):
                    assert (self.out[call][rank] == whole @ self.b[rank]).all()
                    assert (self.kept[call][rank] == whole).all()
                continue
            total = sum(a @ b for a, b in zip(self.a[call], self.b, strict=True)) + self.bias
            for rank in range(self.size):
                rows = slice(rank * self.rows, (rank + 1) * self.rows) if self.kind == "scatter" else slice(None)
                assert (self.out[call][rank] == total[rows]).all()


def cut_of(kind: str, size: int, rows: int, draw: Any) -> Any:
    if kind == "reduce":
        return RowCut(parts=draw(st.integers(1, 3)))
    if kind == "scatter":
        return draw(st.sampled_from([RowCut(), RowCut(merged=True), *([RowCut(pairs=True)] if size == 4 else [])]))
    levels = {2: 1, 4: 2}.get(size, 0)
    regions = product(*(range(1, (rows << level) + 1) for level in range(levels)))
    nested = (RowCut((*inner, size * rows)) for inner in regions if levels)
    return draw(st.sampled_from([RowCut(), *(cut for cut in nested if is_possible(cut, size, rows))]))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["gather", "scatter", "reduce"]), st.integers(2, 5), st.integers(1, 7), st.data())
def test_every_order_gives_the_product(kind: str, size: int, rows: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 30))
    job = Job(kind, size, rows, cut_of(kind, size, rows, data.draw), seed)
    run(job.ranks, random.Random(seed))
    job.check()


# No call comes before the first call, so nothing has to wait for an earlier call. In an all-reduce the barrier at the
# beginning waits only for calls of the other kinds, which share the memory.
@pytest.mark.parametrize(
    ("kind", "pairs", "of_earlier_calls"),
    [("gather", False, [0, 1]), ("scatter", False, [0]), ("scatter", True, [0]), ("reduce", False, [0, 19])],
)
def test_every_barrier_fork_and_join_is_needed(kind: str, pairs: bool, of_earlier_calls: list[int]) -> None:
    cut, size = RowCut(pairs=pairs, parts=2), 4 if pairs else 3

    def is_wrong(without: int, seed: int) -> bool:
        try:
            job = Job(kind, size, 2, cut, seed, without=without)
            run(job.ranks, random.Random(seed))
            job.check()
        except AssertionError:
            return True
        return False

    for number in {*range(Job(kind, size, 2, cut, 0).orders)} - {*of_earlier_calls}:
        assert any(is_wrong(number, seed) for seed in range(300)), f"without {number} all is well"


def test_a_nested_cut_multiplies_shards_of_the_own_pair_first() -> None:
    cut = RowCut((4, 14, 32))
    assert is_possible(cut, 4, 8)
    assert [[piece[1:] for piece in pieces_of(Place(rank, 4, 8), cut)] for rank in range(4)] == [
        [(0, 4), (4, 14), (14, 32)],
        [(10, 14), (0, 10), (14, 32)],
        [(18, 22), (22, 32), (0, 18)],
        [(28, 32), (18, 28), (0, 18)],
    ]
    assert not is_possible(RowCut((4, 10, 32)), 4, 8)  # the first product of rank 1 would have rows of rank 0


def address(array: Array) -> int:
    return int(array.ctypes.data)


STREAMS = ("main", "beside", "lane")


class Rank:
    """A rank with a main stream, and beside it a stream for copies and a lane for products.

    Each action has the matrices of its call.
    """

    def __init__(self, actions: list[tuple[Action, dict[str, Array]]], b: Array, bias: Array) -> None:
        self._b, self._bias = b, bias
        self.queues: dict[str, list[tuple[str, Any]]] = {name: [] for name in STREAMS}
        self.over = dict.fromkeys(STREAMS, 0)
        self.barriers = 0
        main, beside, lane = self.queues.values()
        for action, matrices in actions:
            work = "work", partial(self._carry_out, action, matrices)
            if isinstance(action, Fork):
                beside.append(("wait", ("main", len(main))))
            elif isinstance(action, Join):
                main.append(("wait", ("beside", len(beside))))
            elif isinstance(action, JoinLane):
                main.append(("wait", ("lane", len(lane))))
            elif isinstance(action, Copy) and not action.local:
                beside.append(work)
            elif isinstance(action, Multiply):
                lane += [("wait", ("main", len(main))), work]
            else:
                main.append(("barrier", None) if isinstance(action, Barrier) else work)
        for name in STREAMS[1:]:
            queue = self.queues[name]
            assert not queue or ("wait", (name, len(queue))) in main, "a fork without its join"

    def _carry_out(self, action: Any, matrices: dict[str, Array]) -> None:
        if isinstance(action, Copy):
            ctypes.memmove(action.target, action.source, action.nbytes)
        elif isinstance(action, Multiply):
            left, into = matrices[action.left], matrices[action.into]
            into[action.at : action.at + action.rows] = left[action.begin : action.begin + action.rows] @ self._b
        elif isinstance(action, AddBias):
            matrices["out"][action.begin : action.begin + action.rows] += self._bias
        elif isinstance(action, Reduce):
            dtype = matrices["out"].dtype
            total = sum(_at(source, action.nbytes, dtype).copy() for source in action.sources)
            _at(action.output, action.nbytes, dtype)[...] = total


def _at(pointer: int, nbytes: int, dtype: np.dtype[Any]) -> Array:
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(pointer)
    found: Array = np.frombuffer(memory, dtype)
    return found


def run(ranks: list[Rank], rng: random.Random) -> None:
    """Carry out all actions, in an order that ``rng`` draws. A slow rank or stream may be far behind."""
    weights = [rng.choice([1, 1, 20]) for _ in range(len(STREAMS) * len(ranks))]
    while any(_left(rank) for rank in ranks):
        ready = list(_ready(ranks))
        assert ready, "the ranks wait for each other"
        step = rng.choices(ready, [weights[each[0]] for each in ready])[0]
        step[1]()


def _left(rank: Rank) -> bool:
    return any(rank.over[name] < len(rank.queues[name]) for name in STREAMS)


def _ready(ranks: list[Rank]) -> Iterator[tuple[int, Callable[[], None]]]:
    for number, rank in enumerate(ranks):
        for index, (name, queue) in enumerate(rank.queues.items()):
            at = rank.over[name]
            if at == len(queue):
                continue
            kind, action = queue[at]
            if kind == "wait":
                if rank.over[action[0]] < action[1]:
                    continue
            elif kind == "barrier" and not all(_has_arrived(other, rank.barriers) for other in ranks):
                continue

            def act(rank: Rank = rank, name: str = name, kind: str = kind, action: Any = action) -> None:
                if kind == "barrier":
                    rank.barriers += 1
                elif kind == "work":
                    action()
                rank.over[name] += 1

            yield len(STREAMS) * number + index, act


def _has_arrived(rank: Rank, barriers: int) -> bool:
    if rank.barriers > barriers:
        return True
    at, main = rank.over["main"], rank.queues["main"]
    return rank.barriers == barriers and at < len(main) and main[at][0] == "barrier"
