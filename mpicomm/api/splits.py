"""Splits: which part of an array each rank of a communicator has.

A part is a *box*, a range of each axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError

Box = tuple[tuple[int, int], ...]
"""The start and the stop of each axis."""


@dataclass(frozen=True, init=False)
class Split:
    """How the parts of an array lie on the ranks of a communicator. Local.

    ``axes`` is an axis or several axes that are cut, or None: then each rank has the whole array. An axis of n elements
    that m ranks share has parts of n // m elements, and the first n % m parts have one more, as in
    ``numpy.array_split``. ``sizes`` are other lengths of the parts of an axis; for several axes there is one entry for
    each, which may be None. ``grid`` is the number of parts along each axis, by default as ``MPI.Compute_dims`` divides
    the ranks. The last axis changes fastest from rank to rank. ``ranks`` are the ranks with a part, in the order of the
    parts, by default all ranks.

    Raises `InvalidUsageError` for arguments that contradict each other. The calls that take the split compare it with
    the shape of the array.

        mpicomm.Split(1)  # the same as 1
        mpicomm.Split(0, sizes=[3, 5])
        mpicomm.Split((0, 2), grid=(4, 2))
        mpicomm.Split(0, ranks=[0, 1])  # the other ranks have nothing
    """

    axes: tuple[int, ...]
    sizes: tuple[tuple[int, ...] | None, ...]
    grid: tuple[int, ...] | None
    ranks: tuple[int, ...] | None

    def __init__(
        self,
        axes: int | Sequence[int] | None,
        *,
        sizes: Sequence[Any] | None = None,
        grid: Sequence[int] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        cut = () if axes is None else integers("axes", axes)
        parts = None if grid is None else integers("grid", grid)
        lengths: list[Any] = [None] * len(cut)
        if sizes is not None:
            lengths = [sizes] if len(cut) == 1 or not np.iterable(sizes) else list(sizes)
        for name, given in (("sizes", lengths), ("grid", parts)):
            if given is not None and len(given) != len(cut):
                raise InvalidUsageError(f"{name}={given!r} has {len(given)} entries for the axes {cut}: pass one each")
        object.__setattr__(self, "axes", cut)
        object.__setattr__(self, "sizes", tuple(None if each is None else integers("sizes", each) for each in lengths))
        object.__setattr__(self, "grid", parts)
        object.__setattr__(self, "ranks", None if ranks is None else integers("ranks", ranks))

    def boxes(self, name: str, shape: tuple[int, ...], size: int) -> list[Box | None]:
        """Return the box of each rank; None for ranks without a part. ``name`` is the argument with this split."""
        shown, ndim = f"{name}={self!r}", len(shape)
        axes = [axis + ndim if axis < 0 else axis for axis in self.axes]
        if not all(0 <= axis < ndim for axis in axes) or len(set(axes)) < len(axes):
            raise InvalidUsageError(
                f"{shown}: the array of shape {shape} has no such axes: pass axes from {-ndim} to {ndim - 1}, each once"
            )
        ranks = range(size) if self.ranks is None else self.ranks
        if not ranks or not all(0 <= rank < size for rank in ranks) or len(set(ranks)) < len(ranks):
            raise InvalidUsageError(f"{shown}: pass one or more of the ranks 0 to {size - 1}, each once")
        bounds, grid = [], self._grid(shown, len(ranks))
        for axis, parts, sizes in zip(axes, grid, self.sizes, strict=True):
            quotient, remainder = divmod(shape[axis], max(parts, 1))
            lengths = [quotient + (part < remainder) for part in range(parts)] if sizes is None else sizes
            if min(lengths, default=0) < 0 or len(lengths) != parts or sum(lengths) != shape[axis]:
                raise InvalidUsageError(
                    f"{shown}: axis {axis} of shape {shape} needs {parts} sizes with the sum {shape[axis]}"
                )
            stops = list(accumulate(lengths))
            bounds.append([(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)])
        boxes: list[Box | None] = [None] * size
        for index, rank in enumerate(ranks):
            box = [(0, length) for length in shape]
            coordinates = np.unravel_index(index, grid) if grid else ()
            for axis, coordinate, parts_of_axis in zip(axes, coordinates, bounds, strict=True):
                box[axis] = parts_of_axis[coordinate]
            boxes[rank] = tuple(box)
        return boxes

    def _grid(self, shown: str, count: int) -> tuple[int, ...]:
        if not self.axes:
            return ()
        grid = self.grid
        if grid is None and len(self.axes) == 1:
            grid = (count,)
        elif grid is None:
            grid = tuple(MPI.Compute_dims(count, len(self.axes)))
        if math.prod(grid) != count or min(grid) < 0:
            raise InvalidUsageError(f"{shown}: a grid of {grid} has no place for {count} ranks: pass another grid=")
        return grid

    def __repr__(self) -> str:
        axes: Any = None if not self.axes else self.axes[0] if len(self.axes) == 1 else self.axes
        sizes = self.sizes[0] if len(self.sizes) == 1 else self.sizes if any(self.sizes) else None
        options = {"sizes": sizes, "grid": self.grid, "ranks": self.ranks}
        return f"Split({', '.join([repr(axes), *(f'{k}={v}' for k, v in options.items() if v is not None)])})"


AnySplit = int | None | Split | Sequence[Any]
"""What calls take as a split: an axis, None, a Split, or a box for each rank."""


def normalize(name: str, split: Any) -> Any:
    """Return a split as a Split, or as a tuple of boxes."""
    if isinstance(split, Split):
        return split
    if split is None or hasattr(split, "__index__"):
        return Split(split)
    try:
        return tuple(None if box is None else tuple(map(_range, box)) for box in split)
    except (TypeError, ValueError):
        raise InvalidUsageError(
            f"{name}={split!r} is no split: pass an axis, None, mpicomm.Split, or for each rank a box: a slice without "
            "a step, or a pair (start, stop), of each axis"
        ) from None


def _range(part: Any) -> tuple[int, int | None]:
    """Return the start and the stop of a part of an axis; None as the stop means the end of the axis."""
    if isinstance(part, slice) and part.step in (None, 1):
        part = 0 if part.start is None else part.start, part.stop
    start, stop = part  # raises TypeError for a slice with a step
    return operator.index(start), None if stop is None else operator.index(stop)


def boxes_of(name: str, split: Any, shape: tuple[int, ...], size: int) -> list[Box | None]:
    """Return the box of each rank in a split of `normalize`. Raises `InvalidUsageError` if the shape does not fit."""
    if isinstance(split, Split):
        return split.boxes(name, shape, size)
    if len(split) != size:
        raise InvalidUsageError(f"{name}={split!r} has {len(split)} boxes: pass one for each of {size} ranks")
    boxes: list[Box | None] = []
    for ranges in split:
        if ranges is None:
            boxes.append(None)
            continue
        lengths = zip(ranges, shape, strict=False)
        box = tuple((start, length if stop is None else stop) for (start, stop), length in lengths)
        fits = [0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=False)]
        if len(ranges) != len(shape) or not all(fits):
            raise InvalidUsageError(
                f"{name}: the box {ranges} is no part of shape {shape}: pass (start, stop) of each axis"
            )
        boxes.append(box)
    return boxes


def global_shape_of(split: Any, parts: list[Any]) -> tuple[Any, tuple[int, ...]]:
    """Return the split and the shape of the whole array, from the shapes of the parts. Raise if it cannot be known."""
    ranks = split.ranks if isinstance(split, Split) and split.ranks is not None else range(len(parts))
    if not isinstance(split, Split) or len(split.axes) > 1 or not all(0 <= rank < len(parts) for rank in ranks):
        raise InvalidUsageError(
            f"shape=None: it does not follow from from_={split!r}: pass the shape of the whole array"
        )
    held = [parts[rank] for rank in ranks]
    known = [part for part in held if part is not None]
    axis = split.axes[0] if split.axes else None
    others = {part if axis is None else part[:axis] + part[axis:][1:] for part in known}
    if len(others) != 1 or (axis is not None and not all(-len(part) <= axis < len(part) for part in known)):
        raise InvalidUsageError(
            f"from_={split!r}: the parts x of shapes {parts} are no parts of one array: pass shape= and other parts"
        )
    if axis is None:
        return split, known[0]
    lengths = [0 if part is None else part[axis] for part in held]
    if split.sizes[0] is None:
        split = Split(axis, sizes=lengths, grid=split.grid, ranks=split.ranks)
    whole = list(known[0])
    whole[axis] = sum(lengths)
    return split, tuple(whole)


def transfers(
    shape: tuple[int, ...], from_: list[Box | None], to: list[Box | None], this_rank: int
) -> tuple[list[list[Box]], list[list[Box]]]:
    """Return what ``this_rank`` receives from each rank, and what it sends to each, as boxes of the whole array.

    Raises `InvalidUsageError` if a rank needs an element that no rank has.
    """
    size = len(from_)
    received: list[list[Box]] = []
    sent: list[list[Box]] = []
    holders = [rank for rank, box in enumerate(from_) if box is not None and volume(box)]
    readers = [rank for rank in range(size) if rank not in holders]
    for rank, target in enumerate(to):
        from_holders: list[list[Box]] = [[] for _ in range(size)]
        missing = [target] if target is not None and volume(target) else []
        # First the copy of the rank itself. Ranks without one start at different holders, to spread the load.
        first = readers.index(rank) % max(len(holders), 1) if rank in readers else holders.index(rank)
        for holder in holders[first:] + holders[:first]:
            if not missing:
                break
            box, uncovered = from_[holder], []
            assert box is not None
            for part in missing:
                common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True))
                if volume(common):
                    from_holders[holder].append(common)
                    uncovered += _without(part, common)
                else:
                    uncovered.append(part)
            missing = uncovered
        if missing:
            raise InvalidUsageError(
                f"from_: no rank has the elements {missing[0]} of shape {shape}, which rank {rank} needs: pass boxes "
                "that cover them"
            )
        sent.append(from_holders[this_rank])
        if rank == this_rank:
            received = from_holders
    return received, sent


def volume(box: Box) -> int:
    """Return the number of elements in a box; 0 if a start is behind its stop."""
    return math.prod(max(0, stop - start) for start, stop in box)


def _without(box: Box, hole: Box) -> list[Box]:
    """Return boxes that together are ``box`` without ``hole``, which lies in it."""
    parts, rest = [], list(box)
    for axis, (start, stop) in enumerate(hole):
        sides = ((rest[axis][0], start), (stop, rest[axis][1]))
        parts += [(*rest[:axis], side, *rest[axis + 1 :]) for side in sides if side[0] < side[1]]
        rest[axis] = (start, stop)
    return parts


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Return an integer, or an iterable of integers, as a tuple. Raises `InvalidUsageError` that names the argument."""
    try:
        return tuple(map(operator.index, values if np.iterable(values) else [values]))
    except TypeError:
        raise InvalidUsageError(f"{name}={values!r}: pass integers") from None
