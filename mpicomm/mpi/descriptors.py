"""Descriptors of buffer arguments on a GPU: address, counts, and a hashable kind, by which known calls are found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from operator import mul
from typing import Any

from mpi4py import MPI
from numpy import integer, ndarray

from mpicomm.devices.memory_location import locate
from mpicomm.mpi.buffers import any_overlap
from mpicomm.mpi.layout import DatatypeLayout, facts_of, known_facts
from mpicomm.mpi.spec import parts_of

ArrayDescriptor = tuple[int, int, Any]
"""The address of a contiguous array on a GPU, the number of its elements, and their type and device.

An argument without an array has no elements, and the name of its class in place of their type. It is no NamedTuple,
because an ordinary tuple takes a third of the time to make.
"""
BlocksDescriptor = tuple[int, int, Any, "tuple[int, ...] | int", "tuple[int, ...] | int | None"]
"""An `ArrayDescriptor` with the counts and displacements of blocks, in elements. Its kind also has the datatype.

The displacements are None if each block follows the block before. If each block has a datatype, counts and
displacements are in bytes. Counts on a GPU are given by their address, and the kind has their number and type. A kind
that ends with "gaps" has the keys of datatypes with gaps, and the counts; then only displacements are in bytes.
"""

ListedBlocks = tuple[int, int, Any, tuple[int, ...], tuple[int, ...]]
"""`BlocksDescriptor` with counts and displacements."""


def descriptor_of(argument: Any) -> ArrayDescriptor | BlocksDescriptor | None:
    """Describe a contiguous array of CuPy or PyTorch on a GPU, a list with one, ``MPI.IN_PLACE`` or None. Local.

    The result is None for all other arguments. A list of an array, counts, displacements and perhaps a predefined
    datatype is described by its blocks, and so is a list with a datatype for each block. The values of counts and
    displacements are not checked. A list with one count, or with only a datatype, is an array of so many elements. In
    lists with a datatype, an address of a GPU's memory may take the place of the array.
    """
    read = _readers.get(type(argument)) or _find(type(argument))
    return read(argument) if read else None


def buffer_key(argument: Any, *, counts_on_device: bool = False) -> ArrayDescriptor | BlocksDescriptor | None:
    """Return a key of a buffer argument, for the look-up of repeated calls. Local.

    It is the descriptor of the argument. A list without a descriptor has a key of all its items: `is_descriptor` is
    false for it, and it is found again only by equal items. The result is None if an item has no key. If
    ``counts_on_device``, counts and displacements may be contiguous arrays on a GPU.
    """
    cls = type(argument)
    if cls is not list and cls is not tuple:
        read = _readers.get(cls) or _find(cls)  # as `descriptor_of`, without one more call
        return read(argument) if read else None
    blocks = _blocks(argument, on_device=counts_on_device)
    if blocks is not None or not argument:
        return blocks
    array: Any = descriptor_of(argument[0])
    rest = None if array is None else items_key(tuple(argument[1:]), counts_on_device=counts_on_device)
    return None if rest is None else (*array[:2], (array[2:], "items"), rest, None)


def is_descriptor(key: ArrayDescriptor | BlocksDescriptor) -> bool:
    """Return whether a `buffer_key` is a descriptor, whose kind tells which blocks its numbers mean."""
    return type(key[2]) is not tuple or key[2][-1] != "items"


def items_key(items: Any, *, counts_on_device: bool = False) -> Hashable:
    """Return a key of counts, displacements and types as they are now; None if an item has no key.

    The key of a predefined datatype is its handle. That of a derived datatype is `type_key`, because MPI may reuse its
    handle for another one.
    """
    kind = type(items)
    if kind is list or kind is tuple:  # a list and a tuple mean different things
        if _VALUES.issuperset(map(type, items)):
            return kind, *items
        parts = tuple(items_key(part, counts_on_device=counts_on_device) for part in items)
        return None if None in parts else (kind, parts)
    if kind is ndarray:
        return (kind, items.dtype.str, items.shape, items.tobytes()) if items.dtype.kind in "iu" else None
    if kind is _Datatype:
        return (kind, items.handle) if items.is_predefined else type_key(items)
    if kind in _VALUES or isinstance(items, integer):
        return kind, items
    return descriptor_of(items) if counts_on_device else None


def has_count(descriptor: ArrayDescriptor | BlocksDescriptor) -> bool:
    """Return whether the caller passed one count: of the array, or of each block if the call has blocks."""
    return type(descriptor[2]) is tuple and descriptor[2][-1] == "count"


def _nothing(argument: Any) -> ArrayDescriptor:
    return 0, 0, type(argument).__name__


IN_PLACE, NOTHING = _nothing(MPI.IN_PLACE), _nothing(None)
"""The results of `descriptor_of` for ``MPI.IN_PLACE`` and None."""


def _cupy(array: Any) -> ArrayDescriptor | None:
    data = array.data
    # The public `array.flags` takes eight times as long.
    is_contiguous = array._c_contiguous or array._f_contiguous
    return (data.ptr, array.size, (array.dtype, data.device_id)) if is_contiguous else None


def _torch(tensor: Any) -> ArrayDescriptor | None:
    found = tensor_descriptor(tensor)
    if found is None and tensor.is_cuda and tensor.dim() > 1:  # Fortran's order is contiguous, too
        with suppress(RuntimeError):  # a sparse tensor has no order
            found = tensor_descriptor(tensor.permute(*reversed(range(tensor.dim()))))
    return found


def tensor_descriptor(tensor: Any, on_host: bool = False) -> ArrayDescriptor | None:
    """Describe a ``torch.Tensor`` in C's order on a GPU, or anywhere if ``on_host``; return None for all others."""
    if not (tensor.is_cuda or on_host) or not tensor.is_contiguous():
        return None
    dtype = tensor.dtype
    if tensor.requires_grad or tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        return None  # `read` refuses them
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a sparse tensor, for example
        return None
    count = tensor.numel()
    if count and not pointer:  # a DTensor has no memory of its own
        return None
    return pointer, count, (dtype, tensor.get_device())


