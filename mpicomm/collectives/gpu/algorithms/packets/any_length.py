"""Packets for messages of any length, in existing inboxes.

The kernel is the same for short and long messages. So it can carry calls in which only the two ranks of a message know
its length. With two kernels, ranks in one kernel would wait for ranks in the other kernel. If counts lie on the device,
a variant of the kernel reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpicomm.collectives.gpu.algorithms.base import ALL_LENGTHS, Algorithm, GpuCall, Lengths, Node, Template, moved
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import UNIT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.counted import CountedPackets
from mpicomm.collectives.gpu.algorithms.packets.geometry import geometry_within, most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.template import PacketBlocks, PacketTemplate
from mpicomm.collectives.gpu.algorithms.packets.ways import (
    ANY_NBYTES,
    any_length_way,
    any_length_ways,
    coding_of,
    inboxes_of,
    large_inboxes,
)
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.operations import Operation


class AnyLengthPackets(Algorithm):
    """All data goes straight to the ranks that need it, in messages of any length; it needs no memory.

    If there is no memory for another algorithm, it also carries calls with counts that all ranks know. Such a call uses
    the inboxes `Arena.sentinels`, because `Arena.any_length` changes only for calls with private lengths.
    """

    name = "one_shot"
    counted = True

    def serves(self, operation: Operation) -> bool:
        return True

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        return ALL_LENGTHS if form.operation.counts == "private" else None

    def template(self, form: Form, node: Node) -> Template:
        return PacketBlocks(form, node, any_length_ways(node))

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        if node.size == 1 and call.counted is None:
            return "there is one rank"
        return None if call.lengths_are_private else "all ranks know the lengths of all messages"

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        if call.counted is not None:
            yield CountedPackets(node, call.counted, call.tag(), any_length_ways(node)).launch(call.counted)
            return
        inboxes, coding = node.arena.any_length if call.lengths_are_private else node.arena.sentinels, coding_of(call)
        template = PacketTemplate(node, call.one_shot, call.reduction, coding=coding)
        if coding is None:
            yield template.launch(call.tag(), any_length_way(node, inboxes), ANY_NBYTES)
        else:  # all ranks know the length
            yield template.launch(call.tag(), coding.way_within(inboxes, node), call.one_shot.longest_nbytes)
        yield from moved(call.one_shot)


def larger_inboxes(node: Node, nbytes: int) -> list[Request]:
    """Return the inboxes in which messages of ``nbytes`` take fewer steps than in `Arena.any_length`, the best first.

    Fewer steps need more threads, and more threads need larger inboxes.
    """

    def steps_in(inbox_nbytes: int) -> int:
        shape = geometry_within(inbox_nbytes, most_blocks_of(node), node.size)
        return shape.steps(-(-nbytes // UNIT_NBYTES["sentinel"]))

    layout = node.arena.layout
    fewest, found = steps_in(node.arena.any_length.nbytes), []
    for inbox_nbytes in layout.large_inboxes_nbytes:
        if steps_in(inbox_nbytes) < fewest:
            fewest = steps_in(inbox_nbytes)
            found.append(large_inboxes(layout, inbox_nbytes))
    return found[::-1]


def inboxes_for(node: Node, request: Request) -> Inboxes:
    """Return the existing inboxes for a request of `larger_inboxes`."""
    return inboxes_of(node.arena.layout, node.arena.region(request))
