"""GpuWay: dispatches and combines on GPUs, by kernels on memory that all ranks map."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from mpicomm import environment
from mpicomm.devices.base import GpuBackend, Segment
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.experts.shape import DTYPES, Shape
from mpicomm.kernels.experts import (
    BLOCKS_OF_A_MULTIPROCESSOR,
    DISPATCH_KERNEL,
    DISPATCH_THREADS,
    QUANTIZE_THREADS,
    SUM_THREADS,
    CombineExpertsArguments,
    DispatchArguments,
    ExpertsMemory,
    QuantizeArguments,
    combine_experts_kernel,
    quantize_blocks,
    quantize_experts_kernel,
)
from mpicomm.kernels.team import MAX_BLOCKS, MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.session import Session
from mpicomm.sharing.content import SuspendedContent
from mpicomm.sharing.segments import SharedSegments, share

_PURPOSE = "experts"


@dataclass(frozen=True)
class Blocks:
    """The blocks of a launch."""

    senders: int
    receivers: int

    @property
    def total(self) -> int:
        """All blocks."""
        return self.senders + self.receivers


BlocksOfModes = dict[str, Blocks]
"""The blocks of "dispatch" and "combine", and of "dispatch of few" and "combine of few" tokens."""


def blocks_of_modes(most: int, *, by_token: bool) -> BlocksOfModes:
    """Return the blocks of launches of at most ``most`` blocks, which is 2 or more.

    In the layout by expert receivers store a token several times, so more of the blocks receive.
    """

    def cut(senders: int, receivers: int) -> Blocks:
        total = senders + receivers
        if total > most:
            senders = min(max(1, senders * most // total), most - 1)
            receivers = most - senders
        return Blocks(senders, receivers)

    return {
        "dispatch of few": cut(76, 56) if by_token else cut(44, 88),
        "dispatch": cut(78, 178),
        "combine of few": cut(128, 128),
        "combine": cut(88, 168),
    }


@dataclass(slots=True, eq=False)
class ExpertsLaunch:
    """A launch of a kernel."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int


class Filled(Protocol):
    """The part of a `Received` that launches need."""

    num_tokens: int

    @property
    def pointers(self) -> dict[str, int]:
        """The addresses of the arrays, by their names."""


class ExpertsLaunches:
    """Makes the launches of one rank. It reaches the arenas through ``team``."""

    def __init__(self, shape: Shape, team: Team, blocks: BlocksOfModes, multiprocessors: int = 1) -> None:
        self._shape = shape
        self._multiprocessors = multiprocessors
        self._quantizes = quantize_experts_kernel(shape.dtype.name)
        self.blocks = blocks
        self._memory = memory = ExpertsMemory(shape.in_kernels)
        self._quantized = team.arenas[team.rank] + memory.quantized
        self._dispatch = DispatchArguments(
            experts=memory.arguments(team, memory.shape.row),
            capacity=shape.capacity,
            all_places=shape.places,
            alignment=shape.alignment,
        )
        for each in (self._dispatch.x, self._dispatch.rows):
            each.first_nbytes, each.second_nbytes = shape.hidden * shape.row_dtype.itemsize, 4 * shape.scales
        self._combine = CombineExpertsArguments(experts=memory.arguments(team, memory.shape.sums))
        self._combines = combines_of(shape)
        for arguments, text in ((self._dispatch, "dispatch"), (self._combine, "combine")):
            arguments.experts.team.tags[:] = [zlib.crc32(text.encode())] * MAX_RANKS

    def dispatch(
        self, x: tuple[int, int], ids: int, weights: int, received: Filled, *, wide_ids: bool
    ) -> ExpertsLaunch:
        """Return the launch. The next call changes its argument.

        ``x`` are the addresses of the rows and of their scales.
        """
        arguments, pointers = self._dispatch, received.pointers
        blocks = self._blocks_for("dispatch", received.num_tokens)
        arguments.experts.senders = blocks.senders
        arguments.x.first, arguments.x.second = x
        arguments.ids, arguments.weights = ids, weights
        arguments.rows.first, arguments.rows.second = pointers["x"], pointers["scales"]
        arguments.place_weights = pointers["weights"]
        arguments.counts, arguments.offsets = pointers["counts"], pointers["offsets"]
        arguments.sources, arguments.places = pointers["sources"], pointers["places"]
        arguments.targets, arguments.tokens = pointers["targets"], pointers["tokens"]
        arguments.token_rows, arguments.place_rows = pointers["token_rows"], pointers["rows"]
        arguments.slot_ids, arguments.slot_weights = pointers["topk_ids"], pointers["topk_weights"]
        arguments.row_count = pointers["row_count"]
        arguments.num_tokens, arguments.wide_ids = received.num_tokens, wide_ids
        return ExpertsLaunch(DISPATCH_KERNEL, arguments, blocks.total, DISPATCH_THREADS)

    def quantize(self, x: int, tokens: int) -> tuple[ExpertsLaunch, tuple[int, int]]:
        """Return the launch that quantises tokens, and the addresses of the rows and of their scales."""
        shape = self._shape
        places = self._quantized, self._quantized + shape.max_tokens * shape.hidden
        groups = tokens * shape.scales
        blocks = quantize_blocks(groups, self._multiprocessors)
        return ExpertsLaunch(self._quantizes, QuantizeArguments(x, *places, groups), blocks, QUANTIZE_THREADS), places

    def combine(
        self, rows: int, received: Filled, output: int, dtype: str, values: tuple[int, int] = (0, 0), *, weighted: bool
    ) -> ExpertsLaunch:
        """Return the launch. The next call changes its argument.

        ``values`` are the addresses of the values of rows and of slots.
        """
        arguments, pointers = self._combine, received.pointers
        blocks = self._blocks_for("combine", received.num_tokens)
        arguments.experts.senders = blocks.senders
        arguments.rows, arguments.output = rows, output
        arguments.values, arguments.slot_values = values
        arguments.row_weights = pointers["weights"] if weighted else 0
        arguments.places, arguments.targets = pointers["places"], pointers["targets"]
        arguments.token_rows = pointers["token_rows"]
        arguments.tokens, arguments.num_tokens = pointers["tokens"], received.num_tokens
        return ExpertsLaunch(self._combines[dtype], arguments, blocks.total, SUM_THREADS)

    def _blocks_for(self, what: str, tokens: int) -> Blocks:
        return self.blocks[f"{what} of few" if tokens <= self._shape.most_few else what]


