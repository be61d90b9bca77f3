"""The schedule of each collective over several peer domains: it splits a call into pieces, which `run_pipeline` runs.

The network moves one piece while the domain works on another. All ranks split a call the same way. The functions are
pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from mpicomm.collectives import operations as table
from mpicomm.collectives.call import Call
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.domains import movements, reductions
from mpicomm.domains.steps import DomainLayout, NetworkStep, ScratchAllocator, Step
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.ops import Op

PIECE_NBYTES = 16 << 20
"""The bytes of each rank in one piece of a long call, which limit the scratch memory of the call."""
MIN_PIECE_NBYTES = 4 << 20
"""The size of the smallest piece of a call without scratch memory: see `bcast_by_rails`."""
_LINE_NBYTES = 128

Steps = Callable[..., Iterator[Step]]
Piece = Callable[[ScratchAllocator], Iterator[Step]]
Part = Sequence[Piece]
"""Pieces that share scratch memory."""
Schedule = Callable[[Buffers, DomainLayout], Sequence[Part]]


def unsplit(steps: Steps) -> Schedule:
    """Do not split a call, because a rank does not know the counts of the other ranks."""
    return lambda b, layout: [[partial(steps, b, layout)]]


def split_data(steps: Steps) -> Schedule:
    """Split the data, which has the same length on each rank."""
    return lambda b, layout: [[partial(steps, part, layout)] for part in _split(b, PIECE_NBYTES)]


def split_blocks(steps: Steps) -> Schedule:
    """Split the block of each rank."""
    return lambda b, layout: [[partial(steps, part, layout)] for part in _split(b, PIECE_NBYTES // b.size)]


def bcast_by_rails(b: Buffers, layout: DomainLayout) -> Sequence[Part]:
    """Split the data of a call without scratch memory; the steps of each piece continue the previous piece.

    A piece goes through several levels, one after the other. So k pieces take k times as long as one piece on the
    slowest level, and once as long on the other levels. Long pieces are good for the slowest level, and short pieces
    are good for the others. A piece has the geometric mean of the bytes of the call and of the smallest piece.
    """
    length = b.longest
    pieces = _split(b, math.isqrt(length * b.dtype.itemsize * MIN_PIECE_NBYTES))
    pairs = pairwise([b.part(0, 0), *pieces, b.part(length, length)])
    return [[partial(movements.bcast_by_rails, piece, before, layout)] for before, piece in pairs]


def allgather(b: Buffers, layout: DomainLayout) -> Sequence[Part]:
    """Split the block of each rank; take one or several domains at once, this rank's domain first."""
    return [
        [partial(movements.allgather, part, layout, distances)]
        for part in _split(b, PIECE_NBYTES)
        for distances in (range(1), *_distance_ranges(part.receives, part, layout))
    ]


