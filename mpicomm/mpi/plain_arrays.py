"""Buffer arguments on a GPU as numbers and a hashable kind, and as keys, by which known calls are looked up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from operator import mul
from typing import Any

from mpi4py import MPI
from numpy import integer, ndarray

from mpicomm.devices.memory_location import place_of
from mpicomm.mpi.buffers import any_overlap
from mpicomm.mpi.layout import DatatypeLayout, known, known_of
from mpicomm.mpi.spec import parts_of

PlainArray = tuple[int, int, Any]
"""The address of a contiguous array on a GPU, the number of its elements, and their type and device.

An argument without an array has no elements, and in place of their type the name of its class. This is a plain tuple,
because a tuple without names takes a third of the time to make.
"""
PlainBlocks = tuple[int, int, Any, "tuple[int, ...] | int", "tuple[int, ...] | int | None"]
"""A `PlainArray` with the counts and displacements of blocks, in elements. Its type item also holds the datatype.

The displacements are None if each block follows the block before. If each block has a datatype, all numbers are bytes.
In place of numbers on a GPU there is their address, and the type item also holds their number and their type. The type
item ends with "gaps" if it holds the keys of datatypes with gaps, and the counts; displacements are in bytes then.
"""

ListedBlocks = tuple[int, int, Any, tuple[int, ...], tuple[int, ...]]
"""`PlainBlocks` with counts and displacements."""


def plain_array(argument: Any) -> PlainArray | PlainBlocks | None:
    """Read a buffer argument that is a plain array, ``MPI.IN_PLACE`` or None. Return None for all others. Local.

    A list of a plain array, counts, displacements and perhaps a predefined datatype has its blocks. So has a list with
    a datatype for each block. The function does not check the values of counts and displacements. A list with one
    count, or with only a datatype, is a plain array of so many elements. In lists with a datatype, an address of a
    GPU's memory may take the place of the array.
    """
    read = _readers.get(type(argument)) or _find(type(argument))
    return read(argument) if read else None


def known_buffer(argument: Any, *, counts_on_device: bool = False) -> PlainArray | PlainBlocks | None:
    """As `plain_array`, for the look-up of repeated calls: lists of other forms are recognised by all their items.

    If ``counts_on_device``, counts and displacements may be plain arrays on a GPU. The result is None if an item cannot
    be recognised. `has_template_kind` is false for lists that only a call with equal items shares.
    """
    cls = type(argument)
    if cls is not list and cls is not tuple:
        read = _readers.get(cls) or _find(cls)  # as `plain_array`, without one more call
        return read(argument) if read else None
    plain = _blocks(argument, on_device=counts_on_device)
    if plain is not None or not argument:
        return plain
    array: Any = plain_array(argument[0])
    said = None if array is None else key_of_numbers(tuple(argument[1:]), counts_on_device=counts_on_device)
    return None if said is None else (*array[:2], (array[2:], "items"), said, None)


def has_template_kind(plain: PlainArray | PlainBlocks) -> bool:
    """Return whether the kind of a `known_buffer` tells how its numbers give the blocks."""
    return type(plain[2]) is not tuple or plain[2][-1] != "items"


def key_of_numbers(said: Any, *, counts_on_device: bool = False) -> Hashable:
    """Return a key of counts, displacements and types as they are now; None if they cannot be recognised.

    Predefined types of MPI are recognised by name, and others by `type_key`, because MPI may reuse the handle of a
    derived datatype for another one.
    """
    kind = type(said)
    if kind is list or kind is tuple:  # a list and a tuple mean different things
        if _PLAIN.issuperset(map(type, said)):
            return kind, *said
        parts = tuple(key_of_numbers(part, counts_on_device=counts_on_device) for part in said)
        return None if None in parts else (kind, parts)
    if kind is ndarray:
        return (kind, said.dtype.str, said.shape, said.tobytes()) if said.dtype.kind in "iu" else None
    if kind is _Datatype:
        return (kind, said.handle) if said.is_predefined else type_key(said)
    if kind in _PLAIN or isinstance(said, integer):
        return kind, said
    return plain_array(said) if counts_on_device else None


def is_counted(plain: PlainArray | PlainBlocks) -> bool:
    """Return whether a count gives the elements of a plain array, or of one block if the buffer has blocks."""
    return type(plain[2]) is tuple and plain[2][-1] == "count"


def _nothing(argument: Any) -> PlainArray:
    return 0, 0, type(argument).__name__


IN_PLACE, NOTHING = _nothing(MPI.IN_PLACE), _nothing(None)
"""The results of `plain_array` for ``MPI.IN_PLACE`` and None."""


def _cupy(array: Any) -> PlainArray | None:
    data = array.data
    # The public `array.flags` takes eight times as long.
    is_contiguous = array._c_contiguous or array._f_contiguous
    return (data.ptr, array.size, (array.dtype, data.device_id)) if is_contiguous else None


def _torch(tensor: Any) -> PlainArray | None:
    plain = plain_tensor(tensor)
    if plain is None and tensor.is_cuda and tensor.dim() > 1:  # Fortran's order is contiguous, too
        with suppress(RuntimeError):  # a sparse tensor has no order
            plain = plain_tensor(tensor.permute(*reversed(range(tensor.dim()))))
    return plain


def plain_tensor(tensor: Any, on_host: bool = False) -> PlainArray | None:
    """As `plain_array`, for a ``torch.Tensor`` in C's order on a GPU, or anywhere if ``on_host``."""
    if not (tensor.is_cuda or on_host) or not tensor.is_contiguous():
        return None
    dtype = tensor.dtype
    if tensor.requires_grad or tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        return None  # `read` refuses them
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a tensor without plain memory
        return None
    count = tensor.numel()
    if count and not pointer:  # as above: a DTensor has no memory of its own
        return None
    return pointer, count, (dtype, tensor.get_device())


