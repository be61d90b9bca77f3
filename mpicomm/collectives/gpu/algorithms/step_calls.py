"""StepCalls: the calls of a form by an algorithm that takes several steps."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.symmetric.registry import Mapped


class StepCalls:
    """The calls of a form by an algorithm without a template.

    The number of steps depends on the length of a call. So the algorithm plans each call, but from the form, without
    reading its arguments or choosing the algorithm again.
    """

    def __init__(self, algorithm: Algorithm, form: Form, node: Node) -> None:
        self._algorithm = algorithm
        self._form = form
        self._node = node

    def fill(self, send: int, receive: int, nbytes: int, hash32: int, memory: Mapped | None) -> Filled | None:
        """Return the steps of a call; else as `EvenTemplate.fill`."""
        algorithm, form, node = self._algorithm, self._form, self._node
        operation, buffers = form.operation, form.buffers(send, receive, nbytes)
        call = GpuCall(operation, operation.name, hash32, buffers, nbytes * form.blocks_counted, memory)
        if not all(node.arena.has(request) for request in algorithm.memory(call, node)):
            return None  # the ranks set up memory when they plan a call
        return [*algorithm.plan(call, node)], 0, 0
