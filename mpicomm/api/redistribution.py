"""Redistribution: an array that is split over ranks in one way becomes an array that is split in another way.

A split gives each rank a *box*, a range of each axis. What a rank sends to another one is where its box of the one
split and the other rank's box of the other split meet. Subarray datatypes describe these parts, and an Alltoallw moves
them. So it has the order, the kernels and the errors of that collective.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.location import is_on_device
from mpicomm.session import Session
from mpicomm.sizes import format_size

if TYPE_CHECKING:
    from typing_extensions import Self

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
        cut = () if axes is None else _integers("axes", axes if isinstance(axes, Sequence) else [axes])
        lengths: list[Any] = [None] * len(cut) if sizes is None else [sizes] if len(cut) == 1 else list(sizes)
        for name, given in (("sizes", lengths), ("grid", grid)):
            if given is not None and len(given) != len(cut):
                raise InvalidUsageError(f"{name}={given!r} has {len(given)} entries for the axes {cut}: pass one each")
        parts = tuple(None if each is None else _integers("sizes", each) for each in lengths)
        object.__setattr__(self, "axes", cut)
        object.__setattr__(self, "sizes", parts)
        object.__setattr__(self, "grid", None if grid is None else _integers("grid", grid))
        object.__setattr__(self, "ranks", None if ranks is None else _integers("ranks", ranks))

    def boxes(self, name: str, shape: tuple[int, ...], size: int) -> list[Box | None]:
        """Return the box of each rank; None for ranks without a part. ``name`` is the argument with this split."""
        said, ndim = f"{name}={self!r}", len(shape)
        axes = [axis + ndim if axis < 0 else axis for axis in self.axes]
        if not all(0 <= axis < ndim for axis in axes) or len(set(axes)) < len(axes):
            raise InvalidUsageError(f"{said}: the array of shape {shape} has no such axes: pass {ndim} or fewer")
        ranks = range(size) if self.ranks is None else self.ranks
        if not ranks or not all(0 <= rank < size for rank in ranks) or len(set(ranks)) < len(ranks):
            raise InvalidUsageError(f"{said}: pass one or more of the ranks 0 to {size - 1}, each once")
        bounds, grid = [], self._grid(said, len(ranks))
        for axis, parts, sizes in zip(axes, grid, self.sizes, strict=True):
            shared, more = divmod(shape[axis], max(parts, 1))
            lengths = [shared + (part < more) for part in range(parts)] if sizes is None else sizes
            if min(lengths, default=0) < 0 or len(lengths) != parts or sum(lengths) != shape[axis]:
                raise InvalidUsageError(
                    f"{said}: axis {axis} of shape {shape} needs {parts} sizes with the sum {shape[axis]}"
                )
            stops = list(accumulate(lengths))
            bounds.append([(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)])
        boxes: list[Box | None] = [None] * size
        for place, rank in enumerate(ranks):
            box = [(0, length) for length in shape]
            for axis, coordinate, parts_of_axis in zip(axes, _coordinates(place, grid), bounds, strict=True):
                box[axis] = parts_of_axis[coordinate]
            boxes[rank] = tuple(box)
        return boxes

    def _grid(self, said: str, count: int) -> tuple[int, ...]:
        if not self.axes:
            return ()
        grid = self.grid
        if grid is None and len(self.axes) == 1:
            grid = (count,)
        elif grid is None:
            grid = tuple(MPI.Compute_dims(count, len(self.axes)))
        if math.prod(grid) != count or min(grid) < 0:
            raise InvalidUsageError(f"{said}: a grid of {grid} has no place for {count} ranks: pass another grid=")
        return grid

    def __repr__(self) -> str:
        axes: Any = None if not self.axes else self.axes[0] if len(self.axes) == 1 else self.axes
        sizes = self.sizes[0] if len(self.sizes) == 1 else self.sizes if any(self.sizes) else None
        named = {"sizes": sizes, "grid": self.grid, "ranks": self.ranks}
        return f"Split({', '.join([repr(axes), *(f'{k}={v}' for k, v in named.items() if v is not None)])})"


AnySplit = int | None | Split | Sequence[Any]
"""What calls take as a split: an axis, None, a Split, or a box for each rank."""


class Redistribution:
    """A plan of `Communicator.redistribution`: call it with this rank's part, and it returns the other part.

    A call is *collective*. It is an Alltoallw of the communicator: it blocks on host arrays, and is stream-ordered on
    device arrays, also in CUDA graphs after a first call outside. `Free` is local. ``shape`` and ``dtype`` are those of
    the whole array. ``source_box`` and ``target_box`` are this rank's parts before and after, as the start and the stop
    of each axis, or None without a part. ``nbytes_sent`` and ``nbytes_received`` are the bytes that a call moves
    between this rank and other ranks.
    """

    def __init__(
        self,
        comm: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        from_: list[Box | None],
        to: list[Box | None],
        text: str,
    ) -> None:
        self._comm, self._text, self.shape, self.dtype = comm, text, shape, dtype
        own = comm.rank
        self.source_box, self.target_box = from_[own], to[own]
        received, sent = meetings(shape, from_, to, own)
        self.nbytes_sent, self.nbytes_received = (
            dtype.itemsize * sum(volume(piece) for rank, pieces in enumerate(blocks) if rank != own for piece in pieces)
            for blocks in (sent, received)
        )
        self._types: list[MPI.Datatype] = []
        element = types.mpi_datatype(dtype)
        if element is None:  # bytes move as well
            element = self._keep(MPI.BYTE.Create_contiguous(dtype.itemsize))
        self._sent, self._received = (
            [list(part) for part in zip(*(self._block(pieces, box, element) for pieces in blocks), strict=True)]
            for blocks, box in ((sent, self.source_box), (received, self.target_box))
        )
        self._is_freed = False

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part before; its first length is 0 if the rank has none."""
        return _extents(self.source_box, self.shape)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part after; its first length is 0 if the rank has none."""
        return _extents(self.target_box, self.shape)

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None, algorithm: str = "auto") -> Any:
        """Move the parts, and return ``out``. Collective; blocking on the host, stream-ordered on GPUs.

        ``x`` is this rank's part before, a C-contiguous array of NumPy, CuPy or PyTorch of `source_shape`. ``out`` is
        such an array of `target_shape`, which does not overlap with ``x``. Without ``out`` the library of ``x`` makes
        it. A rank without a part passes None. ``stream`` and ``algorithm`` are those of ``Alltoallw``.

        Raises `InvalidUsageError` for other arrays on the ranks that pass them, and the errors of ``Alltoallw``.
        """
        if self._is_freed:
            raise InvalidUsageError(f"{self!r} is freed: make another one")
        out = self._checked(x, out)
        parts = [_given_to_mpi(x), *self._sent], [_given_to_mpi(out), *self._received]
        self._comm.Alltoallw(*parts, stream=stream, algorithm=algorithm)
        return out

    def Free(self) -> None:
        """Free the datatypes of the plan. Local; calls that are enqueued are not affected."""
        self._is_freed = True
        while self._types:
            self._types.pop().Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.Free()

    def __repr__(self) -> str:
        sent, received = format_size(self.nbytes_sent), format_size(self.nbytes_received)
        return f"<mpicomm.Redistribution {self._text}: this rank sends {sent}, receives {received}>"

    def _checked(self, x: Any, out: Any) -> Any:
        """Return ``out``, or a new array in its place. Raise for arrays that do not fit."""
        _check_array("x", x, self.source_shape, self.dtype)
        if out is None and math.prod(self.target_shape) > 0:
            if x is None:  # no array says which library to take
                raise InvalidUsageError(
                    f"out=None: this rank has no x that names a library: pass out of shape {self.target_shape}"
                )
            out = x.new_empty(self.target_shape) if hasattr(x, "new_empty") else _empty(self.target_shape, x)
        _check_array("out", out, self.target_shape, self.dtype)
        return out

    def _keep(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self._types.append(datatype.Commit())
        return datatype

    def _block(self, pieces: list[Box], box: Box | None, element: MPI.Datatype) -> tuple[int, int, MPI.Datatype]:
        """Return the count, the displacement in bytes and the datatype of some pieces of the array of ``box``."""
        if not pieces:
            return 0, 0, element
        assert box is not None
        shape = _extents(box, self.shape)
        offsets = [tuple(begin - start for (begin, _), (start, _) in zip(piece, box, strict=True)) for piece in pieces]
        extents = [_extents(piece, self.shape) for piece in pieces]
        if len(pieces) == 1 and _is_one_run(extents[0], shape):
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            first = sum(map(operator.mul, offsets[0], strides))
            return volume(pieces[0]), first * self.dtype.itemsize, element
        made = [element.Create_subarray(shape, *each) for each in zip(extents, offsets, strict=True)]
        if len(made) == 1:
            return 1, 0, self._keep(made[0])
        datatype = self._keep(MPI.Datatype.Create_struct([1] * len(made), [0] * len(made), made))
        for each in made:
            each.Free()
        return 1, 0, datatype


class RedistributionCalls(MPI.Intracomm):
    """Methods that change how an array is split over the ranks. All of them are *collective*.

    **Splits.** ``from_`` and ``to`` are each None (every rank has the whole array), an axis (every rank has a block of
    it, and the first ranks have one element more if the length leaves a remainder), a `Split`, or a list with a box for
    each rank. A box is a slice or a pair (start, stop) for each axis. A rank without a part has None as its box. If
    several ranks have an element, a rank reads its own copy, or the copy of one of them. Ranks without a copy take
    turns over them.

    **Errors.** Bad splits and shapes raise `InvalidUsageError` on all ranks, also if the ranks pass different ones.
    """

    _session: Session

    def redistribute(
        self,
        x: Any,
        out: Any = None,
        *,
        from_: AnySplit,
        to: AnySplit,
        shape: Sequence[int] | None = None,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> Any:
        """Return this rank's part of an array in the split ``to``, from its part ``x`` in the split ``from_``.

        Collective. The ranks first compare their arguments, which blocks the host. Calls that repeat, and calls in
        CUDA graphs, take a plan of `redistribution`. Arrays and the rest are as in `Redistribution.__call__`. Without
        ``shape``, the shape of the whole array, it follows from the parts. If ``from_`` names one axis and no sizes,
        the parts may then have any lengths along it.

        Raises the same error on all ranks: `InvalidUsageError` for arguments that do not fit; `CollectiveTimeoutError`
        if a rank does not come.

            rows = cp.ones((3, 8))  # of each rank
            columns = comm.redistribute(rows, from_=0, to=1)
            whole = comm.redistribute(rows, from_=0, to=None)
        """
        group = self._session.set_up("redistribute").group
        splits: list[Any] = []

        def say() -> tuple[str, Any]:
            splits.extend([_normal("from_", from_), _normal("to", to)])
            own = None if x is None else _described("x", x)
            return repr((splits, None if shape is None else _shape(shape))), own

        said = group.exchange("redistribute", say)
        _require_same([text for text, _ in said])
        parts = [own for _, own in said]
        known = [own for own in parts if own is not None]
        source, target = splits
        if len({dtype for _, dtype in known}) != 1:
            names = [own and own[1] for own in parts]
            raise InvalidUsageError(f"x has the element types {names} by rank: pass one type on all ranks")
        if shape is None:
            source, whole = _whole(source, [own and own[0] for own in parts])
        else:
            whole = _shape(shape)
        with self._plan(whole, types.covered_dtype(known[0][1]), source, target) as plan:
            made: list[Any] = []
            group.agree("redistribute", lambda: made.append(plan._checked(x, out)))
            return plan(x, made[0], stream=stream, algorithm=algorithm)

    def redistribution(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, from_: AnySplit, to: AnySplit
    ) -> Redistribution:
        """Plan how arrays of the whole ``shape`` change from one split to another. Collective, blocking.

        The `Redistribution` is a function of this rank's part. It takes any arrays of its shapes without further
        planning. ``Free``, or the end of a ``with`` block, frees it.

        Raises the same error on all ranks: `InvalidUsageError` for arguments that do not fit; `CollectiveTimeoutError`
        if a rank does not come.

            with comm.redistribution((64, 48), "float32", from_=0, to=1) as to_columns:
                rows = cp.ones(to_columns.source_shape, "float32")
                columns = to_columns(rows)
        """
        made: list[tuple[Any, ...]] = []

        def say() -> str:
            made.append((_shape(shape), _dtype("dtype", dtype), _normal("from_", from_), _normal("to", to)))
            return repr(made[0])

        _require_same(self._session.set_up("redistribution").group.exchange("redistribution", say))
        return self._plan(*made[0])

    def _plan(self, shape: tuple[int, ...], dtype: np.dtype[Any], source: Any, target: Any) -> Redistribution:
        from_, to = (
            each.boxes(name, shape, self.size) if isinstance(each, Split) else _given(name, each, shape, self.size)
            for name, each in (("from_", source), ("to", target))
        )
        return Redistribution(self, shape, dtype, from_, to, f"{shape} {dtype.name}, {source!r} to {target!r}")


def meetings(
    shape: tuple[int, ...], from_: list[Box | None], to: list[Box | None], own: int
) -> tuple[list[list[Box]], list[list[Box]]]:
    """Return what rank ``own`` receives from each rank, and what it sends to each, as boxes of the whole array.

    Raises `InvalidUsageError` if a rank needs an element that no rank has.
    """
    size = len(from_)
    received: list[list[Box]] = []
    sent: list[list[Box]] = []
    holders = [rank for rank, box in enumerate(from_) if box is not None and volume(box)]
    readers = [rank for rank in range(size) if rank not in holders]
    for rank, target in enumerate(to):
        found: list[list[Box]] = [[] for _ in range(size)]
        rest = [target] if target is not None and volume(target) else []
        # The own copy first. Ranks without one begin at different holders, so that no holder serves all of them.
        turn = readers.index(rank) if rank in readers else holders.index(rank)
        for number in range(len(holders)):
            if not rest:
                break
            holder = holders[(turn + number) % len(holders)]
            box, uncovered = from_[holder], []
            assert box is not None
            for part in rest:
                common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(part, box, strict=True))
                if volume(common):
                    found[holder].append(common)
                    uncovered += _without(part, common)
                else:
                    uncovered.append(part)
            rest = uncovered
        if rest:
            raise InvalidUsageError(
                f"from_: no rank has the elements {rest[0]} of shape {shape}, which rank {rank} needs: pass boxes that "
                "cover them"
            )
        sent.append(found[own])
        if rank == own:
            received = found
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


def _extents(box: Box | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *shape[1:]) if box is None else tuple(stop - start for start, stop in box)


def _is_one_run(extents: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a part with these lengths is one run of an array of ``shape``."""
    axis = next((axis for axis, length in enumerate(extents) if length > 1), len(shape))
    return extents[axis + 1 :] == shape[axis + 1 :]