def split_tensor_descriptor(tensor: Any, splits: Sequence[int], blocks: int) -> BlocksDescriptor | None:
    """Describe a tensor of consecutive blocks of ``splits`` rows; None if it has no descriptor, or other rows.

    Without splits all blocks are equal. Negative splits are not refused.
    """
    found = tensor_descriptor(tensor)
    if found is None:
        return None
    pointer, total, kind = found
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


def tensor_list_descriptor(tensors: Sequence[Any], *, receive: bool, on_host: bool = False) -> ListedBlocks | None:
    """Describe several tensors as the blocks of one buffer, from the lowest address to the highest one.

    The buffer may span several allocations, and only the blocks are read or written. The result is None unless all
    tensors have descriptors of one kind, lie whole elements apart, and any has elements. It is None if they receive
    and share memory.
    """
    pointers: list[int] = []
    counts: list[int] = []
    spans: list[tuple[int, int, int]] = []
    kind = None
    for tensor in tensors:
        found = tensor_descriptor(tensor, on_host)
        if found is None or found[2] != (kind or found[2]):
            return None
        pointer, count, kind = found
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


def _blocks(spec: Any, *, on_device: bool = False) -> ArrayDescriptor | BlocksDescriptor | None:
    """Describe a list as vector calls read it; None if another call may read it in another way.

    ``on_device`` is whether counts may lie on a GPU, as `read_device_counts` reads them.
    """
    parts = parts_of(spec)
    if parts is None:
        return None
    array, counts, displs, datatype = parts
    cls = type(array)
    read: ArrayDescriptor | BlocksDescriptor | None
    if cls is _buffer:
        read = _at_address(array, datatype, all_of_it=counts is None)
    else:
        read = None if cls is list or cls is tuple else descriptor_of(array)
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
    numbers = as_integers(counts)
    if numbers is None:
        # A call with counts on a GPU takes another number of elements at an address.
        if not on_device or cls is _buffer:
            return None
        return _with_device_counts((pointer, size, (kind, handle)), counts, displs)
    if displs is not None:
        displs = as_integers(displs)
        if displs is None or len(numbers) != len(displs):
            return None
    # Unlike a list without counts, it has "blocks" in its kind, because a plan of the one does not fit the other.
    return pointer, size, (kind, handle, "blocks"), numbers, displs