def reduce_scatter(b: Buffers, layout: DomainLayout) -> Sequence[Part]:
    """Split the block of each rank; take one or several domains at once, this rank's domain last.

    The pieces of a part share the scratch memory that gathers the partial results of all domains.
    """
    most, steps = max(len(layout.domains), *map(len, layout.domains)), reductions.reduce_scatter
    return [
        [partial(steps, part, layout, each) for each in (*_distance_ranges(part.sends, part, layout), range(1))]
        for part in _split(b, PIECE_NBYTES // most)
    ]


def _distance_ranges(blocks: Sequence[Span], b: Buffers, layout: DomainLayout) -> Iterator[range]:
    """Yield the distances of the other domains, in ranges of domains whose blocks together fill a piece."""
    domains = len(layout.domains)
    largest_nbytes = b.dtype.itemsize * max(sum(blocks[rank].count for rank in ranks) for ranks in layout.domains)
    step = max(1, min(domains - 1, PIECE_NBYTES // max(1, largest_nbytes)))
    return (range(first, min(first + step, domains)) for first in range(1, domains, step))


def _split(b: Buffers, nbytes: int) -> list[Buffers]:
    # Whole cache lines, because the elements of a movement are bytes, and kernels are slow at unaligned addresses.
    return b.pieces(nbytes - nbytes % _LINE_NBYTES or nbytes)


ONE_STEP_NBYTES = 64 << 10
"""The limit of the bytes that a rank sends in a call of one network step. A step has a latency of some tens of
microseconds, in which a network card moves about as many bytes."""

_IN_ONE_STEP: dict[Operation, Schedule] = {
    table.ALLREDUCE: split_data(reductions.allreduce_in_one_step),
    table.BCAST: split_data(movements.bcast_in_one_step),
}
_SCHEDULES: dict[Operation, Schedule] = {
    table.ALLGATHER: allgather,
    table.ALLGATHERV: allgather,
    table.ALLREDUCE: split_data(reductions.allreduce_in_two_steps),
    table.ALLTOALL: split_blocks(movements.alltoall),
    table.BCAST: bcast_by_rails,
    table.EXSCAN: split_blocks(partial(reductions.scan, False)),
    table.GATHER: split_blocks(movements.gather),
    table.GATHERV: unsplit(movements.gather),
    table.REDUCE: split_data(reductions.reduce),
    table.REDUCE_SCATTER: reduce_scatter,
    table.REDUCE_SCATTER_BLOCK: reduce_scatter,
    table.SCAN: split_blocks(partial(reductions.scan, True)),
    table.SCATTER: split_blocks(movements.scatter),
    table.SCATTERV: unsplit(movements.scatter),
}
_ALL_TO_ALL = unsplit(movements.alltoall)
"""The schedule of all other calls: all-to-alls with private counts, such as calls of neighbours."""
_IN_RANK_ORDER = (table.SCAN, table.EXSCAN)


def require_rank_order(call: Call, layout: DomainLayout) -> None:
    """Raise `InvalidUsageError` for an operation that does not commute, if the ranks of domains are not consecutive.

    Local, with the same answer on all ranks. The schedules of Scan and Exscan reduce in the order of ranks.
    """
    op = call.arguments.op
    if isinstance(op, Op) and not op.commute and not layout.in_rank_order and call.operation not in _IN_RANK_ORDER:
        raise InvalidUsageError(
            f"{call.operation}: {op!r} does not commute, and the ranks of a peer domain do not follow each other: "
            f'place them so, pass commute=True, or use algorithm="mpi"; domains: {", ".join(map(str, layout.domains))}'
        )


def schedule_of(operation: Operation, nbytes: int, layout: DomainLayout, algorithm: str) -> Schedule:
    """Return the schedule of a call of ``nbytes`` bytes for each rank. Local, with the same answer on all ranks.

    Raises `InvalidUsageError` for an algorithm that works only in one domain.
    """
    if algorithm not in ("auto", "one_shot", "two_shot", "copy_engine"):
        raise InvalidUsageError(
            f'algorithm="{algorithm}" of {operation} works in one peer domain, and the ranks are in '
            f'{len(layout.domains)}: use "auto"'
        )
    small = nbytes * (len(layout.domains) - 1) <= ONE_STEP_NBYTES
    if algorithm == "one_shot" or (algorithm != "two_shot" and small):
        return _IN_ONE_STEP.get(operation) or _SCHEDULES.get(operation, _ALL_TO_ALL)
    return _SCHEDULES.get(operation, _ALL_TO_ALL)


DEPTH = 2
"""The number of pieces in the pipeline at once."""


def pieces_of(
    schedule: Schedule, b: Buffers, layout: DomainLayout, memories: Sequence[Callable[[int], int]]
) -> Iterator[list[Step]]:
    """Yield this rank's steps of each piece of a call. Local.

    The parts of the call take turns with the `DEPTH` ``memories``, and the pieces of a part share one. A memory takes a
    number of bytes, and returns the address of as much scratch memory, or 0 for 0 bytes.
    """
    for number, part in enumerate(schedule(b, layout)):
        needed = [ScratchAllocator() for _ in part]
        without_memory = [list(piece(scratch)) for piece, scratch in zip(part, needed, strict=True)]
        start = memories[number % DEPTH](max(scratch.nbytes for scratch in needed))
        yield from [list(piece(ScratchAllocator(start))) for piece in part] if start else without_memory


def run_pipeline(
    pieces: Iterable[Iterable[Any]], work: Callable[[Any], object], start: Callable[[NetworkStep], Callable[[], object]]
) -> None:
    """Run the steps of pieces: ``start`` runs a `NetworkStep`, ``work`` any other step.

    ``start`` returns the function that waits for the network messages.

    If two pieces are in the pipeline, the later piece first starts its network messages. Then the earlier piece waits
    for its network messages. The order of the steps depends only on the number of network steps in each piece. So all
    ranks of a peer domain make the same steps in the same order. A piece begins when the piece `DEPTH` before it is
    done, so that pieces take turns with `DEPTH` parts of scratch memory.
    """

    def progress(piece: Iterable[Any]) -> Iterator[None]:
        """Run a piece, and suspend after the start of each network step."""
        for step in piece:
            if isinstance(step, NetworkStep):
                finish = start(step)
                yield
                finish()
            else:
                work(step)

    waiting, running, done = iter(pieces), deque[Iterator[None]](), object()
    while True:
        if len(running) < DEPTH and (piece := next(waiting, None)) is not None:
            running.appendleft(progress(piece))
        if not running:
            return
        running = deque([each for each in running if next(each, done) is not done])
