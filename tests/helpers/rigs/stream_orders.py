"""Programs of ranks whose actions are carried out in any order that streams, events and barriers allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpicomm.collectives.gpu.algorithms.base import Copy, Fork, Join
from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier
from mpicomm.products.schedule import JoinProducts, Multiply
from tests.helpers.fakes.fake_cuda import FakeCuda

Program = Sequence[tuple[Any, Callable[[], object]]]
"""The actions of a rank, with what each of them does."""
MAIN, COPIES, LANE = range(3)
"""The streams of a rank: of kernels and barriers, of copies to other ranks, and of products."""


def carry_out(programs: Sequence[Program], seed: int) -> None:
    """Carry out all actions. It is an error if ranks wait for each other, or do not join a stream that they forked."""
    cuda = FakeCuda(seed)
    came = [0] * len(programs)  # the barriers to which each rank has come
    for rank, program in enumerate(programs):
        _enqueue(cuda, rank, program, came)
    cuda.finish()


def _enqueue(cuda: FakeCuda, rank: int, program: Program, came: list[int]) -> None:
    streams = [3 * rank + which for which in (MAIN, COPIES, LANE)]
    ends = {which: cuda.end_of(streams[which]) for which in (COPIES, LANE)}
    """The work of these streams for which the main stream waits."""
    barriers = 0

    def come() -> None:
        came[rank] += 1

    def follow(which: int, other: int) -> None:
        end = cuda.end_of(streams[other])
        if which == MAIN:
            ends[other] = end
        cuda.enqueue(streams[which], int, lambda: cuda.is_over(end))

    for action, act in program:
        if isinstance(action, Barrier):
            barriers += 1
            cuda.enqueue(streams[MAIN], come)
            cuda.enqueue(streams[MAIN], int, partial(lambda number: min(came) >= number, barriers))
        elif isinstance(action, Fork):
            follow(COPIES, MAIN)
        elif isinstance(action, Join | JoinProducts):
            follow(MAIN, COPIES if isinstance(action, Join) else LANE)
        elif isinstance(action, Multiply):
            follow(LANE, MAIN)
            cuda.enqueue(streams[LANE], act)
        else:
            cuda.enqueue(streams[COPIES if isinstance(action, Copy) and not action.local else MAIN], act)
    assert ends == {which: cuda.end_of(streams[which]) for which in ends}, "a fork without its join"
