"""Launches of packets.cu and counted_step.cu for messages with counts on the device."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.memory import Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    OVERSEERS,
    SLOT_NBYTES,
    UNIT_NBYTES,
    CountedPacketArguments,
    CountedSideArguments,
    counted_step_kernel,
    packet_kernel,
)
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import MAX_RANKS
from mpicomm.mpi.device_counts import CountedBuffer, CountedBuffers


def counted_launch(node: Node, buffers: CountedBuffers, tag: int, inboxes: Inboxes, geometry: Geometry) -> Launch:
    """Return the launch of a call; ``tag``, ``inboxes`` and ``geometry`` are the same on all ranks.

    The host knows no lengths, but it knows how much the buffers of this rank hold. So the kernel of this rank may
    differ from the kernels of its peers: see counted_step.cu.
    """
    layout, own = node.arena.layout, node.team.arenas[node.rank]
    arguments = CountedPacketArguments(
        team=node.team,
        laps=inboxes.nbytes // SLOT_NBYTES // geometry.threads,
        inbox_nbytes=inboxes.nbytes,
        flagged=layout.flagged_inboxes(own),
        fences=own + layout.fences,
    )
    arguments.team.tags[:] = [tag] * MAX_RANKS
    arguments.inboxes[: node.size] = inboxes.pointers
    arguments.counted.send = _side(buffers.send)
    arguments.counted.receive = _side(buffers.receive)
    arguments.counted.itemsize = buffers.itemsize
    kernel = (
        counted_step_kernel(node.size)
        if _takes_one_step(buffers, geometry)
        else packet_kernel(
            None, node.size, "sentinel", "paced", fan_out=False, host_slots=node.host_slots, counted=True
        )
    )
    return Launch(kernel, arguments, geometry.blocks, geometry.workers + OVERSEERS, node.early)


def _takes_one_step(buffers: CountedBuffers, geometry: Geometry) -> bool:
    """Return whether counted_step.cu can carry all that the buffers of this rank hold."""
    sides, nbytes = (buffers.send, buffers.receive), geometry.threads * UNIT_NBYTES["sentinel"]
    return all(side.displs is None and side.room * buffers.itemsize <= nbytes for side in sides)


def _side(buffer: CountedBuffer) -> CountedSideArguments:
    side = CountedSideArguments(
        buffer=buffer.pointer,
        room=buffer.room,
        counts=buffer.counts.pointer,
        wide_counts=buffer.counts.is_wide,
        follows=buffer.displs is None,
    )
    if isinstance(buffer.displs, tuple):
        side.known[: len(buffer.displs)] = buffer.displs
    elif buffer.displs is not None:
        side.displs, side.wide_displs = buffer.displs.pointer, buffer.displs.is_wide
    return side
