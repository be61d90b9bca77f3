"""The algorithms of collectives on GPUs, and the decision which of them carries out a call of a form.

A new algorithm is an entry here. A decision depends on the longest message, and obeys the rule of algorithms/base.py.
The call log compares the calls of the ranks before they set up memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from math import ceil, floor, inf
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicomm.collectives.gpu.algorithms.base import (
    Algorithm,
    AlgorithmChoice,
    Copy,
    Filled,
    Form,
    FormLauncher,
    KernelTemplate,
    Step,
)
from mpicomm.collectives.gpu.algorithms.chain.plan import serve_chain
from mpicomm.collectives.gpu.algorithms.chunks.plan import serve_chunks, serve_ring
from mpicomm.collectives.gpu.algorithms.copies.plan import CopyLauncher, local_reduction_kernel
from mpicomm.collectives.gpu.algorithms.direct.plan import BARRIER_KERNEL, serve_direct
from mpicomm.collectives.gpu.algorithms.memory import Domain
from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, Steps, ll_can_carry, packet_kernel
from mpicomm.collectives.gpu.algorithms.packets.plan import in_arena, serve_any_length, serve_one_shot, serve_two_shot
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.variant import Variant
from mpicomm.sharing.segments import Mapped

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.plan import StepLoader
    from mpicomm.collectives.gpu.tuning import Tuning
    from mpicomm.devices.cuda.stream_order import Enqueue

ALGORITHMS = (
    Algorithm("one_shot", lambda operation: operation.into_all and not operation.reduces, serve_direct),
    Algorithm("one_shot", lambda operation: True, serve_any_length, quantizes=True),
    Algorithm("one_shot", lambda operation: True, serve_one_shot, quantizes=True),
    Algorithm("one_shot", lambda operation: True, serve_chunks, quantizes=True),
    Algorithm("two_shot", lambda operation: operation.two_shot is not None, serve_two_shot, quantizes=True),
    Algorithm("chain", lambda operation: operation.chain is not None, serve_chain),
    Algorithm("copy_engine", lambda operation: bool(operation.copies), lambda *given: [CopyLauncher(*given)]),
    Algorithm("ring", lambda operation: operation.ring is not None, serve_ring, in_rank_order=False),
)
"""If algorithms share a name, the first that serves a call carries it out."""

NAMES = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))
"""The values of ``algorithm=`` that name an algorithm."""


@lru_cache  # every new call asks
def names_for(operation: Operation, *, in_rank_order: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms for a collective; with ``in_rank_order`` only algorithms of "auto"."""
    serving = [each for each in ALGORITHMS if each.serves(operation) and (each.in_rank_order or not in_rank_order)]
    return tuple(dict.fromkeys(algorithm.name for algorithm in serving))


@lru_cache
def usual_kernels(reduction: Reduction | None, size: int, *, host_slots: bool) -> tuple[Variant, ...]:
    """Return the kernels that most programs use between ``size`` ranks, with a reduction if given, the likeliest first.

    ``host_slots`` is as in `packet_kernel`. Raises as `options_for`.
    """

    def packets(reduction: Reduction | None, protocol: Protocol, steps: Steps, *, fan_out: bool = False) -> Variant:
        return packet_kernel(reduction, size, protocol, steps, fan_out=fan_out, host_slots=host_slots)

    if size == 1:
        return ()
    moves = packets(None, "sentinel", "one"), packets(None, "ll", "one"), packets(None, "sentinel", "few")
    if reduction is None:
        return *moves, BARRIER_KERNEL
    shards = size > 2  # then long reductions are in two shots
    return (
        packets(reduction, "sentinel", "few", fan_out=shards),
        moves[0],
        BARRIER_KERNEL,
        local_reduction_kernel(reduction),
        packets(reduction, "sentinel", "one"),
        *[packets(reduction, "ll", "one")] * ll_can_carry(reduction[0]),
        packets(reduction, "sentinel", "laps", fan_out=shards),
        *[packets(reduction, "sentinel", "one", fan_out=True)] * shards,
        *moves[1:],
    )


