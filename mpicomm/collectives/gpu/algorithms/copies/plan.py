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

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, Literal

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, Numbers
from mpicomm.collectives.gpu.algorithms.copies import schedule
from mpicomm.collectives.gpu.algorithms.copies.schedule import fits_copy_engines, in_few_copies
from mpicomm.collectives.gpu.algorithms.direct.plan import barrier
from mpicomm.collectives.gpu.algorithms.memory import Domain, Request, launch_tag
from mpicomm.collectives.patterns import Buffers
from mpicomm.kernels.reductions import Reduction, options_for
from mpicomm.kernels.team import MAX_RANKS, PACKET_NBYTES
from mpicomm.kernels.variant import Launch, Variant, u32, u64
from mpicomm.sharing.segments import Mapped

REDUCTION_THREADS = 512  # kReductionThreads in local_reduction.cu; a test compares them


class LocalReductionArguments(ctypes.Structure):
    """The host's copy of ``LocalReduction`` in local_reduction.cu."""

    _fields_ = [("sources", ctypes.c_uint64 * MAX_RANKS), *u64("output", "nbytes"), *u32("num_sources", "unused")]


def local_reduction_kernel(reduction: tuple[str, str]) -> Variant:
    """Return the kernel for ``(dtype, op)``; raises as `options_for`."""
    return Variant(Path(__file__).with_name("local_reduction.cu"), "mpicomm_local_reduction", options_for(reduction))


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


class CopyLauncher(FormLauncher):
    """Carries out the calls of a form on copy engines, and leaves most multiprocessors to other kernels."""

    into_memory = True

    def __init__(self, form: Form, domain: Domain) -> None:
        self._form, self._domain = form, domain
        self._gaps: tuple[schedule.GapsByPeer, schedule.GapsByPeer] | None = None
        if any(form.gaps) and form.operation.copies == "one_shot":
            once = form.one_shot
            sends, receives = self._gaps = [*map(form.gaps_of, once.sends)], [*map(form.gaps_of, once.receives)]
            own = sends[form.rank], receives[form.rank]
            self.moves_gaps = all(map(fits_copy_engines, form.gaps)) and in_few_copies(*own)

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        blocks = self._form.sends + self._form.receives
        buffers = self._form.buffers([longest] * blocks, [0] * blocks)
        *_, nbytes = self._plan(buffers, staged=not symmetric)
        return (_request(nbytes),) if nbytes else ()

    def fill(self, numbers: Numbers) -> Filled | None:
        lengths, begins, longest, hash32, memory, _ = numbers
        if not all(map(self._domain.arena.has, self.memory(longest, symmetric=memory is not None))):
            return None
        actions = self._actions(self._form.buffers(lengths, begins), memory)
        return [*with_launches(actions, self._domain, hash32, self._form.reduction, memory)], 0, 0

    def _actions(self, buffers: Buffers, memory: Mapped | None) -> list[schedule.Action]:
        rank, reduces = self._domain.rank, self._form.operation.reduces
        exchange, following, parts, contributions_nbytes, nbytes = self._plan(buffers, staged=memory is None)
        pointers = self._domain.arena.region(_request(nbytes)).pointers if nbytes else ()
        destination: schedule.Destination
        if memory is not None:
            destination = schedule.OutputDestination(rank, memory)
        else:
            results = [pointer + contributions_nbytes for pointer in pointers]
            destination = schedule.StagingDestination(rank, results, parts)
        if following is None or not reduces:
            return schedule.movement(rank, exchange, parts, destination, following, self._gaps)
        contributions = schedule.StagingDestination(rank, pointers, parts)
        return schedule.allreduce(rank, exchange, following, parts, contributions, destination)

    def _plan(self, buffers: Buffers, *, staged: bool) -> tuple[Exchange, Exchange | None, schedule.Parts, int, int]:
        """Return the exchange of a call, the exchange in which ranks send on its data, and the parts of both.

        Then come the bytes of staging memory for the contributions to a reduction, and these bytes with the memory for
        results that cannot go straight to their place.
        """
        operation, domain = self._form.operation, self._domain
        reduces, following = operation.reduces, None
        if operation.copies == "two_shot":
            assert operation.two_shot is not None
            exchange, second = operation.two_shot(buffers)
            longest_nbytes = max(exchange.longest_nbytes, second.longest_nbytes)
            # Between two ranks there is no third rank to which a broadcast could be sent on.
            following = second if reduces or domain.size > 2 else None
        else:
            exchange = operation.one_shot(buffers)
            longest_nbytes = exchange.longest_nbytes
        then: Then = "nothing" if following is None else "gather" if reduces else "relay"
        most = domain.most_staged_nbytes
        parts = parts_of(longest_nbytes, domain.size, most, reduces=reduces, then=then, staged=staged)
        all_rooms = (domain.size - 1) * parts.peer_nbytes
        contributions_nbytes = (then == "gather") * all_rooms
        return exchange, following, parts, contributions_nbytes, contributions_nbytes + staged * all_rooms


def parts_of(
    longest_nbytes: int, size: int, most_staged_nbytes: int, *, reduces: bool, then: Then, staged: bool
) -> schedule.Parts:
    """Return the parts in which ranks send each other up to ``longest_nbytes``; the same on all ranks.

    ``staged`` is whether the final data lands in staging memory. A rank has ``most_staged_nbytes`` of it.
    """
    rooms = ((then == "gather") + staged) * (size - 1)
    # Staging memory holds the whole message, or regions that parts reuse.
    largest = longest_nbytes
    if rooms * schedule.aligned(longest_nbytes) > most_staged_nbytes:
        largest = most_staged_nbytes // (schedule.REGIONS * rooms * schedule.ALIGNED_NBYTES) * schedule.ALIGNED_NBYTES
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
        return schedule.Parts.tapered(longest_nbytes, min(largest, -(-longest_nbytes // number)), smallest)
    return schedule.Parts.equal(longest_nbytes, max(number, -(-longest_nbytes // largest)))


def with_launches(
    actions: Iterable[Any], domain: Domain, hash32: int, reduction: Reduction | None, memory: Mapped | None = None
) -> Iterator[Any]:
    """Yield the actions of a call with this hash, with launches in place of barriers and reductions."""
    barriers = 0  # counted, because ranks without a part have fewer steps
    for action in actions:
        if isinstance(action, schedule.Barrier):
            yield barrier(domain, launch_tag(hash32, barriers, memory), after_copies=True)
            barriers += 1
        elif isinstance(action, schedule.Reduce):
            assert reduction is not None
            yield local_reduction(action, reduction)
        else:
            yield action


def local_reduction(action: schedule.Reduce, reduction: Reduction) -> Launch:
    """Return the launch for a reduction within this rank's memory; raises as `local_reduction_kernel`."""
    arguments = LocalReductionArguments(
        output=action.output, nbytes=action.nbytes, num_sources=len(action.sources), sources=action.sources
    )
    blocks = min(action.most_blocks, -(-action.nbytes // (REDUCTION_THREADS * PACKET_NBYTES)))
    return Launch(local_reduction_kernel(reduction), arguments, blocks=blocks, threads=REDUCTION_THREADS)


def _request(nbytes: int) -> Request:
    # Powers of two, because memory of each size stays until the communicator is freed.
    return Request("collectives: copies", 1 << (nbytes - 1).bit_length())