def tensor_in_blocks(tensor: Any, splits: Sequence[int], blocks: int) -> PlainBlocks | None:
    """Return a tensor with blocks of ``splits`` rows, which follow each other; None unless it is plain, and has these.

    Without splits all blocks are equal. The function does not check whether splits are negative.
    """
    plain = plain_tensor(tensor)
    if plain is None:
        return None
    pointer, total, kind = plain
    dimensions = tensor.dim()
    rows = total if dimensions == 1 else tensor.shape[0] if dimensions else 1
    if not splits:
        counts: tuple[int, ...] = (total // blocks,) * blocks
        return None if rows % blocks else (pointer, total, (kind, None, "blocks"), counts, None)
    counts = tuple(splits)
    if sum(counts) != rows or len(counts) != blocks:
        return None
    if dimensions != 1:
        of_row = total // rows if rows else 0
        counts = tuple([count * of_row for count in counts])
    return pointer, total, (kind, None, "blocks"), counts, None


def tensors_in_blocks(tensors: Sequence[Any], *, receive: bool, on_host: bool = False) -> ListedBlocks | None:
    """Return the memory from the lowest of some tensors to the highest one, in which each tensor is a block.

    It may span several allocations, and only the blocks are read or written. The result is None unless all tensors are
    plain and of one kind, lie whole elements apart, and have elements. It is None if they receive and share memory.
    """
    pointers: list[int] = []
    counts: list[int] = []
    spans: list[tuple[int, int, int]] = []
    kind = None
    for tensor in tensors:
        plain = plain_tensor(tensor, on_host)
        if plain is None or plain[2] != (kind or plain[2]):
            return None
        pointer, count, kind = plain
        pointers.append(pointer)
        counts.append(count)
        if count:
            spans.append((pointer, pointer + count * kind[0].itemsize, len(counts)))
    if kind is None or not spans:
        return None
    if receive and any_overlap(spans):
        return None
    first, end, nbytes = min(spans)[0], max([end for _, end, _ in spans]), kind[0].itemsize
    offsets = [pointer - first if count else 0 for pointer, count in zip(pointers, counts, strict=True)]
    if any(offset % nbytes for offset in offsets):
        return None
    displs = tuple([offset // nbytes for offset in offsets])
    return first, (end - first) // nbytes, (kind, None, "blocks"), tuple(counts), displs


def _blocks(spec: Any, *, on_device: bool = False) -> PlainArray | PlainBlocks | None:
    """Return the blocks of a list as a vector call does, or None if the call may read the form in another way.

    ``on_device`` is whether counts may lie on a GPU, as `read_counted` reads them.
    """
    parts = parts_of(spec)
    if parts is None:
        return None
    array, counts, displs, datatype = parts
    cls = type(array)
    read: PlainArray | PlainBlocks | None
    if cls is _buffer:
        read = _at_address(array, datatype, all_of_it=counts is None)
    else:
        read = None if cls is list or cls is tuple else plain_array(array)
    if read is None or type(read[2]) is str:
        return None  # no array, or None, which is an empty buffer in a list with a datatype
    pointer, size, kind = read[:3]
    handle = None
    if datatype is not None:
        if cls is not _buffer and _predefined_nbytes(datatype) != array.itemsize:
            return _in_types(read, array.itemsize, counts, displs, datatype)
        handle = datatype.handle
    if counts is None and displs is None:
        return pointer, size, (kind, handle)
    if type(counts) is int and displs is None:
        return (pointer, counts, (kind, handle, "count")) if 0 <= counts <= size else None
    numbers = plain_integers(counts)
    if numbers is None:
        # A call with counts on a GPU takes another number of elements at an address.
        return _counted((pointer, size, (kind, handle)), counts, displs) if on_device and cls is not _buffer else None
    if displs is not None:
        displs = plain_integers(displs)
        if displs is None or len(numbers) != len(displs):
            return None
    # "blocks" tells this form from a list without counts, because a plan of the one does not fit the other.
    return pointer, size, (kind, handle, "blocks"), numbers, displs


def _counted(array: PlainArray, counts: Any, displs: Any) -> PlainBlocks | None:
    """Return blocks with counts on a GPU; None unless counts are a plain array, and displacements are plain, too."""
    numbers = _numbers(counts)
    if numbers is None:
        return None
    if type(displs) is int:  # the distance of the blocks
        displs = [displs * block for block in range(numbers[1][0])]
    places = (None, None) if displs is None else _numbers(displs)
    if places is None:
        return None
    pointer, size, kind = array
    return pointer, size, (*kind, numbers[1], places[1], "on a GPU"), numbers[0], places[0]


def _numbers(numbers: Any) -> tuple[Any, Any] | None:
    """Return integers and their number, or the address of a plain array and its number, type and device; else None."""
    if type(numbers) in _HOST_NUMBERS:
        known = plain_integers(numbers)
        return (known, len(known)) if known and min(known) >= -_TOO_LARGE and max(known) < _TOO_LARGE else None
    read = plain_array(numbers)
    return None if read is None or type(read[2]) is str else (read[0], read[1:])


def _in_types(array: Any, itemsize: int, counts: Any, displs: Any, datatypes: Any) -> PlainBlocks | None:
    """Return blocks in bytes; None unless each block has a count, a displacement and a datatype.

    If a datatype has gaps, the counts are as in the list, and the kind has the datatypes and the counts.
    """
    if type(datatypes) is not list and type(datatypes) is not tuple:
        return None
    counts, displs, sizes = plain_integers(counts), plain_integers(displs), [*map(type_key, datatypes)]
    if counts is None or displs is None or not len(counts) == len(displs) == len(sizes):
        return None
    nbytes = array[1] * itemsize
    if _INT.issuperset(map(type, sizes)):
        return array[0], nbytes, (array[2], None, "types"), tuple(map(mul, counts, sizes)), displs
    return None if None in sizes else (array[0], nbytes, (array[2], tuple(sizes), counts, "gaps"), counts, displs)


def type_key(datatype: Any) -> DatatypeLayout | int | None:
    """Return the bytes of a datatype if any number of its elements is one run of bytes; else its layout.

    The result is None for what is no datatype that MPI takes.
    """
    if type(datatype) is not _Datatype:
        return None
    # As `known_of`, without its call.
    kept = known.get(id(datatype))
    return kept.key if kept is not None and kept.handle == datatype.handle else known_of(datatype).key


def _predefined_nbytes(datatype: Any) -> int | None:
    """Return the bytes of a predefined datatype without gaps; None for all others."""
    return known_of(datatype).predefined_nbytes if type(datatype) is _Datatype else None


def _at_address(buffer: MPI.buffer, datatype: Any, *, all_of_it: bool) -> PlainArray | None:
    """Return the elements at an address: as many as the buffer has, or as its allocation has from there."""
    itemsize = _predefined_nbytes(datatype)
    place = place_of(buffer.address) if itemsize else None
    if not itemsize or place is None or place.managed:
        return None
    nbytes = buffer.nbytes if all_of_it or buffer.obj is not None else place.nbytes
    count, rest = divmod(nbytes, itemsize)
    return None if all_of_it and rest else (buffer.address, count, place.device)


def plain_integers(numbers: Any) -> tuple[int, ...] | None:
    """Return counts or displacements; None if they are no list, tuple or array of integers."""
    kind = type(numbers)
    if kind is list or kind is tuple:
        return tuple(numbers) if _INT.issuperset(map(type, numbers)) else None
    if kind is ndarray and numbers.dtype.kind in "iu" and numbers.ndim == 1:
        return tuple(numbers.tolist())
    return None


_PLAIN = frozenset((int, str, type(None)))  # types with values as keys; no subclasses, because bool is one of int
_INT, _HOST_NUMBERS = frozenset((int,)), frozenset((list, tuple, ndarray))
_TOO_LARGE = 1 << 63  # for 64 bits
_Datatype, _buffer = MPI.Datatype, MPI.buffer
_Reader = Callable[[Any], "PlainArray | PlainBlocks | None"]
_readers: dict[type, _Reader] = {
    list: _blocks,
    tuple: _blocks,
    type(None): _nothing,
    type(MPI.IN_PLACE): _nothing,
}


def of_library(library: str, name: str) -> Any:
    """Return a class of a library; None if the library is not imported, because then no object of it exists."""
    return getattr(sys.modules.get(library), name, None)


def _find(cls: type) -> _Reader | None:
    """Return the reader of a class, or None if its objects are no plain arrays. Objects of subclasses may be none."""
    readers = ("cupy", "ndarray", _cupy), ("torch", "Tensor", _torch), ("torch.nn", "Parameter", _torch)
    for library, name, read in readers:
        if cls is of_library(library, name):
            return _readers.setdefault(cls, read)
    return None