def _coordinates(place: int, grid: tuple[int, ...]) -> list[int]:
    return [int(coordinate) for coordinate in np.unravel_index(place, grid)] if grid else []


def _integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise InvalidUsageError(f"{name}={values!r}: pass integers") from None


def _shape(shape: Any) -> tuple[int, ...]:
    lengths = _integers("shape", shape if isinstance(shape, Sequence) else [shape])
    if not lengths or min(lengths) < 0:
        raise InvalidUsageError(f"shape={shape!r}: pass at least one length, and none below 0")
    return lengths


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        found = types.torch_dtype(dtype) if str(dtype).startswith("torch.") else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not types.is_covered(found):
        raise InvalidUsageError(
            f"{name}={dtype!r} is no element type of mpicomm: pass one of {', '.join(types.COVERED)}"
        )
    return found


def _normal(name: str, split: Any) -> Any:
    """Return a split as a Split, or as a tuple of boxes."""
    if isinstance(split, Split):
        return split
    if split is None or hasattr(split, "__index__"):
        return Split(split)
    try:
        return tuple(None if box is None else tuple(map(_range, box)) for box in split)
    except (TypeError, ValueError):
        raise InvalidUsageError(
            f"{name}={split!r} is no split: pass an axis, None, mpicomm.Split, or a box of slices for each rank"
        ) from None


