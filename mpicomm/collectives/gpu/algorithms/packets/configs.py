"""Packet configurations: protocol, inboxes and launch geometry by message size, also for quantized packets.

All of it is the same on all ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.base import Filled, Form
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, ArenaLayout, Domain, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    OVERSEERS,
    QUANTIZED_OF_PACKET,
    SLOT_NBYTES,
    STAGES,
    UNIT_NBYTES,
    Protocol,
    carried_nbytes,
    ll_can_carry,
    most_workers,
    parts_of,
)
from mpicomm.kernels.epilogue import NORM_THREADS
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES

_WORKERS = (128, 256, 512)


class Geometry(NamedTuple):
    """``workers`` threads of each block move data."""

    blocks: int
    workers: int

    @property
    def threads(self) -> int:
        """All threads that move data."""
        return self.blocks * self.workers


@cache
def geometries_of(
    most_blocks: int, size: int, *, fan_out: bool, quantized: bool = False
) -> tuple[list[int], list[Geometry]]:
    """Return the most packets that geometries between ``size`` ranks move in one step, and these geometries.

    The last geometry, which has no such number, is for all longer messages. The choice is measured on H200s: one step
    if possible, with as many blocks as there are, each as small as one step allows. ``quantized`` is as in
    `most_workers`.
    """
    most, units, geometries = most_workers(size, fan_out=fan_out, one_step=True), [0], list[Geometry]()
    for workers in (*(each for each in _WORKERS if each < most), most):
        of_one_block = [Geometry(1, few) for few in range(LANES, workers, LANES)]
        for geometry in (*of_one_block, *[Geometry(1 + more, workers) for more in range(most_blocks)]):
            if geometry.threads > units[-1]:
                units.append(geometry.threads)
                geometries.append(geometry)
    workers = most_workers(size, fan_out=fan_out, one_step=False, quantized=quantized)
    return units[1:], [*geometries, Geometry(most_blocks, workers)]


_STEP_NBYTES = NORM_THREADS * SLOT_NBYTES  # of a row
_MOST_STEPS = 8  # of a row


def most_groups(size: int, *, fan_out: bool) -> int:
    """Return the most groups of a block between ``size`` ranks: ``kGroups`` in rows.cuh."""
    return 1 if size > 2 or fan_out else 2


def fewest_rows(row_nbytes: int, most_blocks: int, shards: int) -> float:
    """Return the fewest rows of a call that the reducing kernel normalises; a later kernel normalises fewer.

    ``shards`` ranks each reduce a shard. Rows begin and end with whole packets. Only one group of threads takes a row,
    and in a plain reduction the threads of all multiprocessors share it. So a row has at most 8 steps, unless there is
    a row for each block.
    """
    if row_nbytes % SLOT_NBYTES != 0:
        return inf
    if shards > 1:
        # With fewer rows, some blocks would end a row of each shard, after the last packet, and others none. A later
        # kernel has blocks for all rows at once.
        return shards * (most_blocks - 1) + 1
    return 1 if row_nbytes <= _MOST_STEPS * _STEP_NBYTES else most_blocks


def row_geometry(count: int, row_nbytes: int, most_blocks: int, size: int, *, fan_out: bool) -> tuple[Geometry, int]:
    """Return the threads that normalise ``count`` rows of the longest shard, and their steps: see rows.cuh.

    It is the same on all ranks.
    """
    blocks = min(count, most_blocks)
    groups = min(most_groups(size, fan_out=fan_out), -(-count // blocks))
    steps = -(-count // (blocks * groups)) * -(-row_nbytes // _STEP_NBYTES)
    return Geometry(blocks, groups * NORM_THREADS), steps


class ProtocolLimits(NamedTuple):
    """The most bytes from one rank to another for which LL packets are the fastest, and for which sentinels fit."""

    ll: float
    sentinel: float


def limits_of(reduction: Reduction | None, domain: Domain, *, to_all: bool) -> ProtocolLimits:
    """Return the limits of calls in which each rank sends to all and receives from all, or mostly does one of these."""
    # If a launch would reuse slots of inboxes, chunks are faster for data that only goes one way.
    sentinel = inf if to_all else domain.arena.layout.most_inbox_nbytes
    if reduction is not None and not ll_can_carry(reduction[0]):
        return ProtocolLimits(0, sentinel)
    # LL packets take less time for each message, and sentinel packets halve the traffic.
    fastest = 16 << 10 if reduction is not None else (96 << 10 if to_all else 192 << 10) // (domain.size - 1)
    return ProtocolLimits(min(carried_nbytes(domain.arena.ll.nbytes, "ll"), fastest * domain.link_speed), sentinel)


@dataclass(frozen=True)
class WireFormat:
    """How packets carry quantized elements."""

    element: str
    itemsize: int
    dtype: str
    quantizes_result: bool
    """Whether the result of a reduction travels quantized, too."""

    @property
    def packet_nbytes(self) -> int:
        """The bytes of memory that one packet carries."""
        return QUANTIZED_OF_PACKET * self.itemsize


Stepped = tuple[Filled, int, int, int]
"""A launch, its steps, the steps that an inbox holds, and the peers with which the ranks pace each other, as bits."""


class PacketConfig:
    """How a launch carries messages of some lengths; the same on all ranks. Nothing changes it.

    With ``wire_format`` the messages are between ``size`` ranks. If the kernel normalises rows, all messages count as
    ``row_nbytes``, the bytes of all slots; else it is 0. If other ranks may have longer messages than this rank, a
    launch of one step has as many ``laps`` as theirs.
    """

    def __init__(
        self,
        protocol: Protocol,
        inboxes: Inboxes,
        geometry: Geometry,
        wire_format: WireFormat | None = None,
        size: int = 0,
        *,
        row_nbytes: int = 0,
        others_are_longer: bool = False,
    ) -> None:
        self.protocol, self.inboxes, self.row_nbytes = protocol, inboxes, row_nbytes
        self.blocks, self.workers = blocks, workers = geometry
        packet_nbytes, slots, parts = UNIT_NBYTES[protocol], inboxes.nbytes // SLOT_NBYTES, 1
        packets = slots
        if wire_format is not None:  # the slots of a warp lie side by side
            packet_nbytes, parts = wire_format.packet_nbytes, parts_of(size, one_step=False)
            packets, slots = packets // LANES * LANES, packets // (parts * LANES) * LANES
        self.parts, self.unit_nbytes = parts, parts * packet_nbytes
        """The packets of a unit, if messages take several steps, and its bytes of memory. A unit is the work of a
        thread in a step."""
        self.slots, self.laps = slots, slots // (blocks * workers)
        """The units, and the steps, that an inbox holds."""
        self.step_nbytes = packet_nbytes * min(blocks * workers, packets)
        """The longest message that goes in one step."""
        launch, laps = ((protocol, "one"), blocks, workers + OVERSEERS), self.laps if others_are_longer else 1
        self.in_one_step: Stepped = launch, 1, laps, 0


class Configs(NamedTuple):
    """The configs of messages, by the most bytes of a message; the same on all ranks."""

    of: Callable[[int], PacketConfig | None]
    """Returns the config; None if the arena lacks the memory."""
    memory: Callable[[int], Sequence[Request]] = lambda nbytes: ()
    """Returns the memory beyond the arena."""


ANY_NBYTES = 1 << 62
"""The length that all ranks assume for a message if only two ranks know its length."""


def wire_format_of(form: Form) -> WireFormat | None:
    """Return how packets carry the quantized elements of a form; None if elements travel as they are."""
    if form.wire is None:
        return None
    wire, dtype = form.wire
    return WireFormat(
        dtype.name, dtype.itemsize, wire.dtype, wire.quantizes_result and form.operation.two_shot is not None
    )


def sized_configs(
    limits: ProtocolLimits, domain: Domain, *, fan_out: bool = False, wire_format: WireFormat | None = None
) -> Configs:
    """Return the configs of calls in which all ranks know the longest message, within the limits, and at least 1 byte.

    Quantized messages have no limits.
    """
    arena, layout, sentinels, size = domain.arena, domain.arena.layout, domain.arena.sentinels, domain.size
    most_units, geometries = geometries_of(domain.most_blocks, size, fan_out=fan_out, quantized=wire_format is not None)
    most_ll = limits.ll if wire_format is None else 0
    ll_nbytes, sentinel_nbytes = (
        UNIT_NBYTES["ll"],
        wire_format.packet_nbytes if wire_format else UNIT_NBYTES["sentinel"],
    )
    room = sentinels.nbytes
    slots_of_unit = parts_of(size, one_step=False) * LANES  # of the unit of a warp
    stages = STAGES if fan_out else 1
    made: dict[tuple[int, int], PacketConfig] = {}

    def packed(nbytes: int) -> int:
        """Return the bytes that a message takes in an inbox."""
        if wire_format is None:
            return nbytes
        return -(-nbytes // (sentinel_nbytes * slots_of_unit)) * slots_of_unit * SLOT_NBYTES

    def config_of(nbytes: int) -> PacketConfig | None:
        # Every new call comes here.
        if nbytes <= most_ll:
            kind, of_packet = 0, ll_nbytes
        else:
            of_packet, in_inbox = sentinel_nbytes, nbytes if wire_format is None else packed(nbytes)
            kind = 1 if in_inbox <= room else layout.large_inbox_nbytes(in_inbox)
        key = kind, bisect_left(most_units, -(-nbytes // of_packet))
        config = made.get(key)
        if config is None:
            protocol: Protocol = "sentinel" if kind else "ll"
            inboxes = sentinels if kind else arena.ll
            if kind > 1:
                # A request keeps its region, because the ranks set up another region only if no region is large enough.
                request = large_inboxes(layout, packed(nbytes), stages)
                if not arena.has(request):
                    return None
                region = arena.region(request)
                inboxes = Inboxes(region.pointers, region.slots_nbytes // (PARITIES * stages * size), stages)
            config = made[key] = PacketConfig(protocol, inboxes, geometries[key[1]], wire_format, size)
        return config

    def memory(nbytes: int) -> Sequence[Request]:
        is_large = nbytes > most_ll and packed(nbytes) > room
        return (large_inboxes(layout, packed(nbytes), stages),) if is_large else ()

    return Configs(config_of, memory)


def row_configs(row_nbytes: int, domain: Domain, *, fan_out: bool) -> Configs:
    """Return the configs of calls in which the kernel also normalises rows of so many bytes."""
    # The sum of squares has the order of packets of 16 bytes, so all lengths use sentinels.
    configs = sized_configs(ProtocolLimits(0, inf), domain, fan_out=fan_out)

    def rows_of(nbytes: int) -> tuple[Geometry, int]:
        rows = nbytes // row_nbytes
        geometry, steps = row_geometry(rows, row_nbytes, domain.most_blocks, domain.size, fan_out=fan_out)
        # A row may end within its last step, so each message counts as the bytes of all slots.
        return geometry, steps * geometry.threads * SLOT_NBYTES

    def config_of(nbytes: int) -> PacketConfig | None:
        geometry, slots_nbytes = rows_of(nbytes)
        config = configs.of(slots_nbytes)
        return config and PacketConfig(config.protocol, config.inboxes, geometry, row_nbytes=slots_nbytes)

    return Configs(config_of, lambda nbytes: configs.memory(rows_of(nbytes)[1]))


def any_length_config(domain: Domain, wire_format: WireFormat | None = None) -> PacketConfig:
    """Return the config of messages whose length only two ranks know, or that are longer than their inboxes."""
    # Nothing is sent on, so the memory of both stages may hold the messages. Calls with two stages may come before and
    # after, because both forms have the same half of the memory for a parity (see packets.cu): a rank still stores only
    # into slots that their owner took and reset two launches before.
    both, size, blocks, quantized = domain.arena.sentinels, domain.size, domain.most_blocks, wire_format is not None
    inboxes = Inboxes(both.pointers, both.stages * both.nbytes, stages=1)
    # A launch reuses slots, so an inbox holds at least `FEWEST_LAPS` steps.
    slots = inboxes.nbytes // SLOT_NBYTES // (parts_of(size, one_step=False) if quantized else 1)
    room = slots // (FEWEST_LAPS * blocks) // LANES * LANES
    workers = min(room, most_workers(size, fan_out=False, one_step=False, quantized=quantized))
    return PacketConfig(
        "sentinel", inboxes, Geometry(blocks, workers), wire_format, size, others_are_longer=not quantized
    )


def large_inboxes(layout: ArenaLayout, nbytes: int, stages: int) -> Request:
    """Return the request for inboxes of the sentinel protocol for ``nbytes`` from each rank, or for a part of them."""
    slots_nbytes = PARITIES * stages * layout.size * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)