def combines_of(shape: Shape) -> dict[str, Variant]:
    """Return the kernel of a combine for each type of the result."""
    return {result: combine_experts_kernel(shape.dtype.name, result, by_token=shape.by_token) for result in DTYPES}


class ExpertsArena:
    """The memory of all ranks for an Experts object. The session keeps and releases it."""

    def __init__(self, session: Session, segments: SharedSegments) -> None:
        self.pointers = [segments[index].pointer for index in range(session.domain.size)]
        self.closed = False
        self._kind = session.kind
        self._segments = segments

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's arena; local."""
        return (MemoryUse.of_kind(_PURPOSE, self._kind, self._segments.own.nbytes),)

    def memories(self) -> Iterable[SharedSegments]:
        """Return the memory that a suspension may give back; local."""
        return (self._segments,)

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local, the first step of a close."""
        self.closed = True
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena; local, the last step of a close, after every peer's `close_peers`."""
        self._segments.close_own()


def require_one_domain(session: Session) -> None:
    """Raise `InvalidUsageError` unless all ranks map each other's GPU memory. It raises on all ranks alike. Local."""
    if session.domain.size == session.group.size:
        return
    nodes = len(session.placement.nodes)
    raise InvalidUsageError(
        f"Experts: the communicator has {session.group.size} ranks of {nodes} nodes, and kernels serve up to "
        f"{MAX_RANKS} ranks of one node: create the Experts on comm.Split_type(MPI.COMM_TYPE_SHARED), or send tokens "
        "to other nodes by comm.Alltoallv with counts in host memory"
    )


def share_arena(session: Session, shape: Shape) -> ExpertsArena:
    """Let all ranks open each other's arenas. Collective; a failure raises the same error on all ranks."""
    memory = ExpertsMemory(shape.in_kernels)
    backend = session.backend

    def fill(pointer: int) -> None:
        backend.zero(pointer, memory.zeroed_nbytes)

    def allocate() -> Segment:
        segment = backend.allocate(session.kind, memory.nbytes)
        try:
            # Before the exchange that tells the peers of the arena, because it could wipe out a peer's first words.
            fill(segment.pointer)
        except Exception:
            segment.close()
            raise
        return segment

    segments = share(session.domain, backend, "Experts", allocate, lambda: shape)
    # The arena has the numbers of launches, too. So calls go on if the arenas of all ranks are as at first.
    segments.content = SuspendedContent(fill=fill)
    return session.keep(ExpertsArena(session, segments))


def launches_of(session: Session, shape: Shape, backend: GpuBackend, arena: ExpertsArena) -> ExpertsLaunches:
    """Return the launches of this rank. Collective: all blocks of all ranks must run at once.

    Ranks that share a device side by side share its multiprocessors: see `DeviceEngine`.
    """
    domain = session.domain

    def facts() -> tuple[int, bytes, bool]:
        return backend.multiprocessors, backend.info.uuid, not environment.multi_process_service()

    devices = domain.exchange("Experts: devices", facts)
    uuids = [uuid for _, uuid, _ in devices]
    side_by_side = 1 if all(turns for _, _, turns in devices) else max(map(uuids.count, uuids))
    multiprocessors = max(1, min(count for count, _, _ in devices) // side_by_side)
    most = min(MAX_BLOCKS, BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors, shape.blocks or MAX_BLOCKS)
    team = Team(faults=backend.faults, timeout_ns=backend.timeout_ns, size=domain.size, rank=domain.rank)
    for index, rank in enumerate(domain.ranks):
        team.arenas[index], team.names[index] = arena.pointers[index], rank
    # Loading may wait for a device on which a kernel waits, so it comes before all launches.
    quantizes = [quantize_experts_kernel(shape.dtype.name)] if shape.scales else []
    for variant in (DISPATCH_KERNEL, *combines_of(shape).values(), *quantizes):
        backend.load(variant)
    return ExpertsLaunches(shape, team, blocks_of_modes(most, by_token=shape.by_token), multiprocessors)


def launch(backend: GpuBackend, made: Iterable[ExpertsLaunch], stream: int) -> None:
    """Enqueue launches of `ExpertsLaunches`."""
    for each in made:
        backend.launch(each.variant, each.arguments, stream, blocks=each.blocks, threads=each.threads)
