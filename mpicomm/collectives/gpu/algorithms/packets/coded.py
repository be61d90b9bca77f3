"""Calls in which packets carry codes of 8 bits: see units.cuh. All functions are pure, and alike on all ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from mpicomm.collectives.gpu.algorithms.base import GpuCall, Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import CODES_OF_PACKET, SLOT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.geometry import geometries_of, most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.ways import PacketWay, WayOf, inboxes_of, large_inboxes
from mpicomm.kernels.team import LANES


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
    def unit_nbytes(self) -> int:
        """The bytes of memory that one packet carries."""
        return CODES_OF_PACKET * self.itemsize

    def way(self, nbytes: int, node: Node, *, fan_out: bool = False) -> PacketWay:
        """Return the way of messages of at most ``nbytes``, for which the arena has `memory`."""
        units, arena = -(-nbytes // self.unit_nbytes), node.arena
        most_units, geometries = geometries_of(most_blocks_of(node), node.size, fan_out=fan_out, coded=self.itemsize)
        inboxes = arena.sentinels
        for request in self.memory(nbytes, node):
            inboxes = inboxes_of(arena.layout, arena.region(request))
        return PacketWay.of("sentinel", inboxes, geometries[bisect_left(most_units, units)], self.unit_nbytes)

    def ways(self, node: Node, *, fan_out: bool = False) -> WayOf:
        """Return the ways of messages of any length, if the arena has the inboxes."""

        def way_of(nbytes: int) -> PacketWay | None:
            if not all(node.arena.has(request) for request in self.memory(nbytes, node)):
                return None  # the ranks set up memory when they plan a call
            return self.way(nbytes, node, fan_out=fan_out)

        return way_of

    def memory(self, nbytes: int, node: Node) -> Sequence[Request]:
        """Return the memory beyond the arena for messages of at most ``nbytes``."""
        packed = -(-nbytes // (self.unit_nbytes * LANES)) * LANES * SLOT_NBYTES  # whole warps
        return () if packed <= node.arena.sentinels.nbytes else (large_inboxes(node.arena.layout, packed),)


def coding_of(call: GpuCall | Form) -> Coding | None:
    """Return how packets carry the elements of a call or a form; None if they carry them as they are."""
    if call.wire is None:
        return None
    wire, dtype = call.wire
    return Coding(dtype.name, dtype.itemsize, wire.codes, wire.again and call.operation.two_shot is not None)
