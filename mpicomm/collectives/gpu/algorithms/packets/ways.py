"""Ways: the protocol, the inboxes and the threads of messages, by their length, and packets with codes of 8 bits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.base import Domain, Filled
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    CODES_OF_PACKET,
    OVERSEERS,
    SLOT_NBYTES,
    STAGES,
    UNIT_NBYTES,
    Protocol,
    carried_nbytes,
    flags_can_carry,
    parts_of,
)
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry, geometries_of, geometry_within, most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.rows import RowGeometry, row_geometry
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES


class ProtocolLimits(NamedTuple):
    """The most bytes from one rank to another for which LL packets and sentinel packets are the fastest."""

    flagged: float
    sentinel: float


def packet_protocol(nbytes: int, limits: ProtocolLimits) -> Protocol | None:
    """Return the protocol for messages of at most ``nbytes``, or None if no protocol fits."""
    most_flagged, most_sentinel = limits
    if nbytes <= most_flagged:
        return "flagged" if nbytes else None
    return "sentinel" if nbytes <= most_sentinel else None


def one_shot_limits(operation: Operation, reduction: Reduction | None, domain: Domain) -> ProtocolLimits:
    """Return the limits of calls in one exchange."""
    to_all = operation.traffic != "one-way"
    # If a launch would reuse slots of inboxes, chunks are faster for data that only goes one way.
    return _limits(reduction, domain, to_all=to_all, sentinel=inf if to_all else domain.arena.layout.most_inbox_nbytes)


def two_shot_limits(reduction: Reduction | None, domain: Domain) -> ProtocolLimits:
    """Return the limits of calls in two exchanges."""
    return _limits(reduction, domain, to_all=True, sentinel=inf)


def _limits(reduction: Reduction | None, domain: Domain, *, to_all: bool, sentinel: float) -> ProtocolLimits:
    if reduction is not None and not flags_can_carry(reduction[0]):
        return ProtocolLimits(0, sentinel)
    fastest = _most_flagged_nbytes(domain.size, to_all, reduces=reduction is not None) * domain.link_speed
    return ProtocolLimits(min(carried_nbytes(domain.arena.flagged.nbytes, "flagged"), fastest), sentinel)


def _most_flagged_nbytes(size: int, to_all: bool, *, reduces: bool) -> int:
    """Return the most bytes for which LL packets are faster than sentinel packets, which halve the traffic."""
    if reduces:
        return 16 << 10
    # With to_all each rank sends to all and receives from all; else a rank mostly does one of these.
    return (96 << 10 if to_all else 192 << 10) // (size - 1)


Stepped = tuple[Filled, int, int, int]
"""A launch, its steps, the steps that an inbox holds, and the peers with which the ranks pace each other, as bits."""


@dataclass(frozen=True, slots=True)
class PacketWay:
    """How a launch carries messages of some lengths; the same on all ranks."""

    protocol: Protocol
    inboxes: Inboxes
    blocks: int
    workers: int
    parts: int
    """The packets of a unit, if messages take several steps. A unit is the work of a thread in a step."""
    unit_nbytes: int
    """The bytes of memory that a unit carries."""
    slots: int
    """The units that an inbox holds."""
    laps: int
    """The steps that an inbox holds."""
    step_nbytes: int
    """The longest message that goes in one step."""
    in_one_step: Stepped
    """The launch for messages of at most `step_nbytes`."""
    row_nbytes: int = 0
    """The bytes as which all messages count if the kernel normalises rows: the bytes of all slots; else 0."""

    @classmethod
    def of(
        cls, protocol: Protocol, inboxes: Inboxes, geometry: Geometry, coded_nbytes: int = 0, parts: int = 1
    ) -> PacketWay:
        """Return a way. A packet of codes stands for ``coded_nbytes`` of memory. ``parts`` is as in the class."""
        blocks, workers = geometry
        packet_nbytes, packets = coded_nbytes or UNIT_NBYTES[protocol], inboxes.nbytes // SLOT_NBYTES
        slots = packets
        if coded_nbytes:  # the slots of a warp lie side by side
            packets, slots = packets // LANES * LANES, packets // (parts * LANES) * LANES
        threads = blocks * workers
        step_nbytes, launch = packet_nbytes * min(threads, packets), ((protocol, "one"), blocks, workers + OVERSEERS)
        unit_nbytes, laps = parts * packet_nbytes, slots // threads
        one_step = launch, 1, 1, 0
        return cls(protocol, inboxes, blocks, workers, parts, unit_nbytes, slots, laps, step_nbytes, one_step)


class Ways(NamedTuple):
    """The ways of messages, by the most bytes of a message; the same on all ranks."""

    of: Callable[[int], PacketWay | None]
    """Returns the way; None if the arena lacks the memory."""
    memory: Callable[[int], Sequence[Request]] = lambda nbytes: ()
    """Returns the memory beyond the arena."""


ANY_NBYTES = 1 << 62
"""The length that all ranks assume for a message if only two ranks know its length."""


class _Ways(dict[int, PacketWay]):
    """The ways of one protocol in the same inboxes, by the number of their geometry. They are made at first need."""

    def __init__(self, protocol: Protocol, inboxes: Inboxes, geometries: Sequence[Geometry]) -> None:
        self._given = protocol, inboxes, geometries

    def __missing__(self, number: int) -> PacketWay:
        protocol, inboxes, geometries = self._given
        self[number] = way = PacketWay.of(protocol, inboxes, geometries[number])
        return way


def sized_ways(limits: ProtocolLimits, domain: Domain, *, fan_out: bool = False) -> Ways:
    """Return the ways of calls in which all ranks know the longest message."""
    most_units, geometries = geometries_of(most_blocks_of(domain), domain.size, fan_out=fan_out)
    arena, sentinels = domain.arena, domain.arena.sentinels
    flagged_ways = _Ways("flagged", arena.flagged, geometries)
    sentinel_ways = _Ways("sentinel", sentinels, geometries)
    large_ways: dict[tuple[int, int], PacketWay] = {}
    most_flagged, most_sentinel = limits
    flag_nbytes, nbytes_of_sentinel, room = UNIT_NBYTES["flagged"], UNIT_NBYTES["sentinel"], sentinels.nbytes

    def way_of(nbytes: int) -> PacketWay | None:
        # The choice of `packet_protocol`, inlined, because every new call comes here.
        if nbytes <= most_flagged:
            return flagged_ways[bisect_left(most_units, -(-nbytes // flag_nbytes))] if nbytes else None
        if nbytes > most_sentinel:
            return None
        number = bisect_left(most_units, -(-nbytes // nbytes_of_sentinel))
        if nbytes <= room:
            return sentinel_ways[number]
        key = arena.layout.large_inbox_nbytes(nbytes), number
        way = large_ways.get(key)
        if way is None:
            request = large_inboxes(arena.layout, nbytes)
            if not arena.has(request):
                return None
            inboxes = inboxes_of(arena.layout, arena.region(request))
            # A request keeps its region, because the ranks set up another region only if no region is large enough.
            way = large_ways[key] = PacketWay.of("sentinel", inboxes, geometries[number])
        return way

    def memory(nbytes: int) -> Sequence[Request]:
        is_large = packet_protocol(nbytes, limits) == "sentinel" and nbytes > room
        return (large_inboxes(arena.layout, nbytes),) if is_large else ()

    return Ways(way_of, memory)


def row_ways(row_nbytes: int, domain: Domain, *, fan_out: bool) -> Ways:
    """Return the ways of calls in which the kernel also normalises rows of so many bytes."""
    # The sum of squares has the order of packets of 16 bytes, so all lengths use sentinels. A thread may have no unit
    # in a step, so each message counts as the bytes of all slots.
    ways = sized_ways(ProtocolLimits(0, inf), domain, fan_out=fan_out)

    def way_of(nbytes: int) -> PacketWay | None:
        rows = rows_of(nbytes)
        way = ways.of(rows.nbytes)
        return way and replace(PacketWay.of(way.protocol, way.inboxes, rows.threads), row_nbytes=rows.nbytes)

    def rows_of(nbytes: int) -> RowGeometry:
        return row_geometry(nbytes // row_nbytes, row_nbytes, most_blocks_of(domain), domain.size, fan_out=fan_out)

    return Ways(way_of, lambda nbytes: ways.memory(rows_of(nbytes).nbytes))


def any_length_ways(domain: Domain) -> Callable[[int], PacketWay]:
    """Return the way of calls in which only two ranks know the length of a message; one way for all lengths."""
    arena, way = domain.arena, any_length_way(domain, domain.arena.any_length)

    def way_of(nbytes: int) -> PacketWay:
        nonlocal way
        if way.inboxes is not arena.any_length:  # the ranks have set up larger inboxes
            way = any_length_way(domain, arena.any_length)
        return way

    return way_of


def any_length_way(domain: Domain, inboxes: Inboxes) -> PacketWay:
    """Return the way of messages of any length in these inboxes."""
    way = PacketWay.of("sentinel", inboxes, geometry_within(inboxes.nbytes, most_blocks_of(domain), domain.size))
    launch, steps, _, paced = way.in_one_step
    return replace(way, in_one_step=(launch, steps, way.laps, paced))  # other ranks may have longer messages


def large_inboxes(layout: ArenaLayout, nbytes: int) -> Request:
    """Return the request for inboxes of the sentinel protocol for ``nbytes`` from each rank, or for a part of them."""
    slots_nbytes = _number_of_inboxes(layout) * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)


def inboxes_of(layout: ArenaLayout, region: ArenaRegion) -> Inboxes:
    """Return the inboxes in a region for a request of `large_inboxes`."""
    return Inboxes(region.pointers, region.slots_nbytes // _number_of_inboxes(layout))


def _number_of_inboxes(layout: ArenaLayout) -> int:
    return PARITIES * STAGES * layout.size


@dataclass(frozen=True)
class Coding:
    """How packets carry elements as codes."""

    element: str
    """The element type, by its name."""
    itemsize: int
    codes: str
    codes_result: bool
    """Whether the result of a reduction becomes codes again."""

    @property
    def packet_nbytes(self) -> int:
        """The bytes of memory that one packet carries."""
        return CODES_OF_PACKET * self.itemsize

    def way_within(self, inboxes: Inboxes, domain: Domain) -> PacketWay:
        """Return the way of messages of any length in these inboxes, which may be smaller."""
        geometry = geometry_within(inboxes.nbytes, most_blocks_of(domain), domain.size, coded=True)
        return self.way_in(inboxes, geometry, domain.size)

    def way_in(self, inboxes: Inboxes, geometry: Geometry, size: int) -> PacketWay:
        """Return the way of messages between ``size`` ranks in these inboxes with this geometry."""
        return PacketWay.of("sentinel", inboxes, geometry, self.packet_nbytes, parts_of(size, one_step=False))

    def ways(self, domain: Domain, *, fan_out: bool = False) -> Ways:
        """Return the ways of messages of any length."""
        most_packets, geometries = geometries_of(most_blocks_of(domain), domain.size, fan_out=fan_out, coded=True)
        arena = domain.arena

        def way_of(nbytes: int) -> PacketWay | None:
            inboxes = arena.sentinels
            for request in memory(nbytes):
                if not arena.has(request):
                    return None
                inboxes = inboxes_of(arena.layout, arena.region(request))
            geometry = geometries[bisect_left(most_packets, -(-nbytes // self.packet_nbytes))]
            return self.way_in(inboxes, geometry, domain.size)

        def memory(nbytes: int) -> Sequence[Request]:
            slots = parts_of(domain.size, one_step=False) * LANES  # of the unit of a warp
            packed = -(-nbytes // (self.packet_nbytes * slots)) * slots * SLOT_NBYTES
            return () if packed <= arena.sentinels.nbytes else (large_inboxes(arena.layout, packed),)

        return Ways(way_of, memory)


def coding_of(form: Form) -> Coding | None:
    """Return how packets carry the elements of a form; None if they carry them as they are."""
    if form.wire is None:
        return None
    wire, dtype = form.wire
    return Coding(dtype.name, dtype.itemsize, wire.codes, wire.again and form.operation.two_shot is not None)
