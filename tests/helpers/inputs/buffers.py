"""Buffers in host or GPU memory with values that every rank knows, and the arguments that name them in mpi4py."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.mpi import types
from tests.helpers.fakes.message_devices import DeviceArray, ThreadDevice
from tests.helpers.references.reductions import Array, samples

_GUARD = 64
ROOM_NBYTES = 2 * _GUARD
_GUARD_BYTE = 0xA5
_POOL = 1 << 16


@lru_cache(maxsize=64)
def _pool(dtype: np.dtype[Any], wild: bool) -> Array:
    rng = np.random.default_rng([zlib.crc32(dtype.name.encode()), wild])
    if wild:
        return samples(dtype, _POOL, rng)
    low = 0 if dtype.kind in "bu" else -2
    tame: Array = rng.integers(low, 2 if dtype.kind == "b" else 3, _POOL).astype(dtype)
    if dtype.kind == "c":
        tame.imag = rng.integers(-2, 3, _POOL)
    return tame


def values(dtype: np.dtype[Any], count: int, *key: int, wild: bool = False) -> Array:
    """Return the values of ``key``: small integers, whose reductions are exact in any order, or any bits."""
    pool = _pool(dtype, wild)
    start = zlib.crc32(repr(key).encode()) % (_POOL // 2)
    return pool[start : start + count].copy() if start + count <= _POOL else np.resize(pool[start:], count)


class Foreign:
    """A GPU array of a library that is neither CuPy nor PyTorch, of an element type that CuPy may lack."""

    def __init__(self, region: Any, dtype: np.dtype[Any], count: int) -> None:
        self._region = region
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": dtype.str,
            "data": (int(region.data.ptr), False),
            "version": 3,
        }


class Placed:
    """Elements in host or GPU memory, at any address, between guards that nothing may write into.

    ``xp`` is NumPy, CuPy or a `ThreadDevice`. ``memory`` is a contiguous array in which they lie, with `ROOM_NBYTES`
    bytes more than they have and the ``offset``.
    """

    def __init__(self, xp: Any, content: Array, *, offset: int = 0, fortran: bool = False, memory: Any = None) -> None:
        self.dtype = content.dtype
        self._device = xp if isinstance(xp, ThreadDevice) else None
        self._start, self._stop = _GUARD + offset, _GUARD + offset + content.nbytes
        if memory is None:
            full = np.full if self._device else xp.full
            self._raw = full(self._stop + _GUARD, _GUARD_BYTE, np.uint8)
        else:
            self._raw = memory.view(np.uint8)[: self._stop + _GUARD]
            self._raw[:] = _GUARD_BYTE
        region = self.region = self._raw[self._start : self._stop]
        """The bytes of the elements."""
        rows = 2 if fortran and content.size % 2 == 0 else 1
        shape = (rows, content.size // rows) if fortran else (content.size,)
        self.array: Any
        if xp is np or self._device:
            self.array = region.view(content.dtype).reshape(shape, order="F")
            if self._device:
                self.array = DeviceArray(self._device, self.array, copies=False)
        elif content.dtype.isbuiltin == 1:
            self.array = xp.ndarray(shape, content.dtype, memptr=region.data, order="F")
        else:
            self.array = Foreign(region, content.dtype, content.size)
        self.set(content)

    def set(self, content: Array) -> None:
        """Overwrite the elements."""
        data = np.ascontiguousarray(content).view(np.uint8)
        if self._device:
            self._device.synchronize()
        if isinstance(self._raw, np.ndarray):
            self._raw[self._start : self._stop] = data
        elif data.size:
            import cupy

            self._raw[self._start : self._stop].set(data)
            cupy.cuda.get_current_stream().synchronize()

    def get(self) -> Array:
        """A host copy of the elements in the order in which they lie in memory; on a GPU after all its work."""
        raw = self._raw
        if self._device:
            self._device.synchronize()
        if not isinstance(raw, np.ndarray):
            import cupy

            cupy.cuda.Device().synchronize()
            raw = raw.get()
        assert (raw[: self._start] == _GUARD_BYTE).all(), "something wrote before the buffer"
        assert (raw[self._stop :] == _GUARD_BYTE).all(), "something wrote after the buffer"
        elements: Array = raw[self._start : self._stop].copy().view(self.dtype)
        return elements


JUNK: tuple[Any, ...] = (
    *([1.0, 2.0], (), object(), 7, "text", None, {}, [b"", -1, MPI.INT]),
    *(np.zeros((4, 4))[::2, ::2], np.zeros(5), np.zeros(1 << 17)),
)
"""No rank looks at these arguments."""
UNITS, EXTENT = 6, 20
_SPREAD: tuple[tuple[Callable[[MPI.Datatype, int], MPI.Datatype], Sequence[int]], ...] = (
    (lambda of, nbytes: of.Create_vector(UNITS, 1, 3), range(0, 18, 3)),
    (lambda of, nbytes: of.Create_subarray([4, 5], [2, 3], [1, 2]), (7, 8, 9, 12, 13, 14)),
    (lambda of, nbytes: of.Create_indexed([1, 3, 2], [1, 4, 12]), (1, 4, 5, 6, 12, 13)),
    (lambda of, nbytes: of.Create_hindexed_block(1, [n * nbytes for n in (15, 8, 1, 3, 12, 0)]), (15, 8, 1, 3, 12, 0)),
    (lambda of, nbytes: of.Create_struct([1, 2, 3], [nbytes, 3 * nbytes, 9 * nbytes], [of] * 3), (1, 3, 4, 9, 10, 11)),
)
"""Datatypes of `UNITS` elements in several regions, the last two of which kernels have to pack; and the places."""
SPREADS = len(_SPREAD)
_OF_BYTES = (MPI.BYTE, MPI.CHAR, MPI.SIGNED_CHAR, MPI.BYTE.Dup())


def one_of(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _base(dtype: np.dtype[Any]) -> MPI.Datatype:
    return types.mpi_datatype(dtype) or MPI.BYTE.Create_contiguous(dtype.itemsize)


# The datatypes last as long as the process.
@cache
def spread(dtype: np.dtype[Any], kind: int) -> MPI.Datatype:
    """Return the datatype of that number, up to `SPREADS`."""
    return _SPREAD[kind][0](_base(dtype), dtype.itemsize).Create_resized(0, EXTENT * dtype.itemsize).Commit()


@cache
def _contiguous(dtype: np.dtype[Any], count: int) -> MPI.Datatype:
    return _base(dtype).Create_contiguous(count).Commit()


@cache
def _predefined(dtype: np.dtype[Any]) -> list[Any]:
    """Names of an element type, of which mpi4py lacks NumPy's; the first is MPI's, if MPI has the type."""
    known = types.mpi_datatype(dtype)
    if known is None:
        return [dtype.name]
    more: dict[str, list[Any]] = {"int64": [MPI.LONG, MPI.LONG_LONG, "q"], "float64": [MPI.REAL8]}
    return [
        known,
        *(name for name in (dtype.char, dtype.str[1:]) if name in MPI._typedict),
        *more.get(dtype.name, ()),
        dtype.name,
    ]


class Blocks:
    """The blocks of one buffer, ``content`` before the call, and ``placed``, which has it in memory.

    Without ``rng`` they follow each other and fill the buffer. Otherwise ``rng`` draws their order, gaps between them,
    and with ``derived`` the datatypes that name them.
    """

    def __init__(
        self, shape: str, lengths: list[int], dtype: np.dtype[Any], rng: np.random.Generator | None, *, derived: bool
    ) -> None:
        self.shape, self.lengths, self.dtype = shape, lengths, dtype
        self.is_empty = not sum(lengths)
        many = shape in ("vector", "typed")
        fits = derived and rng is not None and not any(length % UNITS for length in lengths)
        kinds = [int(rng.integers(-2, SPREADS)) if fits and rng is not None else -1 for _ in lengths]
        self.kinds = kinds if shape == "typed" else [kinds[0]] * len(lengths)
        """For each block the datatype in `_SPREAD`, or a negative number if its elements have no gaps."""
        bare = rng is None or self.is_empty or rng.integers(3) == 0
        # Elements, or datatypes of `_SPREAD`, before, between and after the blocks; between only if they have counts.
        self._displ, self._gap, extra = [int(rng.integers(4)) if rng and not bare else 0 for _ in range(3)]
        self._is_whole = self._displ == extra == 0 and max(self.kinds) < 0
        each = [EXTENT if kind >= 0 else 1 for kind in self.kinds]
        order = reversed(range(len(lengths))) if many and self._gap else range(len(lengths))
        starts, end = [0] * len(lengths), self._displ * each[0]
        for number in order:
            starts[number] = end
            items = lengths[number] // UNITS if self.kinds[number] >= 0 else lengths[number]
            end += (items + self._gap * many) * each[number]
        self.room = end + extra * each[0]
        self.starts = [start // one for start, one in zip(starts, each, strict=True)] if shape != "typed" else starts
        self.places = np.concatenate(
            [
                start
                + (
                    np.arange(length)
                    if kind < 0
                    else np.add.outer(np.arange(length // UNITS) * EXTENT, _SPREAD[kind][1]).ravel()
                )
                for start, length, kind in zip(starts, lengths, self.kinds, strict=True)
            ]
        ).astype(np.int64)
        self.content: Array
        self.placed: Placed

    def fill(self, blocks: Sequence[Array | None] | None, around: Array) -> None:
        """Put values into the blocks, and those of ``around`` everywhere else."""
        self.content = around.copy()
        cuts = np.split(self.places, np.cumsum(self.lengths)[:-1])
        for places, block in zip(cuts, blocks or [], strict=blocks is not None):
            if block is not None:
                self.content[places] = block

    def received(self, count: int, *, rest_is_any: bool = False) -> Array:
        """Return the first elements of the blocks after the call; assert that no others have changed."""
        got, mine = self.placed.get(), self.places if rest_is_any else self.places[:count]
        others = got.copy()
        others[mine] = self.content[mine]
        assert others.tobytes() == self.content.tobytes(), "elements beside the blocks have changed"
        return got[self.places[:count]]

    def plain(self) -> Any:
        """Return the array alone, if the call has a form without datatypes."""
        return self._typed(self.placed.array) if self.shape == "typed" else self.placed.array

    def named(self, rng: np.random.Generator, where: Any, *, copies: bool, derived: bool, mpis: bool) -> Any:
        """Return an argument in any form, for memory on the host, on a device, or nowhere, if ``where`` is None.

        With ``copies`` it may be a copy, and with ``derived`` of a derived datatype. With ``mpis`` MPI carries out a
        reduction, and takes only one of its datatypes in both buffers.
        """
        memory, knows_type, knows_length = self._memory(rng, where, copies=copies)
        if self.shape == "typed":
            return self._typed(memory, rng)
        kind, itemsize = self.kinds[0], 1
        datatype = one_of(rng, _predefined(self.dtype)[: 1 if mpis or where is None else None])
        if kind >= 0:
            datatype = spread(self.dtype, kind)
        elif derived and (rng.integers(3) == 0 or (where is None and isinstance(datatype, str))):
            datatype, itemsize = one_of(rng, _OF_BYTES), self.dtype.itemsize
        counts = [n // UNITS if kind >= 0 else itemsize * n for n in self.lengths]
        if self.shape == "vector":
            starts = [itemsize * start for start in self.starts]
            forms: list[Any] = [[memory, counts, starts, datatype], [memory, (counts, starts), datatype]]
            forms.append((memory, np.array(counts), np.array(starts), datatype))
            follow = not self._displ and not self._gap
            if follow:
                forms += [(memory, tuple(counts), None, datatype), [memory, (counts, None), datatype]]
            if knows_type:
                forms += [[memory, (self.lengths, self.starts)], *[[memory, self.lengths]] * follow]
            return one_of(rng, forms)
        count, displ = sum(counts) if self.shape == "by_recvcounts" else counts[0], itemsize * self._displ
        forms = [[memory, (count, displ), datatype], (memory, count, displ, datatype)]
        if not displ:
            forms.append([memory, count, datatype])
            if count and kind < 0 and derived:
                forms.append([memory, 1, _contiguous(self.dtype, self.lengths[0])])
            forms += [[memory, count // itemsize]] * knows_type
            if self._is_whole and knows_length:
                forms += [[memory, datatype], (memory, None, datatype), *[memory] * (2 * knows_type)]
        return one_of(rng, forms)

    def _memory(self, rng: np.random.Generator, where: Any, *, copies: bool) -> tuple[Any, bool, bool]:
        """Return an object that names the memory, and whether it tells the element type and the length."""
        array, region = self.placed.array, self.placed.region
        if where is None:
            return one_of(rng, [None, MPI.memory.fromaddress(0, 0)]), False, False
        if where is not np:  # libraries name the address, or the address and the length
            if rng.integers(3) or not region.size:  # an address of nothing does not say where it lies
                return array, self.kinds[0] < 0, self.kinds[0] < 0
            return MPI.memory.fromaddress(array.__cuda_array_interface__["data"][0], region.size), False, False
        if self.kinds[0] < 0 and array.flags.aligned and rng.integers(2):
            return array, True, True
        address = region.ctypes.data if region.size else 0
        raw: Any = region
        forms = [region, memoryview(raw), MPI.memory.fromaddress(address, region.size)]
        views = (("S1", 1), ("V4", 4), ("f8", 8), ("i8", 8))
        forms += [raw.view(name) for name, nbytes in views if region.size % nbytes == 0]
        forms += [region.reshape(4, -1)] if region.size % 4 == 0 else []
        forms += [region.tobytes(), bytearray(region)] if copies else []
        return one_of(rng, forms), False, True

    def _typed(self, memory: Any, rng: np.random.Generator | None = None) -> Any:
        counts: list[int] = []
        named: list[MPI.Datatype] = []
        for length, kind in zip(self.lengths, self.kinds, strict=True):
            whole = length and rng is not None and rng.integers(2)
            counts.append(length // UNITS if kind >= 0 else 1 if whole else length)
            if not length:
                named.append(MPI.DOUBLE if rng is None else one_of(rng, (MPI.DOUBLE, MPI.INT, MPI.SHORT_INT)))
            elif kind >= 0:
                named.append(spread(self.dtype, kind))
            else:
                named.append(_contiguous(self.dtype, length if whole else 1))
        starts = [self.dtype.itemsize * start for start in self.starts]
        return [memory, (counts, starts), named] if rng is None or rng.integers(2) else [memory, counts, starts, named]
