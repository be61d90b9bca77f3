"""Exchanges that store straight into symmetric memory of the peers, as launches of direct.cu."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.direct.template import DirectCalls, DirectTemplate
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.gpu.algorithms.template import Lengths, Template
from mpicomm.collectives.operations import Operation


class IntoMemory(Algorithm):
    """Every rank stores its data straight into the symmetric output of its peers, between two barriers."""

    name = "one_shot"
    into_memory = True

    def serves(self, operation: Operation) -> bool:
        return operation.into_all and not operation.reduces

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        return (int(most_copied_nbytes(form.operation, node)) + 1, inf) if symmetric else None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        if call.memory is None:
            return "the output is not symmetric memory on all ranks"
        if node.size == 1:
            return "there is one rank"
        most_copied = most_copied_nbytes(call.operation, node)
        return None if call.one_shot.longest_nbytes > most_copied else "packets are faster for so few bytes"

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        assert call.memory is not None
        exchange, tag = call.one_shot, call.tag(into_memory=True)
        yield DirectTemplate.of(node).launch(exchange, call.memory, tag, nbytes=exchange.longest_nbytes)

    def template(self, form: Form, node: Node) -> Template | None:
        return DirectCalls(form, node)


def most_copied_nbytes(operation: Operation, node: Node) -> float:
    """Return the most bytes of one message that packets carry, also into symmetric output."""
    most_copied = _most_copied_nbytes(node.size) * node.link_speed
    if operation.traffic == "one-way":  # packets refuse longer messages of such calls
        return min(most_copied, node.arena.layout.most_inbox_nbytes)
    return most_copied


def _most_copied_nbytes(size: int) -> int:
    """Return the most bytes for which packets are faster, although a rank copies their data out of its inboxes.

    Packets save two barriers. Their other costs grow with the bytes that a rank sends, and with the number of ranks
    that send to it at once.
    """
    return 76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2
