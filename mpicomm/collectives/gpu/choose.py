"""Which algorithm carries out a collective call on GPUs: one choice per call, the same on all ranks.

`choose` is a pure function of the call, the table and the node. `Preparation` asks it, sets up the memory that the
algorithm needs, and returns the steps of this rank.
"""

from __future__ import annotations

from functools import lru_cache

from mpicomm.collectives.board import Board
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.gpu.arena import DeviceArena, NoMemoryError
from mpicomm.collectives.gpu.mismatch import DeviceCalls
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.errors import InvalidUsageError
from mpicomm.log import logger


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


class Preparation:
    """Chooses an algorithm for each call and sets up its memory. Local but for a set-up, in which all ranks meet."""

    def __init__(self, tuning: Tuning, node: Node, arena: DeviceArena, board: Board, calls: DeviceCalls) -> None:
        self._tuning = tuning
        self._node = node
        self._arena = arena
        self._board = board
        self._calls = calls
        self._refused: dict[str, tuple[int, str]] = {}  # by purpose: the least memory that was refused, and why

    def steps(self, call: GpuCall, asked: str) -> tuple[str, list[Step]]:
        """Return a call in words and this rank's steps; see `DeviceEngine.prepare`."""
        _ = call.reduction  # it raises here where it is not defined, before the other ranks are told of the call
        table = self._tuning
        while True:
            algorithm = choose(call, asked, table, self._node)
            requests = algorithm.memory(call, self._node)
            text = call.text(into_memory=algorithm.into_memory)
            try:
                # Before the board is told, because a rank that keeps the plan of another algorithm never comes here.
                for request in requests:
                    self._require_not_refused(request)
                self._board.post(text)  # before this rank waits for others, which may be in another call
                for request in requests:
                    self.provide(request)
                return text, [*algorithm.plan(call, self._node)]
            except NoMemoryError as error:
                if asked != "auto" or algorithm.name == "one_shot":
                    raise
                for request in requests:
                    least, _ = self._refused.get(request.what, (request.nbytes, ""))
                    self._refused[request.what] = min(least, request.nbytes), str(error)
                _warn_of_memory(call.operation.name, algorithm.name, str(error))
                table = table.without(algorithm.name)

    def provide(self, request: Request) -> None:
        """Set up memory for a request where there is none. Collective then, else local. Raises `NoMemoryError`."""
        if not self._arena.has(request):
            self._calls.require_same()
            self._arena.set_up(request)

    def _require_not_refused(self, request: Request) -> None:
        """Raise `NoMemoryError` where ranks have taken another algorithm for want of such memory. Local, on all alike.

        The ranks never try again, because a rank that has kept the plan of the other algorithm, for a call that it
        repeats, would not come to the set-up.
        """
        least, why = self._refused.get(request.what, (request.nbytes + 1, ""))
        if request.nbytes >= least and not self._arena.has(request):
            raise NoMemoryError(why)


@lru_cache
def _warn_of_memory(operation: str, algorithm: str, reason: str) -> None:
    logger.warning(
        "%s goes without algorithm %r, which is slower, for want of memory: %s", operation, algorithm, reason
    )
