"""Carries out the actions of all ranks of a product in memory of the host, in any order that their streams allow."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce
from mpicomm.collectives.gpu.algorithms.steps import Copy, Fork, Join
from mpicomm.products.schedule import Action, AddBias, JoinLanes, Multiply

Array = npt.NDArray[Any]


def address(array: Array) -> int:
    return int(array.ctypes.data)


STREAMS = ("main", "beside", "lane 0", "lane 1")


class Rank:
    """A rank with its matrices, a main stream, and beside it a stream for copies and two lanes for products."""

    def __init__(self, actions: list[Action], matrices: dict[str, Array], b: Array, bias: Array | None) -> None:
        self.matrices, self._b, self._bias = matrices, b, bias
        self.queues: dict[str, list[tuple[str, Any]]] = {name: [] for name in STREAMS}
        self.over = dict.fromkeys(STREAMS, 0)
        self.barriers = 0
        main, beside, *lanes = self.queues.values()
        products = 0
        for action in actions:
            if isinstance(action, Fork):
                beside.append(("wait", ("main", len(main))))
            elif isinstance(action, Join):
                main.append(("wait", ("beside", len(beside))))
            elif isinstance(action, JoinLanes):
                for number in range(max(0, products - 2), products - action.but_last):
                    main.append(("wait", (f"lane {number % 2}", len(lanes[number % 2]))))
            elif isinstance(action, Copy) and not action.local:
                beside.append(("copy", action))
            elif isinstance(action, Multiply):
                lanes[products % 2] += [("wait", ("main", len(main))), ("work", action)]
                products += 1
            else:
                main.append(("barrier" if isinstance(action, Barrier) else "work", action))
        for name in STREAMS[1:]:
            queue = self.queues[name]
            assert not queue or ("wait", (name, len(queue))) in main, "a fork without its join"

    def carry_out(self, kind: str, action: Any) -> None:
        if kind == "copy" or isinstance(action, Copy):
            ctypes.memmove(action.target, action.source, action.nbytes)
        elif isinstance(action, Multiply):
            left, into = self.matrices[action.left], self.matrices[action.into]
            into[action.at : action.at + action.rows] = left[action.begin : action.begin + action.rows] @ self._b
        elif isinstance(action, AddBias):
            self.matrices["out"][action.begin : action.begin + action.rows] += self._bias
        elif isinstance(action, Reduce):
            dtype = self.matrices["out"].dtype
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
                elif kind != "wait":
                    rank.carry_out(kind, action)
                rank.over[name] += 1

            yield len(STREAMS) * number + index, act


def _has_arrived(rank: Rank, barriers: int) -> bool:
    if rank.barriers > barriers:
        return True
    at, main = rank.over["main"], rank.queues["main"]
    return rank.barriers == barriers and at < len(main) and main[at][0] == "barrier"
