"""CountedPackets: launches of packets with counts on the device. A call fills in addresses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from mpicomm.collectives.gpu.algorithms.base import Domain, Filled, KernelTemplate
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    OVERSEERS,
    CountedArguments,
    CountedPacketArguments,
    counted_step_kernel,
    packet_kernel,
)
from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig
from mpicomm.kernels.team import MAX_RANKS
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.device_counts import CountedBuffer, CountedBuffers, DeviceIndices
from mpicomm.mpi.plain_arrays import PlainBlocks

_AT = [
    CountedPacketArguments.counted.offset + side.offset for side in (CountedArguments.send, CountedArguments.receive)
]
_write_side = struct.Struct("=4Q").pack_into


class CountedPackets(KernelTemplate):
    """Launches for calls whose buffers, counts and displacements are of the same kinds as ``buffers``.

    The host knows no lengths, but it knows how much the buffers of this rank hold. So the kernel of this rank may
    differ from the kernels of its peers: see counted_step.cu. ``tag`` and the result of ``config_of`` are the same on
    all ranks.
    """

    def __init__(
        self, domain: Domain, buffers: CountedBuffers, tag: int, config_of: Callable[[int], PacketConfig]
    ) -> None:
        layout, own = domain.arena.layout, domain.team.arenas[domain.rank]
        flagged, fences = layout.flagged_inboxes(own), own + layout.fences
        self.arguments = arguments = CountedPacketArguments(team=domain.team, flagged=flagged, fences=fences)
        self.early = domain.early
        arguments.team.tags[:] = [tag] * MAX_RANKS
        counted = arguments.counted
        counted.itemsize = self._itemsize = buffers.itemsize
        self._sides = counted.send, counted.receive
        for side, buffer in zip(self._sides, (buffers.send, buffers.receive), strict=True):
            side.wide_counts, side.follows = buffer.counts.is_wide, buffer.displs is None
            side.wide_displs = isinstance(buffer.displs, DeviceIndices) and buffer.displs.is_wide
        self._follow = all(side.follows for side in self._sides)
        self._size, self._host_slots = domain.size, domain.host_slots
        self._config_of = config_of
        self._config: PacketConfig | None = None
        self._most = -1
        """The most elements of a buffer for the kernel of one step; -1 if no call takes it."""
        self._shape = 0, 0

    def fill(self, sent: PlainBlocks, received: PlainBlocks) -> Filled:
        """Write a call into `arguments`. Does not look at the types of the buffers."""
        config, arguments = self._config_of(0), self.arguments
        if config is not self._config:
            self._config = config
            arguments.laps, arguments.inbox_nbytes = config.laps, config.inboxes.nbytes
            arguments.inboxes[: self._size] = config.inboxes.pointers
            self._shape = config.blocks, config.workers + OVERSEERS
            self._most = config.step_nbytes // self._itemsize if self._follow else -1
        for (pointer, room, _, counts, displs), at, side in zip((sent, received), _AT, self._sides, strict=True):
            if type(displs) is tuple:
                side.known[: self._size], displs = displs, None
            _write_side(arguments, at, pointer, room, counts, displs or 0)
        return (sent[1] <= self._most and received[1] <= self._most, *self._shape)

    def variant(self, kernel: bool) -> Variant:
        """Return the source and options of a kernel: the kernel of one step, or the kernel of any steps."""
        if kernel:
            return counted_step_kernel(self._size)
        return packet_kernel(
            None, self._size, "sentinel", "paced", fan_out=False, host_slots=self._host_slots, counted=True
        )


def plain_side(buffer: CountedBuffer) -> PlainBlocks:
    """Return a read buffer as `fill` takes it."""
    displs: Any = buffer.displs
    if isinstance(displs, DeviceIndices):
        displs = displs.pointer
    return buffer.pointer, buffer.room, None, buffer.counts.pointer, displs
