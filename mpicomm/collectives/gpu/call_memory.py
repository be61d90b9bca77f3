"""CallMemory: the memory that ranks set up together when a call needs more than their arenas."""

from __future__ import annotations

from functools import lru_cache

from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.gpu.algorithms.base import Domain, with_place
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.plan import inboxes_for, larger_inboxes
from mpicomm.collectives.gpu.arena import DeviceArena, NoMemoryError
from mpicomm.collectives.gpu.decision import AlgorithmChoice, Chosen, Decision
from mpicomm.collectives.gpu.mismatch import LoggedCalls
from mpicomm.errors import equal_error
from mpicomm.log import logger
from mpicomm.symmetric.registry import Mapped


class CallMemory:
    """Sets up the memory of calls beyond the arena. Local, except that all ranks meet in a set-up."""

    def __init__(self, domain: Domain, arena: DeviceArena, call_log: CallLog, calls: LoggedCalls) -> None:
        self._domain = domain
        self._arena = arena
        self._call_log = call_log
        self._calls = calls
        self._refused: dict[str, tuple[int, NoMemoryError]] = {}  # by purpose: the smallest request that failed

    def provide_for_call(
        self, decision: Decision, longest: int, words: str, memory: Mapped | None
    ) -> tuple[Chosen, AlgorithmChoice, str]:
        """Choose the launcher of a call, post the call, and set up the launcher's memory.

        ``words`` is the text of the call, and ``memory`` the place of all ranks' output if that is symmetric memory.
        Return the choice, its record, and the text with the place in memory. If the ranks cannot set up memory for an
        algorithm of "auto", they take another one and log a warning. Raises `NoMemoryError` on all ranks.
        """
        operation, size = decision.form.operation.name, decision.form.size
        symmetric, slow = memory is not None, ""
        without: frozenset[str] = frozenset()
        chosen = first = decision.at(longest, symmetric=symmetric)
        while True:
            requests = chosen.launcher.memory(longest, symmetric=symmetric)
            text = with_place(words, memory) if chosen.into_memory and memory is not None else words
            try:
                # This check comes before the post, because a rank that has kept another algorithm's plan never comes
                # here.
                for request in requests:
                    self._require_possible(request)
                self._call_log.post(text)  # before this rank waits for ranks that may be in another call
                for request in requests:
                    self.provide(request)
                return chosen, AlgorithmChoice(chosen.choice.algorithm, first.choice.why, slow), text
            except NoMemoryError as error:
                name = chosen.choice.algorithm
                in_inboxes = name == "one_shot" and size > 1
                if not in_inboxes and (decision.asked != "auto" or name == "one_shot"):
                    raise
                for request in requests:
                    self._remember_refusal(request, error)
                slow = f"memory is short for {name!r}: {error}"
                if in_inboxes:
                    _warn_of_memory(operation, "only in the inboxes of the arena", str(error))
                    chosen = decision.in_arena()
                else:
                    _warn_of_memory(operation, f"without algorithm {name!r}", str(error))
                    without |= {name}
                    chosen = decision.at(longest, symmetric=symmetric, without=without)

    def provide(self, request: Request) -> None:
        """Set up memory for a request, unless there is some. A set-up is collective. Raises `NoMemoryError`."""
        if not self._arena.has(request):
            self._arena.require_room(request)
            self._calls.require_same()
            self._arena.set_up(request)

    def provide_for(self, text: str, request: Request) -> None:
        """Post a call, and set up its memory as `provide`. The ranks never try a failed request again."""
        self._require_possible(request)  # before the post, as in `provide_for_call`
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
        for request in larger_inboxes(self._domain, longest_nbytes):
            try:
                self._require_possible(request)
                self.provide(request)
            except NoMemoryError as error:
                self._remember_refusal(request, error)
                _warn_of_memory(str(call), "in smaller inboxes", str(error))
            else:
                self._arena.any_length = inboxes_for(self._domain, request)
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
