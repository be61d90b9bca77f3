"""Memory of NumPy, CuPy and PyTorch arrays, of buffers, and of DLPack and CUDA arrays: its address and its elements.

The location of the memory decides, not the class of the object. Arrays of CuPy and PyTorch and DLPack objects know
their device. For a buffer, a NumPy array around foreign memory and a CUDA array interface the driver is asked.

This module imports no array library, because a program that passes a tensor has imported PyTorch.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from array import array as standard_array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from mpicomm.devices import memory_location
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.errors import BufferRefusedError, UnknownElementsError


# The class is not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class ArrayMemory:
    """Contiguous memory of an object."""

    pointer: int
    nbytes: int
    dtype: np.dtype[Any] | None
    """None if the object does not name a type, or names a type that NumPy does not have."""
    on_device: bool = False
    device: int | None = None
    """The ordinal of the GPU; None on the host."""
    owner: Any = None
    """The object that keeps the memory alive."""
    by_address: bool = False
    """Whether the device memory is known only by its address, so that no library names the stream of later work."""
    room: int | None = None
    """The bytes that counts may reach; None for `nbytes`.

    ``MPI.memory.fromaddress(pointer, nbytes)`` gives an address. Some programs pass 0 bytes, others the bytes of the
    elements, which a datatype with gaps exceeds.
    """
    exported: MPI.buffer | None = None
    """The buffer for MPI in place of the object, which mpi4py refuses or would export again."""


NOWHERE = ArrayMemory(0, 0, None)
"""No memory."""

Reader = Callable[[Any, bool, str], ArrayMemory]

_readers: dict[type, Reader] = {ArrayMemory: lambda memory, writable, name: memory}
"""An `ArrayMemory` in place of an array names itself."""

_get_address = MPI.Get_address  # a tenth of the time of numpy.ndarray.ctypes

_UNKNOWN_NBYTES = 1 << 62
"""The capacity of host memory for which only an address is known."""

_DLPACK_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged


def read(array: Any, writable: bool, name: str) -> ArrayMemory:
    """Return the memory of ``array``, which is the argument ``name`` or part of it. Local.

    Raises `TypeError` for an object that is no buffer. Raises `InvalidUsageError` for memory that is not contiguous,
    for read-only memory if ``writable``, and for memory neither on the host nor on a CUDA device.
    """
    cls = type(array)
    reader = _readers.get(cls)
    if reader is None:
        reader = _readers[cls] = _read_other
        for module, attribute, of_library in (
            ("numpy", "ndarray", _read_numpy),
            ("cupy", "ndarray", _read_cupy),
            ("torch", "Tensor", _read_torch),
        ):
            base = getattr(sys.modules.get(module), attribute, None)
            if base is not None and issubclass(cls, base):
                reader = _readers[cls] = of_library
    return reader(array, writable, name)


_HOST_CLASSES = (bytes, bytearray, mmap.mmap, standard_array)
"""Classes with memory that always lies on the host."""


def is_host_view(a: ndarray[Any, Any]) -> bool:
    """Return whether a NumPy array with a ``base`` certainly lies in host memory. Local.

    NumPy has allocated the memory of arrays without a base.
    """
    base = a.base
    if (type(base) is ndarray and base.base is None) or not memory_location.has_driver():
        return True
    return not _by_address(base, _get_address(a))


def _by_address(owner: Any, pointer: int) -> memory_location.GpuLocation | None:
    """Return the location of device memory at ``pointer`` that MPI would take for host memory, else None."""
    while isinstance(owner, (ndarray, memoryview)):
        owner = owner.base if isinstance(owner, ndarray) else owner.obj
    if owner is None or isinstance(owner, _HOST_CLASSES):
        return None
    location = memory_location.locate(pointer)
    return None if location is None or location.managed else location


def _read_numpy(array: Any, writable: bool, name: str) -> ArrayMemory:
    flags = array.flags
    if not flags.forc:
        raise _in_pieces(array.shape, array.strides, name)
    if writable and not flags.writeable:
        raise _read_only(array, name)
    memory = _host_or_by_address(array, _get_address(array), array.nbytes, array.dtype, array.base)
    if not flags.aligned:  # NumPy gives such an array a format with "=", which mpi4py does not know
        memory.exported = MPI.buffer.frombuffer(array, readonly=not writable)
    return memory


def _host_or_by_address(buffer: Any, pointer: int, nbytes: int, dtype: np.dtype[Any] | None, owner: Any) -> ArrayMemory:
    """Return the memory of an object of the buffer protocol. ``owner`` tells whether it may be device memory."""
    location = None if owner is None else _by_address(owner, pointer)
    room = None
    if pointer and isinstance(buffer, MPI.buffer) and buffer.obj is None:
        room = _UNKNOWN_NBYTES if location is None else location.nbytes
    if location is None:
        return ArrayMemory(pointer, nbytes, dtype, False, None, buffer, room=room)
    return ArrayMemory(pointer, nbytes, dtype, True, location.device, buffer, by_address=True, room=room)


def _read_cupy(array: Any, writable: bool, name: str) -> ArrayMemory:
    if not array.flags.forc:
        raise _in_pieces(array.shape, array.strides, name)
    data = array.data
    return ArrayMemory(data.ptr, array.nbytes, array.dtype, True, data.device_id, array)


def _read_torch(tensor: Any, writable: bool, name: str) -> ArrayMemory:
    # PyTorch refuses to export these tensors through DLPack, because their bytes are not the numbers of the tensor.
    if tensor.requires_grad:
        raise InvalidUsageError(f"{name} is a tensor that requires a gradient: pass {name}.detach()")
    if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
        raise InvalidUsageError(
            f"{name} is a conjugate or negative view, and its memory holds other numbers than the view: pass "
            f"{name}.resolve_conj().resolve_neg()"
        )
    device = tensor.get_device() if tensor.is_cuda else None
    if device is None and not tensor.is_cpu:
        raise _elsewhere(tensor, str(tensor.device), name)
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:  # sparse tensors and others that are not in one piece
        raise InvalidUsageError(
            f"{name} is a tensor without plain memory ({tensor.layout}): pass a dense one ({error})"
        ) from error
    if not pointer and tensor.numel():
        raise without_memory(tensor, name)
    itemsize = tensor.element_size()
    if not (tensor.is_contiguous() or tensor.permute(*reversed(range(tensor.ndim))).is_contiguous()):
        raise _in_pieces(tensor.shape, [n * itemsize for n in tensor.stride()], name)
    dtype, nbytes = types.torch_dtype(tensor.dtype), tensor.numel() * itemsize
    memory = ArrayMemory(pointer, nbytes, dtype, device is not None, device, tensor)
    if not nbytes and device is None:  # mpi4py 4.1 takes the strides of some empty slices for gaps
        memory.exported = MPI.buffer.fromaddress(pointer, 0)
    return memory


def without_memory(tensor: Any, name: str) -> InvalidUsageError:
    """Return the error for a tensor around other tensors, such as a DTensor, whose address is 0."""
    return InvalidUsageError(
        f"{name} is a {_class(tensor)}, which has no memory of its own: pass the tensor in it, {name}.to_local() of a "
        "DTensor"
    )


def _read_other(array: Any, writable: bool, name: str) -> ArrayMemory:
    if array is MPI.IN_PLACE or array is MPI.BOTTOM:  # both export an empty buffer, but mean something else
        raise InvalidUsageError(f"{name}={array!r} alone has no meaning here: pass a buffer")
    view = _view_of(array)
    if view is not None:
        return _read_view(array, view, writable, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack(array, writable, name)
    if hasattr(array, "__cuda_array_interface__"):
        return _read_interface(array, writable, name)
    raise TypeError(
        f"{name} is a {_class(array)}, which has neither the buffer protocol nor DLPack nor a CUDA array interface: "
        "pass an array, or a list [array, count, type]"
    )


def _view_of(array: Any) -> memoryview | None:
    # The exception goes with this frame. If it stayed, it would keep the caller's frame, and so the array, in a cycle.
    try:
        return memoryview(array)
    except (TypeError, BufferError, ValueError, RuntimeError):
        return None


def _read_view(array: Any, view: memoryview, writable: bool, name: str) -> ArrayMemory:
    if not view.contiguous:
        raise _in_pieces(view.shape, view.strides, name)
    if writable and view.readonly:
        raise _read_only(array, name)
    dtype = None
    with contextlib.suppress(ValueError):  # MPI has no type for the format or byte order, so the caller must name one
        dtype, _ = types.from_code(view.format.lstrip("@=<" if sys.byteorder == "little" else "@=>"))
    memory = _host_or_by_address(array, _get_address(array), view.nbytes, dtype, array)
    if dtype is not None and view.format.startswith("="):  # as in JAX's arrays; mpi4py does not know this character
        memory.dtype = np.dtype(f"{dtype.kind}{view.itemsize}")  # a long has 4 bytes there
        memory.exported = MPI.buffer.frombuffer(array, readonly=not writable)
    return memory


def _read_dlpack(array: Any, writable: bool, name: str) -> ArrayMemory:
    try:
        kind, device = (int(n) for n in array.__dlpack_device__())
    except Exception as error:  # the export of another library may raise any class
        raise _unreadable(array, "DLPack", name, error) from error
    if kind not in _DLPACK_HOST + _DLPACK_GPU:
        raise _elsewhere(array, f"a device of DLPack's type {kind}", name)
    # mpi4py's export asks for no synchronisation, because stream= orders the call.
    try:
        buffer = _exported(array, writable, "DLPack", name)
    except BufferRefusedError as refusal:
        # mpi4py takes a capsule of DLPack's first version only from an object that knows no later one. JAX knows both
        # versions and exports the first one.
        unversioned = SimpleNamespace(
            __dlpack_device__=array.__dlpack_device__, __dlpack__=lambda stream=None: array.__dlpack__(stream=stream)
        )
        try:
            buffer = MPI.buffer.frombuffer(unversioned, readonly=not writable)
        except Exception:
            raise refusal from refusal.__cause__
    # As for a CUDA array interface, the driver knows better. Empty memory has no address to ask for.
    on_device = kind in _DLPACK_GPU and memory_location.has_driver()
    if on_device and buffer.nbytes:
        on_device = memory_location.locate(buffer.address) is not None
    ordinal = device if on_device else None
    dtype = _own_dtype(array, kind)
    return ArrayMemory(buffer.address, buffer.nbytes, dtype, on_device, ordinal, buffer, exported=buffer)


def _exported(array: Any, writable: bool, protocol: str, name: str) -> MPI.buffer:
    """Return the memory that ``array`` exports. mpi4py checks and reads it once, and the buffer keeps it alive."""
    try:
        return MPI.buffer.frombuffer(array, readonly=not writable)
    except Warning:  # the program has asked for exceptions
        raise
    except Exception as error:
        raise _unreadable(array, protocol, name, error) from error


def _unreadable(array: Any, protocol: str, name: str, error: Exception) -> Exception:
    # The error has mpi4py's class: TypeError for an object that does not follow the protocol, KeyError for an interface
    # that lacks a field, BufferError for others.
    named: type[Exception] = UnknownElementsError if isinstance(error, KeyError) else BufferRefusedError
    cls = TypeError if isinstance(error, TypeError) else named
    way_out = "pass a contiguous array without a mask, which is writable if it receives"
    return cls(f"{name} is a {_class(array)} that cannot be read through {protocol} ({error}): {way_out}")


def _own_dtype(array: Any, kind: int) -> np.dtype[Any] | None:
    dtype = getattr(array, "dtype", None)
    try:
        own: np.dtype[Any] | None = None if dtype is None else np.dtype(dtype)
    except TypeError:
        name = str(dtype).rpartition(".")[2]
        return types.covered_dtype(name) if name in types.COVERED else None
    if own is not None and own.subdtype is None:
        return own
    # Warp's vectors have subarrays as types. A vector of float16 names integers, because ctypes has no float16.
    if hasattr(array, "__cuda_array_interface__"):
        return types.interface_dtype(array.__cuda_array_interface__["typestr"], array)
    library: Any = np if kind in _DLPACK_HOST else sys.modules.get("cupy")
    try:
        return library.from_dlpack(array).dtype  # type: ignore[no-any-return]
    except Exception:  # of any class: NumPy takes no long doubles from DLPack, so the caller must name their type
        return None


def _read_interface(array: Any, writable: bool, name: str) -> ArrayMemory:
    buffer = _exported(array, writable, "__cuda_array_interface__", name)
    interface = array.__cuda_array_interface__
    dtype = types.interface_dtype(interface["typestr"], array)
    pointer = buffer.address
    location = memory_location.locate(pointer) if pointer else None
    # Empty memory has no address to ask for, so the class decides. In a process with GPUs it is a device array.
    on_device = location is not None or (not pointer and memory_location.has_driver())
    device = None if location is None else location.device
    return ArrayMemory(pointer, buffer.nbytes, dtype, on_device, device, array, exported=buffer)


def _in_pieces(shape: Any, strides: Any, name: str) -> BufferRefusedError:
    return BufferRefusedError(
        f"{name} of shape {tuple(shape)} with strides {tuple(strides)} is neither C- nor Fortran-contiguous: copy it "
        "first (numpy.ascontiguousarray, cupy.ascontiguousarray, tensor.contiguous()), or describe it with a datatype"
    )


def _read_only(array: Any, name: str) -> BufferRefusedError:
    return BufferRefusedError(f"{name} is a {_class(array)} that is read-only: pass a writable one")


def _elsewhere(array: Any, location: str, name: str) -> BufferRefusedError:
    return BufferRefusedError(f"{name} is a {_class(array)} on {location}: pass one in host memory or on a CUDA device")


def _class(array: Any) -> str:
    cls = type(array)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def read_in_order(array: Any, writable: bool, name: str) -> ArrayMemory:
    """As `read`, for an array whose elements lie in C order. Raises `InvalidUsageError` for all other objects."""
    if not hasattr(array, "shape"):
        raise InvalidUsageError(f"{name} is a {_class(array)}: pass an array of NumPy, CuPy or PyTorch")
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidUsageError(f"{name} is a masked array, and a mask does not travel: pass {name}.filled()")
    memory, flags = read(array, writable, name), getattr(array, "flags", None)
    if not (array.is_contiguous() if hasattr(array, "is_contiguous") else flags is None or flags.c_contiguous):
        raise InvalidUsageError(
            f"{name} of shape {tuple(array.shape)} is not C-contiguous: pass numpy.ascontiguousarray({name}), "
            f"cupy.ascontiguousarray({name}) or {name}.contiguous()"
        )
    return memory


def new_array(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None, *, on_device: bool) -> Any:
    """Return a new array of the library of ``like``, on the same device. Other libraries than PyTorch get CuPy's.

    None as ``dtype`` is that of ``like``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        of_torch = like.dtype if dtype is None else getattr(torch, types.name_of(dtype))
        return torch.empty(shape, dtype=of_torch, device=like.device)
    dtype = like.dtype if dtype is None else dtype
    if not on_device:
        return np.empty(shape, dtype)
    # The backend of a GPU has imported CuPy, which has no fp8.
    return sys.modules["cupy"].empty(shape, dtype if types.name_of(dtype) != "float8_e4m3fn" else np.uint8)


def array_of(spec: Any) -> Any:
    """Return the array of a buffer argument, which may be a list of array, counts and type."""
    return spec[0] if isinstance(spec, (list, tuple)) and spec else spec


def any_overlap(ranges: Iterable[tuple[int, int, int]]) -> bool:
    """Return whether two ranges of bytes with different owners share a byte.

    A range is its first byte, the byte after its last, and its owner. Known calls come here.
    """
    last_end = last_owner = -1
    for begin, end, owner in sorted(ranges):
        if begin < end:  # an empty range may lie anywhere
            if begin < last_end and owner != last_owner:
                return True
            last_owner = owner
            if end > last_end:
                last_end = end
    return False
