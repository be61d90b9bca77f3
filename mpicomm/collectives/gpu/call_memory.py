"""DeviceArena: the memory that each rank of a communicator opens to the kernels of its peers.

CallMemory: how ranks set up more of it when a call needs more. Before this come the facts about the ranks' devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mpicomm import environment
from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.algorithms.base import AlgorithmChoice
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Inboxes, Range, Request, with_place
from mpicomm.collectives.gpu.decision import Chosen, Decision
from mpicomm.devices.cuda.faults import called_differently
from mpicomm.devices.cuda.memory import BLOCK_NBYTES, round_up
from mpicomm.devices.cuda.types import GpuBackend, Segment
from mpicomm.devices.handle import Kind, MemoryUse
from mpicomm.errors import CollectiveTimeoutError, HandleError, InvalidUsageError, PeerError, equal_error, name_ranks
from mpicomm.kernels.team import ABORT_OPERATION, ABSENT, MISMATCH, Team
from mpicomm.log import log_once, logger
from mpicomm.sharing.segments import Mapped, SharedSegments, SuspendedContent, share
from mpicomm.waiting import wait_until

_PURPOSE = "collectives: arena"
_LATE_S = 0.5  # how long an error waits for the calls of ranks that are a little late


class NoMemoryError(HandleError):
    """The ranks could not set up memory that a call needs; raised on all ranks."""


class OverBoundError(NoMemoryError, InvalidUsageError):
    """Memory that a call needs would exceed MPICOMM_MEMORY; raised on all ranks."""


@dataclass(frozen=True)
class DeviceFacts:
    """The facts about a rank's device that the ranks exchange."""

    multiprocessors: int
    total_nbytes: int
    uuid: bytes
    is_time_sliced: bool
    """Whether processes share the device in time slices, so that a kernel has all multiprocessors: without MPS."""


def device_facts(backend: GpuBackend) -> DeviceFacts:
    """Return the facts about this rank's device. Local."""
    is_time_sliced = not environment.multi_process_service()
    return DeviceFacts(backend.multiprocessors, backend.total_nbytes, backend.info.uuid, is_time_sliced)


