"""The schedule of each collective over several peer domains."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.collectives import operations as table
from mpicomm.collectives.call import Call
from mpicomm.collectives.operations import Operation
from mpicomm.domains import movements, reductions
from mpicomm.domains.cuts import (
    Part,
    Schedule,
    cut_blocks,
    cut_data,
    domains_that_receive,
    domains_that_send,
    pipelined,
    whole,
)
from mpicomm.domains.layout import DomainLayout
from mpicomm.domains.steps import ScratchAllocator, Step
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.own_ops import Op

ONE_STEP_NBYTES = 64 << 10
"""The most bytes that a rank sends in a call of one network step. A step costs some tens of microseconds. A network
card moves about as many bytes in this time."""

_IN_ONE_STEP: dict[Operation, Schedule] = {
    table.ALLREDUCE: cut_data(reductions.allreduce_in_one_step),
    table.BCAST: cut_data(movements.bcast_in_one_step),
}
_SCHEDULES: dict[Operation, Schedule] = {
    table.ALLGATHER: domains_that_send(movements.allgather),
    table.ALLGATHERV: domains_that_send(movements.allgather),
    table.ALLREDUCE: cut_data(reductions.allreduce_in_two_steps),
    table.ALLTOALL: cut_blocks(movements.alltoall),
    table.BCAST: pipelined(movements.bcast_by_rails),
    table.EXSCAN: cut_blocks(reductions.exscan),
    table.GATHER: cut_blocks(movements.gather),
    table.GATHERV: whole(movements.gather),
    table.REDUCE: cut_data(reductions.reduce),
    table.REDUCE_SCATTER: domains_that_receive(reductions.reduce_scatter),
    table.REDUCE_SCATTER_BLOCK: domains_that_receive(reductions.reduce_scatter),
    table.SCAN: cut_blocks(reductions.scan),
    table.SCATTER: cut_blocks(movements.scatter),
    table.SCATTERV: whole(movements.scatter),
}
_ALL_TO_ALL = whole(movements.alltoall)
"""The schedule of all other calls: all-to-alls with private counts, such as calls of neighbours."""
_IN_RANK_ORDER = (table.SCAN, table.EXSCAN)


def require_order(call: Call, layout: DomainLayout) -> None:
    """Raise `InvalidUsageError` for an operation that does not commute, if domains are not runs of ranks.

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


def steps_of(part: Part, memory: Callable[[int], int]) -> list[list[Step]]:
    """Return this rank's steps of each piece of a part of a call. Local.

    ``memory`` takes a number of bytes, and returns the address of as much scratch memory. All pieces share it.
    """
    needed = [ScratchAllocator() for _ in part]
    without_memory = [list(piece(scratch)) for piece, scratch in zip(part, needed, strict=True)]
    start = memory(max(scratch.nbytes for scratch in needed))
    return [list(piece(ScratchAllocator(start))) for piece in part] if start else without_memory
