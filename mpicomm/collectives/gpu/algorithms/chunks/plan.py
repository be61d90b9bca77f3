"""Exchanges of messages of any size and kind as launches of exchange.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node, moved
from mpicomm.collectives.gpu.algorithms.chunks.template import ChunkCalls, ChunkTemplate, slots_of
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.algorithms.template import Template
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import ring_refusal


class ChunkedOneShot(Algorithm):
    """Ranks exchange data of any size and kind in chunks. This algorithm accepts every call."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        return True

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        return (slots_of(node.arena.layout),) if call.one_shot.longest_nbytes else ()

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        if call.one_shot.longest_nbytes:
            yield from _launched(call, node, [call.one_shot])
            yield from moved(call.one_shot)

    def template(self, form: Form, node: Node) -> Template | None:
        return ChunkCalls(form, node) if form.is_even else None


class Ring(Algorithm):
    """Each rank sends chunks only to the next rank. A reduction follows the order of the ring, not of the ranks."""

    name = "ring"
    in_rank_order = False

    def serves(self, operation: Operation) -> bool:
        return operation.ring is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        return ring_refusal(call.buffers.op)

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        return (slots_of(node.arena.layout),)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        assert call.operation.ring is not None
        return _launched(call, node, call.operation.ring(call.buffers))


def _launched(call: GpuCall, node: Node, exchanges: Sequence[Exchange]) -> Iterator[Launch]:
    template, slots = ChunkTemplate(node.team, node.arena.layout), node.arena.region(slots_of(node.arena.layout))
    for step, exchange in enumerate(exchanges):
        launch = template.launch(exchange, (call.hash32, step), slots.pointers)
        if launch is not None:
            yield launch
