"""Fillings: the algorithms of a form by the length of a call, each of which fills its calls in by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import floor, inf
from typing import Any, cast

from mpicomm.collectives.gpu.algorithms.base import Algorithm, Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS, names_for
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.devices.cuda.load import Launcher
from mpicomm.kernels.variant import Variant

Load = Callable[[Variant, Any, bool], Launcher]
"""Returns the launcher of a kernel with these arguments, early or not."""
_NO_END = 1 << 62  # more bytes than any call has


class Filling:
    """An algorithm for calls of a form. ``algorithm`` is None for calls that no algorithm of that name takes."""

    def __init__(self, algorithm: Algorithm | None, form: Form, node: Node, load: Load) -> None:
        self.name = algorithm.name if algorithm else ""
        self.into_memory = algorithm is not None and algorithm.into_memory
        self.template = cast(Any, algorithm.template(form, node) if algorithm else None)
        """An `EvenTemplate` or a `BlocksTemplate`, by the form; None if the engine plans each call."""
        self.fill: Callable[..., Filled | None] = _not_filled
        """The function of the template that fills in a call."""
        if self.template is not None:
            self.fill = self.template.fill if form.is_even else self.template.fill_blocks
        self.launcher_of: Callable[[Any], Launcher] = _Launchers(self.template, load).__getitem__
        """Returns the launcher of a kernel of the template."""


def _not_filled(*call: Any) -> None:
    return None


class _Launchers(dict[Any, Launcher]):
    """The launchers of a template's kernels, which are loaded at first need."""

    def __init__(self, template: Any, load: Load) -> None:
        self._template = template
        self._load = load

    def __missing__(self, kernel: Any) -> Launcher:
        template = self._template
        self[kernel] = launcher = self._load(template.variant(kernel), template.arguments, template.early)
        return launcher


def fillings(
    form: Form, asked: str, tuning: Tuning, node: Node, of: Callable[[Algorithm | None], Filling], *, symmetric: bool
) -> tuple[list[int], list[Filling]]:
    """Return the algorithms that `choose` takes for calls of a form, by the bytes of the longest message.

    They are numbers of bytes in ascending order, and for each of them the algorithm from there on. The first number is
    0. ``of`` returns the filling of an algorithm. ``symmetric`` is whether the output of all ranks is symmetric memory.
    """
    taking = [
        (algorithm, *lengths)
        for algorithm in ALGORITHMS
        if algorithm.serves(form.operation)
        and (lengths := algorithm.lengths(form, node, symmetric=symmetric)) is not None
    ]
    by_table = [(0, asked)]
    if asked == "auto":
        for name in {*names_for(form.operation)} - {algorithm.name for algorithm, *_ in taking}:
            tuning = tuning.without(name)  # as `choose` does
        by_table = tuning.choices(form.operation.name, node.size, registered=symmetric)
    begins: list[int] = []
    found: list[Filling] = []
    for (begin, name), (end, _) in pairwise([*by_table, (_NO_END, "")]):
        named = [each for each in taking if each[0].name == name]
        bounds = {bound for _, fewest, most in named for bound in (fewest, most if most == inf else floor(most) + 1)}
        first, last = (-(-nbytes // form.blocks_counted) for nbytes in (begin, end))
        for bound in sorted({first, *(int(bound) for bound in bounds if first < bound < last)}):
            begins.append(bound)
            found.append(of(next((each for each, fewest, most in named if fewest <= bound <= most), None)))
    return begins, found