def _with_device_counts(array: ArrayDescriptor, counts: Any, displs: Any) -> BlocksDescriptor | None:
    """Describe blocks with counts on a GPU; None unless counts, and displacements on a GPU, are contiguous arrays."""
    numbers = _numbers(counts)
    if numbers is None:
        return None
    if type(displs) is int:  # the distance of the blocks
        displs = [displs * block for block in range(numbers[1][0])]
    starts = (None, None) if displs is None else _numbers(displs)
    if starts is None:
        return None
    pointer, size, kind = array
    return pointer, size, (*kind, numbers[1], starts[1], "on a GPU"), numbers[0], starts[0]


def _numbers(numbers: Any) -> tuple[Any, Any] | None:
    """Return integers and their number, or an array's address and its number, type and device; None for others."""
    if type(numbers) in _HOST_NUMBERS:
        host = as_integers(numbers)
        return (host, len(host)) if host and min(host) >= -_TOO_LARGE and max(host) < _TOO_LARGE else None
    read = descriptor_of(numbers)
    return None if read is None or type(read[2]) is str else (read[0], read[1:])


def _in_types(array: Any, itemsize: int, counts: Any, displs: Any, datatypes: Any) -> BlocksDescriptor | None:
    """Describe blocks with datatypes, in bytes; None unless each has a count, a displacement and a datatype.

    If a datatype has gaps, the counts are as in the list, and the kind has the datatypes and the counts.
    """
    if type(datatypes) is not list and type(datatypes) is not tuple:
        return None
    counts, displs, sizes = as_integers(counts), as_integers(displs), [*map(type_key, datatypes)]
    if counts is None or displs is None or not len(counts) == len(displs) == len(sizes):
        return None
    nbytes = array[1] * itemsize
    if _INT.issuperset(map(type, sizes)):
        return array[0], nbytes, (array[2], None, "types"), tuple(map(mul, counts, sizes)), displs
    return None if None in sizes else (array[0], nbytes, (array[2], tuple(sizes), counts, "gaps"), counts, displs)


def type_key(datatype: Any) -> DatatypeLayout | int | None:
    """Return the bytes of an element if consecutive elements of a datatype leave no gaps; else its layout.

    The result is None for DATATYPE_NULL, and for what is no datatype.
    """
    if type(datatype) is not _Datatype:
        return None
    # `facts_of`, inlined.
    kept = known_facts.get(id(datatype))
    return kept.key if kept is not None and kept.handle == datatype.handle else facts_of(datatype).key


def _predefined_nbytes(datatype: Any) -> int | None:
    """Return the bytes of a predefined datatype without gaps; None for all others."""
    return facts_of(datatype).predefined_nbytes if type(datatype) is _Datatype else None


def _at_address(buffer: MPI.buffer, datatype: Any, *, all_of_it: bool) -> ArrayDescriptor | None:
    """Describe the elements at an address: as many as the buffer has, or as its allocation has from there."""
    itemsize = _predefined_nbytes(datatype)
    location = locate(buffer.address) if itemsize else None
    if not itemsize or location is None or location.managed:
        return None
    nbytes = buffer.nbytes if all_of_it or buffer.obj is not None else location.nbytes
    count, rest = divmod(nbytes, itemsize)
    return None if all_of_it and rest else (buffer.address, count, location.device)


def as_integers(numbers: Any) -> tuple[int, ...] | None:
    """Return counts or displacements; None if they are no list, tuple or array of integers."""
    kind = type(numbers)
    if kind is list or kind is tuple:
        return tuple(numbers) if _INT.issuperset(map(type, numbers)) else None
    if kind is ndarray and numbers.dtype.kind in "iu" and numbers.ndim == 1:
        return tuple(numbers.tolist())
    return None


_VALUES = frozenset((int, str, type(None)))  # types with values as keys; no subclasses, because bool is one of int
_INT, _HOST_NUMBERS = frozenset((int,)), frozenset((list, tuple, ndarray))
_TOO_LARGE = 1 << 63  # for 64 bits
_Datatype, _buffer = MPI.Datatype, MPI.buffer
_Reader = Callable[[Any], "ArrayDescriptor | BlocksDescriptor | None"]
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
    """Return the reader of a class; None if it has none. A subclass has none: it may change what memory means."""
    readers = ("cupy", "ndarray", _cupy), ("torch", "Tensor", _torch), ("torch.nn", "Parameter", _torch)
    for library, name, read in readers:
        if cls is of_library(library, name):
            return _readers.setdefault(cls, read)
    return None
