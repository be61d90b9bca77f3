"""Collectives on copy engines, which leave the multiprocessors free for other kernels.

The ranks meet in barriers (direct.cu). A barrier detects a rank that does not come or calls something else. Between
barriers each rank copies straight into the memory of its peers, to one peer at a time. At any time all ranks copy to
different peers, because that keeps every link full. Copies are few and large, because an engine rests for some
microseconds between two copies.

A part that lands in staging memory is moved or reduced from there while the next part is on the links. Parts reuse the
regions of staging memory, so that it need not be as large as the message. Part k goes to the region of part k - 3. Each
rank has left that region before it comes to the barrier that says that part k - 2 has arrived.

A barrier that fails does not hold back the copies after it, although a kernel would store nothing. These copies land in
the output of the same collective, which has failed on the output's rank too. Or they land in staging memory, which its
rank may already have freed. Memory that was shared as a descriptor stays mapped here even then. CUDA does not promise
that for an IPC handle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Literal, NamedTuple

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.arguments import (
    REDUCTION_THREADS,
    LocalReductionArguments,
    local_reduction_kernel,
)
from mpicomm.collectives.gpu.algorithms.copies.landing import (
    ALIGNED_NBYTES,
    REGIONS,
    InOutput,
    InStaging,
    Landing,
    Parts,
    aligned,
)
from mpicomm.collectives.gpu.algorithms.copies.schedule import Action, Barrier, Reduce, allreduce, movement
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectTemplate
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction

_RELAYED_NBYTES = 4 << 20
"""The bytes that a link carries in the time of one more part, which is the time of a barrier between copies."""
_MOST_RELAYED_PARTS = 16
_SMALLEST_NBYTES = 24 << 20
"""A smaller last part costs more than it saves, because it is copied to a peer and then moved while nothing else runs.
In an all-reduce this holds for each peer, because each rank reduces a shard, and a part is done when all ranks have
copied their results.
"""


Then = Literal["nothing", "relay", "gather"]
"""The step after an exchange. "relay": ranks send on the data that they have received. "gather": they send on the data
that they have reduced."""


class CopyPlan(NamedTuple):
    """A call as copy engines carry it out: its exchanges, and the staging memory."""

    exchange: Exchange
    following: Exchange | None
    """The exchange in which ranks send on the data of the first."""
    then: Then
    parts: Parts
    contributions_nbytes: int
    """Staging memory of each rank for the peers' contributions to a reduction."""
    staging_nbytes: int
    """``contributions_nbytes``, followed by the memory for results that cannot go straight to their place."""


class CopyEngines(Algorithm):
    """Copy engines move the data between barriers of the ranks, and leave most multiprocessors to other kernels."""

    name = "copy_engine"
    into_memory = True

    def serves(self, operation: Operation) -> bool:
        return bool(operation.copies)

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        nbytes = _copying(call, node).staging_nbytes
        return (_request(nbytes),) if nbytes else ()

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        template, barriers = DirectTemplate.of(node), 0  # counted, because ranks without a part have fewer steps
        for action in _actions(call, node):
            if isinstance(action, Barrier):
                yield template.barrier(call.tag(barriers, into_memory=True), after_copies=True)
                barriers += 1
            elif isinstance(action, Reduce):
                assert call.reduction is not None
                yield local_reduction(action, call.reduction)
            else:
                yield action


def parts_of(
    longest_nbytes: int, size: int, most_staged_nbytes: int, *, reduces: bool, then: Then, staged: bool
) -> Parts:
    """Return the parts in which ranks send each other up to ``longest_nbytes``; the same on all ranks.

    ``staged`` is whether the final data lands in staging memory. A rank has ``most_staged_nbytes`` of it.
    """
    rooms = ((then == "gather") + staged) * (size - 1)
    # Staging memory holds the whole message, or regions that parts reuse.
    largest = longest_nbytes
    if rooms * aligned(longest_nbytes) > most_staged_nbytes:
        largest = most_staged_nbytes // (REGIONS * rooms * ALIGNED_NBYTES) * ALIGNED_NBYTES
    number = 1
    if then == "relay":
        # More parts leave less work at the end, but each part costs time. The square root minimises the sum.
        number = max(1, min(_MOST_RELAYED_PARTS, isqrt(longest_nbytes * (size - 1) // _RELAYED_NBYTES)))
    elif reduces:
        number = 2  # one part is reduced while the other part is copied
    if staged and then != "relay":
        # The last part is moved after all copies are over, so it is small. Moving a part takes as long as copying a
        # third of it, hence as long as copying the next of the tapered parts.
        smallest = _SMALLEST_NBYTES * (size - 1 if then == "gather" else 1)
        return Parts.tapered(longest_nbytes, min(largest, -(-longest_nbytes // number)), smallest)
    return Parts.equal(longest_nbytes, max(number, -(-longest_nbytes // largest)))


def local_reduction(action: Reduce, reduction: Reduction) -> Launch:
    """Return the launch for a reduction within this rank's memory; raises as `local_reduction_kernel`."""
    arguments = LocalReductionArguments(
        output=action.output, nbytes=action.nbytes, num_sources=len(action.sources), sources=action.sources
    )
    blocks = min(action.most_blocks, -(-action.nbytes // (REDUCTION_THREADS * PACKET_NBYTES)))
    return Launch(local_reduction_kernel(reduction), arguments, blocks=blocks, threads=REDUCTION_THREADS)


def _copying(call: GpuCall, node: Node) -> CopyPlan:
    reduces, staged = call.operation.reduces, call.memory is None
    following: Exchange | None = None
    if call.operation.copies == "two_shot":
        exchange, second = call.two_shot.first, call.two_shot.second
        longest_nbytes = call.two_shot.longest_nbytes
        # Between two ranks there is no third rank to which a broadcast could be sent on.
        following = second if reduces or node.size > 2 else None
    else:
        exchange = call.one_shot
        longest_nbytes = exchange.longest_nbytes
    then: Then = "nothing" if following is None else "gather" if reduces else "relay"
    parts = parts_of(longest_nbytes, node.size, node.most_staged_nbytes, reduces=reduces, then=then, staged=staged)
    all_rooms = (node.size - 1) * parts.room_nbytes
    contributions_nbytes = (then == "gather") * all_rooms
    return CopyPlan(exchange, following, then, parts, contributions_nbytes, contributions_nbytes + staged * all_rooms)


def _request(nbytes: int) -> Request:
    # Powers of two, because memory of each size stays until the communicator is freed.
    return Request("collectives: copies", 1 << (nbytes - 1).bit_length())


def _actions(call: GpuCall, node: Node) -> list[Action]:
    rank, copying = node.rank, _copying(call, node)
    exchange, following, parts = copying.exchange, copying.following, copying.parts
    pointers: Sequence[int] = ()
    if copying.staging_nbytes:
        pointers = node.arena.region(_request(copying.staging_nbytes)).pointers
    landing: Landing
    if call.memory is not None:
        landing = InOutput(rank, call.memory)
    else:
        landing = InStaging(rank, [pointer + copying.contributions_nbytes for pointer in pointers], parts)
    if following is None or copying.then == "relay":
        return movement(rank, exchange, parts, landing, following)
    return allreduce(rank, exchange, following, parts, InStaging(rank, pointers, parts), landing)
