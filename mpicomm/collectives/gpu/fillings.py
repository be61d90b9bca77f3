"""Fillings: the algorithms of a form by the length of a call. Each algorithm fills in its calls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from itertools import pairwise
from math import floor, inf
from typing import TYPE_CHECKING, Any

from mpicomm.collectives.gpu.algorithms.base import Algorithm, Filled, GpuCall, Node, Template
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS, names_for
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.symmetric.registry import Mapped

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.step_loader import StepLoader
    from mpicomm.devices.cuda.stream_order import Enqueue

NO_END = 1 << 62  # more bytes than any call has


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


LaunchOf = Callable[[Filled], "Enqueue"]


class Filling:
    """An algorithm for calls of a form. ``algorithm`` is None for calls that no algorithm of that name takes."""

    def __init__(self, algorithm: Algorithm | None, form: Form, node: Node, loader: StepLoader) -> None:
        self.name = algorithm.name if algorithm else ""
        self.into_memory = algorithm is not None and algorithm.into_memory
        self.finishes = form.epilogue is not None
        """Whether the algorithm applies the epilogue of the calls."""
        self._made_of = algorithm, form, node, loader
        self.template: Any = None
        """An `EvenTemplate` or a `BlocksTemplate`, by the form; None before the first call, or if calls have several
        steps."""
        self.fill: Callable[..., Filled | None] = self._fill_first
        """The function of the template that fills in a call, or `StepCalls.fill`."""
        self.launch_of: LaunchOf
        """Returns the function that enqueues a call which was filled in."""

    def _fill_first(self, *call: Any) -> Filled | None:
        """Make the template and fill in the first call. Most forms use only one or two of their algorithms."""
        algorithm, form, node, loader = self._made_of
        self.template = algorithm and algorithm.template(form, node)
        if self.template is not None:
            self.fill = self.template.fill if form.is_even else self.template.fill_blocks
            self.launch_of = launches_of(self.template, loader)
        elif algorithm is not None and form.is_even:
            self.fill = StepCalls(algorithm, form, node).fill
            self.launch_of = lambda filled: in_turn(loader.enqueuers(filled[0]))
        else:
            self.fill = lambda *_: None
        return self.fill(*call)


class _Launches(dict[Filled, "Enqueue"]):
    """The launches of a template, whose kernels are loaded at first need."""

    def __init__(self, template: Template, loader: StepLoader) -> None:
        self._template = template
        self._loader = loader

    def __missing__(self, filled: Filled) -> Enqueue:
        template, (kernel, blocks, threads) = self._template, filled
        launch = Launch(template.variant(kernel), template.arguments, blocks, threads, template.early)
        (self[filled],) = self._loader.enqueuers([launch])
        return self[filled]


def launches_of(template: Template, loader: StepLoader) -> LaunchOf:
    """Return the launches of a template."""
    return _Launches(template, loader).__getitem__


def in_turn(steps: Sequence[Enqueue]) -> Enqueue:
    """Return a function that enqueues steps one after the other."""

    def enqueue(stream: int) -> None:
        for step in steps:
            step(stream)

    return enqueue


ByLength = tuple[list[int], list[Filling]]
"""Numbers of bytes in ascending order, from 0 on, and for each of them the algorithm from there on."""


class Fillings:
    """The algorithms for calls of a form on a node. ``asked`` is ``algorithm=``."""

    def __init__(self, form: Form, asked: str, tuning: Tuning, node: Node, loader: StepLoader) -> None:
        self.form = form
        self.asked = asked
        self.node = node
        self._loader = loader
        self._tuning = tuning
        self._plain = copy(form)  # for algorithms that do not apply the epilogue
        self._plain.epilogue = None
        self._filling = cache(partial(Filling, node=node, loader=loader))

    def followed(self, launch: Enqueue, steps: Sequence[Step]) -> Enqueue:
        """Return a function that enqueues a launch, and then steps."""
        return in_turn([launch, *self._loader.enqueuers(steps)])

    def by_length(self, *, symmetric: bool, tuning: Tuning | None = None) -> ByLength:
        """Return the algorithms that `choose` takes, by the bytes of the longest message of a call.

        ``symmetric`` is whether the output of all ranks is symmetric memory. ``tuning`` replaces the table.
        """
        form, node, tuning = self.form, self.node, tuning or self._tuning
        taking = [
            (algorithm, *lengths)
            for algorithm in ALGORITHMS
            if algorithm.serves(form.operation)
            and (algorithm.codes or form.wire is None)
            and (lengths := algorithm.lengths(form, node, symmetric=symmetric)) is not None
        ]
        by_table = [(0, self.asked)]
        if self.asked == "auto":
            for name in {*names_for(form.operation)} - {algorithm.name for algorithm, *_ in taking}:
                tuning = tuning.without(name)  # as `choose` does
            coded = form.wire[1].itemsize if form.wire is not None else 0
            by_table = tuning.choices(form.operation.name, node.size, registered=symmetric, coded=coded)
        begins: list[int] = []
        found: list[Filling] = []
        for (begin, name), (end, _) in pairwise([*by_table, (NO_END, "")]):
            named = [each for each in taking if each[0].name == name]
            bounds = {at for _, fewest, most in named for at in (fewest, most if most == inf else floor(most) + 1)}
            if form.epilogue is not None:
                bounds |= {algorithm.finishes_from(form.epilogue, node) for algorithm, *_ in named}
            first, last = (-(-nbytes // form.blocks_counted) for nbytes in (begin, end))
            for bound in sorted({first, *(int(bound) for bound in bounds if first < bound < last)}):
                algorithm = next((each for each, fewest, most in named if fewest <= bound <= most), None)
                begins.append(bound)
                found.append(self._filling(algorithm, self._form_for(algorithm, bound)))
        if form.epilogue is not None and self.asked == "auto":
            return self._finishing((begins, found), tuning, symmetric=symmetric)
        return begins, found

    def _form_for(self, algorithm: Algorithm | None, nbytes: int) -> Form:
        finish = self.form.epilogue
        finishes = algorithm and finish and nbytes >= algorithm.finishes_from(finish, self.node)
        return self.form if finishes else self._plain

    def _finishing(self, chosen: ByLength, tuning: Tuning, *, symmetric: bool) -> ByLength:
        """Return the algorithms by length, with others for those that do not apply the epilogue if the others do."""
        names = {filling.name for filling in chosen[1]} - {"", "one_shot"}
        others = {name: self.by_length(symmetric=symmetric, tuning=tuning.without(name)) for name in names}
        begins = sorted({*chosen[0], *(begin for other in others.values() for begin in other[0])})
        found = []
        for begin in begins:
            filling = filling_at(begin, chosen)
            other = filling_at(begin, others.get(filling.name, chosen))
            found.append(other if other.finishes and not filling.finishes else filling)
        return begins, found


def filling_at(nbytes: int, by_length: ByLength) -> Filling:
    """Return the algorithm for messages of so many bytes."""
    begins, found = by_length
    return found[bisect_right(begins, nbytes) - 1]