def multiprocessors_of(devices: Sequence[DeviceFacts], ranks_per_device: int) -> tuple[int, int]:
    """Return the multiprocessors that each rank has on the smallest device, and how many ranks run there at once.

    ``ranks_per_device`` is the highest number of ranks that share a device.
    """
    # All blocks of all ranks must run at once, because they wait for each other. So a launch has only the blocks that
    # the smallest device can hold. Ranks that run at once on a device share its multiprocessors. Otherwise one
    # rank's waiting blocks could keep out the blocks for which they wait.
    concurrent_ranks = 1 if all(each.is_time_sliced for each in devices) else ranks_per_device
    return max(1, min(each.multiprocessors for each in devices) // concurrent_ranks), concurrent_ranks


def team_of(backend: GpuBackend, node: Group, arenas: Iterable[int]) -> Team:
    """Return the team of this rank. ``arenas`` has the address of each rank's arena."""
    team = Team(faults=backend.faults, timeout_ns=backend.timeout_ns, size=node.size, rank=node.rank)
    for index, (arena, name) in enumerate(zip(arenas, node.ranks, strict=True)):
        team.arenas[index], team.user_ranks[index] = arena, name
    return team


class DeviceArena:
    """Every rank's `Arena`, and the regions that calls have requested. Construction is collective, as ``share`` is.

    A region lives until the communicator is freed, because a captured graph may still use it. All regions of a rank
    together take at most ``most_nbytes``.
    """

    def __init__(
        self, node: Group, backend: GpuBackend, kind: Kind, layout: ArenaLayout, most_nbytes: int | None = None
    ) -> None:
        self._node = node
        self._backend = backend
        self._kind = kind
        self._most_nbytes = most_nbytes
        self.layout = layout
        self._segments = share_filled(node, backend, kind, _PURPOSE, layout.nbytes, layout.absent)
        self._regions: dict[Request, SharedSegments] = {}
        self.pointers = tuple(self._segments.pointers)
        self.ll = self._at(layout.ll, layout.ll_inbox_nbytes)
        self.sentinels = self._at(layout.sentinels, layout.sentinel_inbox_nbytes)

    def has(self, request: Request) -> bool:
        return self._find(request) is not None

    def require_room(self, request: Request) -> None:
        """Raise `OverBoundError` if a new region would exceed the bound. Local, the same on all ranks.

        All ranks agree without communication, because they have the same bound and the same regions.
        """
        if self._most_nbytes is None:
            return
        wanted, *others = (round_up(each.nbytes, BLOCK_NBYTES) for each in (request, *self._regions))
        left = self._most_nbytes - sum(others)
        if wanted > left:
            raise OverBoundError(
                f"MPICOMM_MEMORY leaves {max(left, 0)} bytes for shared memory of this communicator, and "
                f'"{request.what}" takes {wanted}: raise MPICOMM_MEMORY by {wanted - left} bytes or more, or unset it'
            )

    def set_up(self, request: Request) -> None:
        """Set up a region for a request. Collective; raises `NoMemoryError`, and as ``share`` does."""
        try:
            # Only within `loading` may a thread that captures a graph allocate and wait.
            with self._backend.loading():
                where = self._node, self._backend, self._kind, request.what
                holds_messages = request.holds_messages
                segments = share_filled(*where, request.nbytes, request.absent, holds_messages=holds_messages)
        except HandleError as error:
            raise NoMemoryError(str(error), ranks=error.ranks) from error
        self._regions[request] = segments

    def region(self, request: Request) -> ArenaRegion:
        found = self._find(request)
        assert found is not None, request
        return ArenaRegion(tuple(self._regions[found].pointers), found.slots_nbytes)

    def abort(self) -> None:
        """Let the kernels of all ranks give up, as if a kernel had found a rank in another call. Local, blocking."""
        # Pairs with the loads of the abort word in is_healthy and WaitTimer: without it kernels would wait until their
        # time is up. One byte is enough, because kernels only check whether the word is zero. A report that this byte
        # overwrites loses only its operation.
        for pointer in self.pointers:
            self._backend.fill(pointer + ABORT_OPERATION, 1, MISMATCH)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's arena and regions; local."""
        yield MemoryUse.of_kind(_PURPOSE, self._kind, self._segments.own.nbytes)
        for request, segments in self._regions.items():
            yield MemoryUse.of_kind(request.what, self._kind, segments.own.nbytes)

    def memories(self) -> tuple[SharedSegments, ...]:
        """Return the memories of the arena and of all regions; local."""
        return self._segments, *self._regions.values()

    def close_peers(self) -> None:
        """Unmap the peers' memory; local."""
        for segments in self.memories():
            segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's memory; local, after every peer's `close_peers`."""
        for segments in self.memories():
            segments.close_own()

    def _find(self, request: Request) -> Request | None:
        # All ranks find the same region, because they have set up every region together.
        fitting = [
            each
            for each in self._regions
            if (each.what, each.words_nbytes) == (request.what, request.words_nbytes)
            and each.slots_nbytes >= request.slots_nbytes
        ]
        return min(fitting, key=lambda each: each.slots_nbytes, default=None)

    def _at(self, offset: int, nbytes: int) -> Inboxes:
        return Inboxes(tuple(pointer + offset for pointer in self.pointers), nbytes)


def share_filled(
    node: Group, backend: GpuBackend, kind: Kind, what: str, nbytes: int, absent: Range, *, holds_messages: bool = False
) -> SharedSegments:
    """Let the ranks open each other's memory for kernels. Collective; raises as ``share`` does.

    The bytes from and to ``absent`` hold `ABSENT` at first, and all others are zero. ``holds_messages`` is as in
    `Request`.
    """

    def fill(pointer: int) -> None:
        begin, end = absent
        backend.fill(pointer, begin, 0)
        backend.fill_words(pointer + begin, end - begin, ABSENT)
        backend.fill(pointer + end, nbytes - end, 0)

    def allocate() -> Segment:
        segment = backend.allocate(kind, nbytes)
        try:
            # This rank fills the memory before it exports it to the peers. A later fill could wipe out the first data
            # that a peer stores there.
            fill(segment.pointer)
        except Exception:
            segment.close()
            raise
        return segment

    segments = share(node, backend, what, allocate, lambda: nbytes)
    # Between calls no rank waits for another one. So calls go on if the memory of all ranks is as at first.
    segments.content = SuspendedContent(nbytes) if holds_messages else SuspendedContent(fill=fill)
    return segments


class CallMemory:
    """The memory of calls beyond the arena, and the waits of ranks for each other before they set it up.

    Local, except that all ranks meet in a set-up. The call log says in which calls the ranks of ``node`` are.
    """

    def __init__(self, node: Group, call_log: CallLog, backend: GpuBackend, arena: DeviceArena) -> None:
        self._node = node
        self._call_log = call_log
        self._backend = backend
        self._arena = arena
        self._refused: dict[str, tuple[int, NoMemoryError]] = {}  # by purpose: the smallest request that failed

    def differing_calls(self, *, wait: bool) -> list[str]:
        """Return the text of each rank's call if the ranks called different things; else an empty list.

        A rank that has not come may be in a call by MPI instead.

        ``wait`` gives ranks some time to post their calls, because the data of a rank may arrive before its post.
        """
        if wait:
            wait_until(self._call_log.all_differ, _LATE_S)
        if not (self._call_log.differ() or self._call_log.by_mpi()):
            return []
        said = self._call_log.read()
        return [f"rank {rank}: {text}" for rank, text in zip(self._node.ranks, said, strict=True)]

    def wait_for(self, missing: Callable[[], list[int]]) -> None:
        """Wait until ``missing``, which returns indices in the node, returns no rank.

        Raises `PeerError` if a rank has called something else, because that rank may be in a kernel and never come.
        Raises `CollectiveTimeoutError` for a rank that does not come in time. Every later check of the backend raises
        the same error.
        """
        wait_until(lambda: not missing() or self._call_log.differ(), self._node.timeout_s)
        behind = [self._node.ranks[index] for index in missing()]
        differ = self._call_log.differ()
        different = self.differing_calls(wait=differ) if differ or behind else []
        error: CollectiveTimeoutError | PeerError
        if different:
            error = called_differently(different, self._node.ranks)
            self._arena.abort()  # so that ranks in a kernel leave before their time is up
        elif behind:
            late = f"collective: {name_ranks(behind)} did not come within {self._node.timeout_s:g} s"
            error = CollectiveTimeoutError(f"{late}; the communicator is unusable: create another", ranks=behind)
        else:
            return
        self._backend.fail(error)
        raise error

    def choose_and_reserve(
        self, decision: Decision, longest: int, call_text: str, memory: Mapped | None
    ) -> tuple[Chosen, AlgorithmChoice, str]:
        """Choose the launcher of a call, post the call, and set up the launcher's memory.

        ``memory`` is the place of all ranks' output if that is symmetric memory. Return the choice, its record, and the
        text with the place in memory. If the ranks cannot set up memory for an algorithm of "auto", they take another
        one and log a warning. Raises `NoMemoryError` on all ranks.
        """
        operation, size, requested = decision.form.operation, decision.form.size, decision.requested
        symmetric, slow = memory is not None, ""
        without: frozenset[str] = frozenset()
        chosen = first = decision.at(longest, symmetric=symmetric)
        while True:
            requests = chosen.launcher.memory(longest, symmetric=symmetric)
            text = with_place(call_text, memory) if chosen.launcher.into_memory and memory is not None else call_text
            try:
                self.reserve(requests, text)
                return chosen, AlgorithmChoice(chosen.choice.algorithm, first.choice.why, slow), text
            except NoMemoryError as error:
                name = chosen.choice.algorithm
                # A call of one hop goes there at once, because a buffer with gaps has to stay in place. Chunks need it
                # packed, and other ranks do not know whether this rank has gaps.
                only_hop = requested == "auto" and operation.two_shot is None
                in_inboxes = size > 1 and (name == "one_shot" or only_hop)
                if not in_inboxes and (requested != "auto" or name == "one_shot"):
                    raise
                slow = f"memory is short for {name!r}: {error}"
                if in_inboxes:
                    way = "only in the inboxes of the arena"
                    chosen = decision.in_arena()
                else:
                    way = f"without algorithm {name!r}"
                    without |= {name}
                    chosen = decision.at(longest, symmetric=symmetric, without=without)
                log_once(logger.warning, f"{operation} runs slower, {way}, because memory is short: {error}")

    def reserve(self, requests: Sequence[Request], text: str | None = None) -> None:
        """Post a call, and set up the memory for its requests that is not there. Collective if some is not there.

        Raises `NoMemoryError` on all ranks if such memory exceeds the bound or failed before. This comes before the
        post, because a rank that has kept another algorithm's plan never comes here. So the ranks never try a failed
        request again.
        """
        missing = [request for request in requests if not self._arena.has(request)]
        for request in missing:
            refused = self._refused.get(request.what)
            if refused is not None and request.nbytes >= refused[0]:
                raise equal_error(refused[1])
            self._arena.require_room(request)
        if text is not None:
            self._call_log.post(text)  # before this rank waits for ranks that may be in another call
        for request in missing:
            self.wait_for(self._call_log.behind)  # all ranks set it up together
            try:
                self._arena.set_up(request)
            except NoMemoryError as error:
                self._refused[request.what] = request.nbytes, equal_error(error)
                raise