def _range(part: Any) -> tuple[int, int]:
    start, stop = (part.start, part.stop) if isinstance(part, slice) else part
    return operator.index(start), operator.index(stop)


def _given(name: str, boxes: tuple[Any, ...], shape: tuple[int, ...], size: int) -> list[Box | None]:
    """Return the boxes of the user, compared with the shape."""
    if len(boxes) != size:
        raise InvalidUsageError(f"{name}={boxes!r} has {len(boxes)} boxes: pass one for each of {size} ranks")
    for box in boxes:
        if box is not None and (
            len(box) != len(shape)
            or not all(0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True))
        ):
            raise InvalidUsageError(
                f"{name}: the box {box} is no part of shape {shape}: pass (start, stop) of each axis"
            )
    return list(boxes)


def _whole(split: Any, parts: list[Any]) -> tuple[Any, tuple[int, ...]]:
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
        raise InvalidUsageError(f"from_={split!r}: the parts x of shapes {parts} are no parts of one array")
    if axis is None:
        return split, known[0]
    lengths = [0 if part is None else part[axis] for part in held]
    if split.sizes[0] is None:
        split = Split(axis, sizes=lengths, grid=split.grid, ranks=split.ranks)
    whole = list(known[0])
    whole[axis] = sum(lengths)
    return split, tuple(whole)


