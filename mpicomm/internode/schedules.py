"""The schedule of each collective over several cliques, and how long calls are cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mpicomm.collectives import operations as table
from mpicomm.collectives.call import Call
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.errors import InvalidUsageError
from mpicomm.internode import movements, reductions
from mpicomm.internode.layout import Layout
from mpicomm.internode.steps import Room, Step
from mpicomm.mpi.own_ops import Op
from mpicomm.mpi.span import Span

Schedule = Callable[[Buffers, Layout, Room], Iterator[Step]]

ONE_STEP_NBYTES = 64 << 10
"""The most bytes that a rank sends in a call of one network step. A step costs some tens of microseconds, in which a
network card moves about as many bytes."""
PIECE_NBYTES = 16 << 20
"""The bytes of each rank in one piece of a long call. The network carries one while the clique works on the next."""

_IN_ONE_STEP: dict[Operation, Schedule] = {
    table.ALLREDUCE: reductions.allreduce_in_one_step,
    table.BCAST: movements.bcast_in_one_step,
}
_SCHEDULES: dict[Operation, Schedule] = {
    table.ALLGATHER: movements.allgather,
    table.ALLGATHERV: movements.allgather,
    table.ALLREDUCE: reductions.allreduce_in_two_steps,
    table.BCAST: movements.bcast_in_two_steps,
    table.EXSCAN: reductions.exscan,
    table.GATHER: movements.gather,
    table.GATHERV: movements.gather,
    table.REDUCE: reductions.reduce,
    table.REDUCE_SCATTER: reductions.reduce_scatter,
    table.REDUCE_SCATTER_BLOCK: reductions.reduce_scatter,
    table.SCAN: reductions.scan,
    table.SCATTER: movements.scatter,
    table.SCATTERV: movements.scatter,
}
_OF_ONE_BLOCK = (table.ALLREDUCE, table.BCAST, table.REDUCE)
"""The collectives in which a rank holds no data of each other rank."""
_IN_RANK_ORDER = (table.SCAN, table.EXSCAN)


def require_order(call: Call, layout: Layout) -> None:
    """Raise `InvalidUsageError` for an operation that does not commute where cliques are not runs of ranks.

    Local, with the same answer on all ranks. The schedules of Scan and Exscan reduce in the order of ranks.
    """
    op = call.arguments.op
    if isinstance(op, Op) and not op.commute and not layout.in_rank_order and call.operation not in _IN_RANK_ORDER:
        raise InvalidUsageError(
            f"{call.operation}: {op!r} does not commute, and the ranks of a group do not follow each other: place them "
            f'so, pass commute=True, or use algorithm="mpi"; the groups are {", ".join(map(str, layout.cliques))}'
        )


def schedule_of(operation: Operation, nbytes: int, layout: Layout, algorithm: str) -> Schedule:
    """Return the schedule of a call of ``nbytes`` bytes for each rank. Local, with the same answer on all ranks.

    Raises `InvalidUsageError` for an algorithm that works in one clique alone.
    """
    if algorithm not in ("auto", "one_shot", "two_shot", "copy_engine"):
        raise InvalidUsageError(
            f'algorithm="{algorithm}" of {operation} works between ranks that map each other\'s memory, and these are '
            f'{len(layout.cliques)} groups of such ranks: use "auto"'
        )
    small = nbytes * (len(layout.cliques) - 1) <= ONE_STEP_NBYTES
    if algorithm == "one_shot" or (algorithm != "two_shot" and small):
        return _IN_ONE_STEP.get(operation) or _SCHEDULES.get(operation, movements.alltoall)
    return _SCHEDULES.get(operation, movements.alltoall)  # collectives of neighbours are all-to-alls, too


def steps_of(schedule: Schedule, piece: Buffers, layout: Layout, memory: Callable[[int], int]) -> list[Step]:
    """Return this rank's steps of a piece; ``memory`` returns the address of so many bytes of scratch memory. Local."""
    needed = Room()
    for _ in schedule(piece, layout, needed):
        pass
    return list(schedule(piece, layout, Room(memory(needed.nbytes))))


def pieces(operation: Operation, b: Buffers) -> Sequence[Buffers]:
    """Cut a call into calls on parts of each block, equally many on all ranks; local.

    A call with private counts stays whole, because a rank does not know the counts of the others.
    """
    if operation.counts == "private":
        return [b]
    spans = [b.send, b.output, *(b.send_blocks or ()), *(b.blocks or ())]
    longest = max((span.count for span in spans if span is not None), default=0)
    per_rank = PIECE_NBYTES if operation in _OF_ONE_BLOCK else PIECE_NBYTES // b.size
    step = max(1, per_rank // b.dtype.itemsize)
    return [_part(b, start, start + step) for start in range(0, longest, step)] or [b]


def _part(b: Buffers, start: int, stop: int) -> Buffers:
    """Return a call on the elements from ``start`` to ``stop`` of each block."""

    def cut(span: Span | None) -> Span | None:
        if span is None:
            return None
        first, end = min(start, span.count), min(stop, span.count)
        return Span(span.pointer + first * b.dtype.itemsize, end - first)

    def cut_all(blocks: Sequence[Span] | None) -> list[Span] | None:
        return None if blocks is None else [part for span in blocks if (part := cut(span)) is not None]

    return replace(
        b, send=cut(b.send), output=cut(b.output), send_blocks=cut_all(b.send_blocks), blocks=cut_all(b.blocks)
    )
