"""Which algorithm carries out a collective call on GPUs: one choice per call, the same on all ranks.

`choose` is a pure function of the call, the table and the node. `Preparation` calls it, sets up the memory that the
algorithm needs, and returns this rank's steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.any_length import inboxes_for, larger_inboxes
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS, ANY_LENGTH
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.arena import DeviceArena, NoMemoryError
from mpicomm.collectives.gpu.launches_around import finish_launches
from mpicomm.collectives.gpu.mismatch import LoggedCalls
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.errors import InvalidUsageError, equal_error
from mpicomm.log import logger


def choose(call: GpuCall, asked: str, tuning: Tuning, node: Node) -> tuple[Algorithm, str]:
    """Return the algorithm for a call, and the reason for the choice as text. Local.

    It is the algorithm ``asked``, or with "auto" the fastest by the table. Raises `InvalidUsageError` with the
    algorithm's reason if the caller named an algorithm that cannot carry out the call.
    """
    name, why = asked, f'algorithm="{asked}"'
    if asked == "auto":
        registered, why = call.memory is not None, "by the table"
        coded = call.wire[1].itemsize if call.wire is not None else 0
        name = tuning.algorithm(call.operation.name, call.nbytes, node.size, registered=registered, coded=coded)
    algorithm, refusal = _first(name, call, node)
    if algorithm is None and asked == "auto":
        algorithm, _ = choose(call, asked, tuning.without(name), node)
        why = f"by the table, without {name}: {refusal}"
    elif algorithm is not None and asked == "auto" and call.epilogue is not None and not algorithm.finishes(call, node):
        # One more kernel takes longer than any of the other algorithms, if one of them applies the epilogue.
        other = None if name == "one_shot" else choose(call, asked, tuning.without(name), node)[0]
        if other is not None and other.finishes(call, node):
            algorithm, why = other, f"by the table, without {name}: one more kernel would apply the epilogue"
    if algorithm is None:
        raise InvalidUsageError(f'algorithm="{asked}" of {call.operation}: {refusal}: use "auto"')
    if node.size == 1 or call.nbytes == 0:
        algorithm, refusal = _first("one_shot", call, node)
        assert algorithm is not None, refusal
        why = "there is nothing to choose" if asked == "auto" else why
    return algorithm, why


def _first(name: str, call: GpuCall, node: Node) -> tuple[Algorithm | None, str]:
    """Return the first algorithm of that name that accepts the call; else None and the last algorithm's reason."""
    reason = "the collective has no algorithm of that name"
    for algorithm in ALGORITHMS:
        if algorithm.name == name and algorithm.serves(call.operation):
            refusal = algorithm.accepts(call, node)
            if call.wire is not None and not algorithm.codes:
                refusal = "it sends no codes of 8 bits"
            if call.counted is not None and not algorithm.counted:
                refusal = "the counts are on the GPU"
            if refusal is None:
                return algorithm, ""
            reason = refusal
    return None, reason


class AlgorithmChoice(NamedTuple):
    """The algorithm of a call, as text for records of calls."""

    algorithm: str = ""
    why: str = ""
    slow: str = ""
    """Why the call takes a slow way; "" if it does not."""


NO_CHOICE = AlgorithmChoice()
"""The choice of plans that are parts of calls."""


class Prepared(NamedTuple):
    """This rank's part of a call."""

    text: str
    """The text of the call, for errors."""
    steps: list[Step]
    choice: AlgorithmChoice


