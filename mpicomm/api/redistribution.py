"""Redistribution: an array that is split over ranks in one way becomes an array that is split in another way.

A rank sends to another rank the intersection of its own box in the one split and the other rank's box in the other
split. Subarray datatypes describe these parts, and an Alltoallw moves them. So it has the order, the kernels and the
errors of that collective. If the parts are long and equal on all ranks, it is an Alltoall, which copy engines may carry
out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.api.splits import AnySplit, Box, Split, boxes_of, global_shape_of, integers, normalize, transfers, volume
from mpicomm.cluster.agreement import require_same
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import ArrayMemory, new_array, read_in_order
from mpicomm.session import Session
from mpicomm.sizes import format_size

_Boxes = list["Box | None"]
_LONG_NBYTES = 32 << 20
"""The bytes of a part from which an Alltoall on GPUs may take less time than an Alltoallw. Its calls with new arrays
hold the host for longer."""


class Redistribution(AbstractContextManager["Redistribution"]):
    """A plan of `Communicator.redistribution`: call it with this rank's part, and it returns the other part.

    A call is *collective*. It is an Alltoallw or an Alltoall of the communicator: it blocks on host arrays, and is
    stream-ordered on device arrays, also in CUDA graphs after a first call outside. `Free` is local. ``shape`` and
    ``dtype`` are those of the whole array. ``source_box`` and ``target_box`` are this rank's parts before and after, as
    the start and the stop of each axis, or None without a part. ``source_shape`` and ``target_shape`` are their shapes;
    without a part the first length is 0. ``nbytes_sent`` and ``nbytes_received`` are the bytes
    that a call moves between this rank and other ranks.
    """

    def __init__(
        self, comm: Any, shape: tuple[int, ...], dtype: np.dtype[Any], from_: _Boxes, to: _Boxes, text: str
    ) -> None:
        self._comm, self._text, self.shape, self.dtype = comm, text, shape, dtype
        rank = comm.rank
        self.source_box, self.target_box = from_[rank], to[rank]
        self.source_shape, self.target_shape = _extents(from_[rank], shape), _extents(to[rank], shape)
        received, sent = transfers(shape, from_, to, rank)
        self.nbytes_sent, self.nbytes_received = (
            sum(self._nbytes_of(pieces) for peer, pieces in enumerate(blocks) if peer != rank)
            for blocks in (sent, received)
        )
        self._types: list[MPI.Datatype] = []
        element = types.mpi_datatype(dtype)
        if element is None:  # bytes move as well
            element = self._keep(MPI.BYTE.Create_contiguous(dtype.itemsize))
        source, target = _even_axis(shape, from_), _even_axis(shape, to)
        is_even = None not in (source, target) and source != target
        self._is_even = is_even and self._nbytes_of(sent[0]) >= _LONG_NBYTES
        self._sent = self._blocks(sent, self.source_box, target, element)
        self._received = self._blocks(received, self.target_box, source, element)
        self._is_freed = False

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None, algorithm: str = "auto") -> Any:
        """Move the parts, and return ``out``. Collective; blocking on the host, stream-ordered on GPUs.

        ``x`` is this rank's part before, a C-contiguous array of NumPy, CuPy or PyTorch of ``source_shape``. ``out`` is
        such an array of ``target_shape``, which does not overlap with ``x``. Without ``out`` the library of ``x`` makes
        it. A rank without a part passes None, and gets None. ``stream`` and ``algorithm`` are those of ``Alltoallw``.

        Raises `InvalidUsageError` for other arrays on the ranks that pass them, and the errors of the collective.
        """
        if self._is_freed:
            raise InvalidUsageError(f"{self!r} is freed: make another one")
        out = self._checked(x, out)
        move = self._comm.Alltoall if self._is_even else self._comm.Alltoallw
        move([x, *self._sent], [out, *self._received], stream=stream, algorithm=algorithm)
        return out

    def Free(self) -> None:
        """Free the datatypes of the plan. Local; calls that are enqueued are not affected."""
        self._is_freed = True
        while self._types:
            self._types.pop().Free()

    def __exit__(self, *error: object) -> None:
        self.Free()

    def __repr__(self) -> str:
        sent, received = format_size(self.nbytes_sent), format_size(self.nbytes_received)
        return f"<mpicomm.Redistribution {self._text}: this rank sends {sent}, receives {received}>"

    def _checked(self, x: Any, out: Any) -> Any:
        """Return ``out``, or a new array in its place. Raise for arrays that do not fit."""
        source = self._read("x", x, self.source_shape, writable=False)
        if out is None and self.target_box is not None:
            if source is not None:
                out = new_array(x, self.target_shape, self.dtype, on_device=source.on_device)
            elif volume(self.target_box):
                raise InvalidUsageError(
                    f"out=None: this rank has no x that names a library: pass out of shape {self.target_shape}"
                )
        target = self._read("out", out, self.target_shape, writable=True)
        if source is not None and target is not None and source.on_device == target.on_device:
            first, last = sorted((source, target), key=lambda memory: memory.pointer)
            if last.nbytes and first.pointer + first.nbytes > last.pointer:
                raise InvalidUsageError("out overlaps with x: pass another array as out, or none")
        return out

    def _read(self, name: str, array: Any, shape: tuple[int, ...], *, writable: bool) -> ArrayMemory | None:
        """Read an argument; None for None. Raise `InvalidUsageError` if it does not fit."""
        if array is None:
            if math.prod(shape):
                wanted = f"pass an array of shape {shape}, {self.dtype.name}"
                raise InvalidUsageError(f"{name}=None: this rank has a part: {wanted}")
            return None
        memory, passed = read_in_order(array, writable, name), tuple(array.shape)
        both_empty = not (math.prod(passed) or math.prod(shape))
        if (passed != shape and not both_empty) or memory.dtype != self.dtype:
            raise InvalidUsageError(
                f"{name} has shape {passed} and type {memory.dtype}: this rank's part has shape {shape} and type "
                f"{self.dtype.name}"
            )
        return memory

    def _keep(self, datatype: MPI.Datatype) -> MPI.Datatype:
        self._types.append(datatype.Commit())
        return datatype

    def _nbytes_of(self, pieces: list[Box]) -> int:
        return self.dtype.itemsize * sum(map(volume, pieces))

    def _blocks(self, blocks: list[list[Box]], box: Box | None, axis: Any, element: MPI.Datatype) -> list[Any]:
        """Return what follows the array in the argument of the collective.

        An Alltoallw gets all counts, displacements and datatypes. An Alltoall gets the count and the datatype of each
        block, because the ``axis`` is cut evenly and the first block is at 0.
        """
        if not self._is_even:
            return [list(part) for part in zip(*(self._block(pieces, box, element) for pieces in blocks), strict=True)]
        count, _, datatype = self._block(blocks[0], box, element)
        if datatype is not element:
            begin, end = blocks[0][0][axis]
            nbytes = (end - begin) * math.prod(_extents(box, self.shape)[axis + 1 :]) * self.dtype.itemsize
            datatype = self._keep(datatype.Create_resized(0, nbytes))
        return [count, datatype]

    def _block(self, pieces: list[Box], box: Box | None, element: MPI.Datatype) -> tuple[int, int, MPI.Datatype]:
        """Return the count, the displacement in bytes and the datatype of some pieces of the array of ``box``."""
        if not pieces:
            return 0, 0, element
        assert box is not None
        shape = _extents(box, self.shape)
        offsets = [tuple(begin - start for (begin, _), (start, _) in zip(piece, box, strict=True)) for piece in pieces]
        extents = [_extents(piece, self.shape) for piece in pieces]
        cut = next((axis for axis, length in enumerate(extents[0]) if length > 1), len(shape))
        if len(pieces) == 1 and extents[0][cut + 1 :] == shape[cut + 1 :]:  # one run of the array
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            first = sum(map(operator.mul, offsets[0], strides))
            return volume(pieces[0]), first * self.dtype.itemsize, element
        subarrays = [element.Create_subarray(shape, *each) for each in zip(extents, offsets, strict=True)]
        if len(subarrays) == 1:
            return 1, 0, self._keep(subarrays[0])
        datatype = self._keep(MPI.Datatype.Create_struct([1] * len(subarrays), [0] * len(subarrays), subarrays))
        for each in subarrays:
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

        def describe() -> tuple[tuple[Any, ...], Any, str | None]:
            part = dtype = None
            if x is not None:
                found = read_in_order(x, False, "x").dtype
                part, dtype = tuple(map(int, x.shape)), _dtype("x", x.dtype if found is None else found).name
            whole = None if shape is None else _shape(shape)
            return (normalize("from_", from_), normalize("to", to), whole), part, dtype

        splits, parts, dtypes = zip(*group.allgather("redistribute", describe), strict=True)
        require_same("from_, to or shape", [*map(repr, splits)])
        source, target, whole = splits[0]
        names = {dtype for dtype in dtypes if dtype is not None}
        if len(names) != 1:
            raise InvalidUsageError(f"x has the element types {[*dtypes]} by rank: pass one type on all ranks")
        if whole is None:
            source, whole = global_shape_of(source, [*parts])
        with self._plan(whole, types.covered_dtype(names.pop()), source, target) as plan:
            out = group.agree("redistribute", lambda: plan._checked(x, out))  # errors are those of all ranks
            return plan(x, out, stream=stream, algorithm=algorithm)

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
        arguments = self._session.set_up("redistribution").group.allgather(
            "redistribution",
            lambda: (_shape(shape), _dtype("dtype", dtype), normalize("from_", from_), normalize("to", to)),
        )
        require_same("shape, dtype, from_ or to", [*map(repr, arguments)])
        return self._plan(*arguments[0])

    def _plan(self, shape: tuple[int, ...], dtype: np.dtype[Any], source: Any, target: Any) -> Redistribution:
        from_, to = boxes_of("from_", source, shape, self.size), boxes_of("to", target, shape, self.size)
        return Redistribution(self, shape, dtype, from_, to, f"{shape} {dtype.name}, {source!r} to {target!r}")


def _extents(box: Box | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *shape[1:]) if box is None else tuple(stop - start for start, stop in box)


def _even_axis(shape: tuple[int, ...], boxes: _Boxes) -> int | None:
    """Return the axis along which ranks have equal blocks in their order, if all of each block is theirs."""
    for axis, length in enumerate(shape):
        if length % len(boxes) == 0 and boxes_of("", Split(axis), shape, len(boxes)) == boxes:
            return axis
    return None


def _shape(shape: Any) -> tuple[int, ...]:
    lengths = integers("shape", shape)
    if min(lengths, default=0) < 0:
        raise InvalidUsageError(f"shape={shape!r}: pass no length below 0")
    return lengths


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    found = types.named_dtype(dtype)
    if found is None:
        raise InvalidUsageError(
            f"{name}={dtype!r} is no element type of mpicomm: pass one of {', '.join(types.COVERED)}"
        )
    return found