NO_END = 1 << 62  # more bytes than any call has


def enqueuers_of(template: KernelTemplate, loader: StepLoader) -> Callable[[Filled], Enqueue]:
    """Return a function that returns the function which enqueues a written call. Kernels are loaded at first need."""

    @cache
    def enqueue_of(filled: Filled) -> Enqueue:
        (enqueue,) = loader.enqueuers([template.launch_of(filled)])
        return enqueue

    return enqueue_of


def in_sequence(steps: Sequence[Enqueue]) -> Enqueue:
    """Return a function that enqueues steps one after the other."""

    def enqueue(stream: int) -> None:
        for step in steps:
            step(stream)

    return enqueue


class Chosen(NamedTuple):
    """A launcher of a form, the name of its algorithm, and the reason for the choice."""

    launcher: FormLauncher
    choice: AlgorithmChoice
    enqueue_of: Callable[[Filled], Enqueue]
    """Returns the function that enqueues a filled-in call."""


ByLength = tuple[list[int], list[Chosen]]
"""Numbers of bytes in ascending order, from 0 on, and for each of them the choice from there on."""


class Decision:
    """The launchers for the calls of a form in a domain. ``requested`` is ``algorithm=``.

    Raises `InvalidUsageError` with the algorithm's reason if ``requested`` cannot carry out calls of this form, and for
    a reduction that is not defined.
    """

    def __init__(self, form: Form, requested: str, tuning: Tuning, domain: Domain, loader: StepLoader) -> None:
        self.form = form
        self.requested = requested
        self.domain = domain
        self._loader = loader
        self._tuning = tuning
        _ = form.reduction  # it raises here
        self._offers: list[tuple[str, FormLauncher]] = []
        refusals: dict[str, str] = {}
        for algorithm in ALGORITHMS:
            # "one_shot" carries out the calls with nothing to choose.
            may_be_taken = algorithm.in_rank_order if requested == "auto" else algorithm.name in (requested, "one_shot")
            if may_be_taken and algorithm.serves(form.operation):
                offered: Sequence[FormLauncher] | str = "it does not support wire_dtype"
                if form.wire is None or algorithm.quantizes:
                    offered = algorithm.serve(form, domain)
                if isinstance(offered, str):
                    refusals[algorithm.name] = offered
                else:
                    self._offers += [(algorithm.name, launcher) for launcher in offered]
        offering = {name for name, _ in self._offers}
        self._refusals = {name: reason for name, reason in refusals.items() if name not in offering}
        if requested in self._refusals:
            raise InvalidUsageError(
                f'algorithm="{requested}" of {form.operation}: {self._refusals[requested]}: use "auto"'
            )
        self.by_length = cache(self._by_length)
        self._chosen = cache(self._chosen_of)

    def at(self, longest: int, *, symmetric: bool, without: frozenset[str] = frozenset()) -> Chosen:
        """Return the choice for a call whose longest message has so many bytes.

        ``symmetric`` is whether the output of all ranks is symmetric memory. ``without`` names algorithms whose memory
        the ranks could not set up.
        """
        return choice_at(longest, self.by_length(symmetric=symmetric, without=without))

    def in_arena(self) -> Chosen:
        """Return the choice for calls that get no memory beyond the arena."""
        return self._chosen(in_arena(self.form, self.domain), "one_shot", "")

    def _chosen_of(self, launcher: FormLauncher, name: str, why: str) -> Chosen:
        if isinstance(launcher, KernelTemplate):
            return Chosen(launcher, AlgorithmChoice(name, why), enqueuers_of(launcher, self._loader))
        loader = self._loader
        return Chosen(launcher, AlgorithmChoice(name, why), lambda filled: in_sequence(loader.enqueuers(filled[0])))

    def steps(
        self,
        chosen: Chosen,
        buffers: Buffers,
        hash32: int,
        memory: Mapped | None = None,
        epilogue: BoundEpilogue | None = None,
    ) -> list[Step] | None:
        """Return the steps of a call with these buffers; None if the arena lacks the launcher's memory.

        The other arguments are as in `Numbers`.
        """
        lengths, begins = self.form.numbers(buffers)
        filled = chosen.launcher.fill((lengths, begins, max(lengths, default=0), hash32, memory, epilogue))
        if filled is None:
            return None
        output = buffers.receives[0].pointer if buffers.scratch else 0
        return chosen.launcher.steps_of(filled) + self._after(chosen, lengths, begins, output, epilogue)

    def followed(self, enqueue: Enqueue, *call: Any) -> Enqueue:
        """Return a function that enqueues a call, and then its steps of `_after`."""
        steps = self._after(*call)
        return in_sequence([enqueue, *self._loader.enqueuers(steps)]) if steps else enqueue

    def _after(
        self, chosen: Chosen, lengths: list[int], begins: list[int], output: int, epilogue: BoundEpilogue | None
    ) -> list[Step]:
        """Return the steps after the launcher's, for a result that lies in the last block.

        They move it to ``output`` if that is not 0, and apply the epilogue if the launcher does not.
        """
        steps: list[Step] = []
        if output and lengths[-1]:
            steps.append(Copy(output, begins[-1], lengths[-1], local=True))
        if epilogue is not None and not chosen.launcher.finishes and lengths[-1]:
            failed = self.domain.team.faults.failed
            steps.append(epilogue.separate_launch(begins[-1], failed, self.domain.multiprocessors))
        return steps

    def _by_length(self, *, symmetric: bool, without: frozenset[str] = frozenset()) -> ByLength:
        """Return all choices of `at`; ``symmetric`` and ``without`` are as there."""
        form, is_single, is_named = self.form, self.domain.size == 1, self.requested != "auto"
        listed = taken = [(0, self.requested)]
        if not is_named:
            listed, taken = self._table((), symmetric), self._table((*without, *self._refusals), symmetric)
        offers = [each for each in self._offers if symmetric or not each[1].needs_symmetric_output]
        bounds = {1, *(begin for begin, _ in (*listed, *taken))}
        for _, launcher in offers:
            bounds |= {ceil(launcher.fewest)} | ({floor(launcher.most) + 1} if launcher.most < inf else set())
        begins, found = sorted(bounds), list[Chosen]()
        for begin in begins:
            first, names = [each for at, each in listed if at <= begin][-1], [each for at, each in taken if at <= begin]
            name = names.pop()
            why = "by the table" + (f", without {first}: {self._refusals[first]}" if first in self._refusals else "")
            if is_single or form.is_private or begin == 0:
                name, why = "one_shot", "there is nothing to choose"
            if is_named:
                why = f'algorithm="{self.requested}"'
            launchers = {its: each for its, each in reversed(offers) if each.fewest <= begin <= each.most}
            if form.epilogue is not None and name not in (self.requested, "one_shot") and not launchers[name].finishes:
                # One more kernel takes longer than any of the other algorithms.
                finishing = [each for each in reversed(names) if each in launchers and launchers[each].finishes]
                if finishing:
                    why = f"by the table, without {name}: one more kernel would apply the epilogue"
                    name = finishing[0]
            found.append(self._chosen(launchers[name], name, why))
        return begins, found

    def _table(self, without: Collection[str], symmetric: bool) -> list[tuple[int, str]]:
        """Return the table's choices without some algorithms, by the bytes of the longest message."""
        form = self.form
        itemsize = form.wire[1].itemsize if form.wire is not None else 0
        operation, size = form.operation.name, form.size
        choices = self._tuning.choices(
            operation, size, registered=symmetric, quantized_itemsize=itemsize, without=without
        )
        # A table chooses by the bytes of all blocks.
        blocks = size if "blocks" in (form.operation.send, form.operation.receive) else 1
        return [(-(-nbytes // blocks), name) for nbytes, name in choices]


def choice_at(longest: int, by_length: ByLength) -> Chosen:
    """Return the choice for messages of at most so many bytes."""
    begins, found = by_length
    return found[bisect_right(begins, longest) - 1]
