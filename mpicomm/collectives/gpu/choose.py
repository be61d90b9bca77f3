"""Which algorithm carries out a collective call on GPUs: one choice per call, the same on all ranks."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.errors import InvalidUsageError


def choose(call: GpuCall, asked: str, tuning: Tuning, node: Node) -> Algorithm:
    """Return the algorithm for a call: the one that was ``asked`` for, or with "auto" the fastest by the table. Local.

    Raises `InvalidUsageError` with the algorithm's reason where it was asked for and cannot carry out the call.
    """
    name = asked
    if asked == "auto":
        registered = call.memory is not None
        name = tuning.algorithm(call.operation.name, call.nbytes, node.size, registered=registered)
    algorithm, reason = _first(name, call, node)
    if algorithm is None and asked == "auto":
        return choose(call, asked, tuning.without(name), node)
    if algorithm is None:
        raise InvalidUsageError(f'algorithm="{asked}" of {call.operation}: {reason}: use "auto"')
    if node.size == 1 or call.nbytes == 0:  # there is nothing to choose
        algorithm, reason = _first("one_shot", call, node)
        assert algorithm is not None, reason
    return algorithm


def _first(name: str, call: GpuCall, node: Node) -> tuple[Algorithm | None, str]:
    """Return the first algorithm of that name that accepts the call, or None and why the last one does not."""
    reason = "no algorithm of that name is for it"
    for algorithm in ALGORITHMS:
        if algorithm.name == name and algorithm.serves(call.operation):
            refusal = algorithm.accepts(call, node)
            if refusal is None:
                return algorithm, ""
            reason = refusal
    return None, reason