def _require_same(texts: list[str]) -> None:
    if len(set(texts)) > 1:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise InvalidUsageError(f"ranks passed different things: {said}: pass the same shape, dtype, from_ and to")


def _described(name: str, array: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and the name of the element type of an array."""
    try:
        return tuple(map(int, array.shape)), _dtype(name, array.dtype).name
    except AttributeError:
        raise InvalidUsageError(
            f"{name} is a {type(array).__name__}: pass an array of NumPy, CuPy or PyTorch"
        ) from None


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array is None:
        if math.prod(shape):
            raise InvalidUsageError(f"{name}=None: this rank has a part: pass an array of shape {shape}, {dtype.name}")
        return
    found, own = _described(name, array)
    both_empty = not (math.prod(found) or math.prod(shape))
    if (found != shape and not both_empty) or own != dtype.name:
        raise InvalidUsageError(
            f"{name} has shape {found} and type {own}: this rank's part has shape {shape} and type {dtype.name}"
        )
    flags = getattr(array, "flags", None)
    if not (array.is_contiguous() if flags is None else flags.c_contiguous):
        raise InvalidUsageError(
            f"{name} of shape {found} is not C-contiguous: pass numpy.ascontiguousarray({name}), "
            f"cupy.ascontiguousarray({name}) or {name}.contiguous()"
        )


def _given_to_mpi(array: Any) -> Any:
    """Return None for an empty host array: mpi4py takes some empty slices of tensors for not contiguous."""
    is_empty = array is not None and not math.prod(array.shape) and not is_on_device(array)
    return None if is_empty else array


def _empty(shape: tuple[int, ...], x: Any) -> Any:
    return sys.modules[type(x).__module__.partition(".")[0]].empty(shape, x.dtype)