class Preparation:
    """Chooses an algorithm for each call and sets up its memory. Local, except that all ranks meet in a set-up."""

    def __init__(self, tuning: Tuning, node: Node, arena: DeviceArena, call_log: CallLog, calls: LoggedCalls) -> None:
        self._tuning = tuning
        self._node = node
        self._arena = arena
        self._call_log = call_log
        self._calls = calls
        self._refused: dict[str, tuple[int, NoMemoryError]] = {}  # by purpose: the smallest request that failed

    def steps(self, call: GpuCall, asked: str) -> Prepared:
        """Return this rank's steps of a call; see `DeviceEngine.prepare`."""
        _ = call.reduction  # an undefined reduction raises here, before the call log gets the call
        table = self._tuning
        algorithm, why = choose(call, asked, table, self._node)
        slow = ""
        while True:
            requests = algorithm.memory(call, self._node)
            text = call.text(into_memory=algorithm.into_memory)
            try:
                # This check comes before the post, because a rank that has kept another algorithm's plan never comes
                # here.
                for request in requests:
                    self._require_possible(request)
                self._call_log.post(text)  # before this rank waits for ranks that may be in another call
                for request in requests:
                    self.provide(request)
                steps = [*algorithm.plan(call, self._node), *self._finish(call, algorithm)]
                return Prepared(text, steps, AlgorithmChoice(algorithm.name, why, slow))
            except NoMemoryError as error:
                in_inboxes = algorithm.name == "one_shot" and self._node.size > 1
                if not in_inboxes and (asked != "auto" or algorithm.name == "one_shot"):
                    raise
                for request in requests:
                    self._remember_refusal(request, error)
                slow = f"memory is short for {algorithm.name!r}: {error}"
                if in_inboxes:
                    _warn_of_memory(call.operation.name, "only in the inboxes of the arena", str(error))
                    algorithm = ANY_LENGTH
                else:
                    _warn_of_memory(call.operation.name, f"without algorithm {algorithm.name!r}", str(error))
                    table = table.without(algorithm.name)
                    algorithm, _ = choose(call, asked, table, self._node)

    def _finish(self, call: GpuCall, algorithm: Algorithm) -> list[Launch]:
        if call.epilogue is None or algorithm.finishes(call, self._node):
            return []
        assert call.buffers.output is not None
        node = self._node
        return finish_launches(call.epilogue, call.buffers.output, node.team.faults, node.multiprocessors)

    def provide(self, request: Request) -> None:
        """Set up memory for a request, unless there is some. A set-up is collective. Raises `NoMemoryError`."""
        if not self._arena.has(request):
            self._arena.require_room(request)
            self._calls.require_same()
            self._arena.set_up(request)

    def provide_for(self, text: str, request: Request) -> None:
        """Post a call, and set up its memory as `provide`. The ranks never try a failed request again."""
        self._require_possible(request)  # before the post, as in `steps`
        self._call_log.post(text)
        try:
            self.provide(request)
        except NoMemoryError as error:
            self._remember_refusal(request, error)
            raise

    def enlarge_inboxes(self, call: object, longest_nbytes: int) -> bool:
        """Set up larger inboxes for messages of any length if messages of ``longest_nbytes`` are then faster.

        Return whether the inboxes have changed. A change is collective. A warning names the ``call``.
        """
        for request in larger_inboxes(self._node, longest_nbytes):
            try:
                self._require_possible(request)
                self.provide(request)
            except NoMemoryError as error:
                self._remember_refusal(request, error)
                _warn_of_memory(str(call), "in smaller inboxes", str(error))
            else:
                self._arena.any_length = inboxes_for(self._node, request)
                return True
        return False

    def _require_possible(self, request: Request) -> None:
        """Raise `NoMemoryError` if such memory exceeds the bound or failed before. Local, alike on all ranks.

        The ranks never try a failed request again. A rank that repeats a call may have kept another algorithm's plan,
        and would not come to the set-up.
        """
        if self._arena.has(request):
            return
        least, error = self._refused.get(request.what, (request.nbytes + 1, None))
        if error is not None and request.nbytes >= least:
            raise equal_error(error)
        self._arena.require_room(request)

    def _remember_refusal(self, request: Request, error: NoMemoryError) -> None:
        least, _ = self._refused.get(request.what, (request.nbytes, error))
        self._refused[request.what] = min(least, request.nbytes), equal_error(error)


@lru_cache
def _warn_of_memory(operation: str, way: str, reason: str) -> None:
    logger.warning("%s runs slower, %s, because memory is short: %s", operation, way, reason)
