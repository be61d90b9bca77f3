"""The parts of DLPack that mpi4py does not read: the type of the elements, and capsules of the first version."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mpicomm.mpi import types

_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}  # of DLDataTypeCode
_BFLOAT = 4
_CPU = 1

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Unversioned:
    """An object that exports ``array`` by the first version of DLPack.

    mpi4py takes such a capsule only from an object that knows no later version. JAX knows both versions and exports the
    first one.
    """

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **stream: int) -> Any:
        if not stream.keys() <= {"stream"}:
            raise TypeError("the first version of DLPack has no other argument than stream")
        return self._array.__dlpack__(**stream)


class _Tensor(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


def exported_dtype(array: Any, kind: int) -> np.dtype[Any] | None:
    """Return the type of the elements that ``array`` exports, or None for a type that NumPy does not have. Local.

    It exports the array once more, and drops the export. ``kind`` is DLPack's number of the type of the array's device.
    """
    capsule = array.__dlpack__() if kind == _CPU else array.__dlpack__(stream=-1)  # without an order of streams
    tensor = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    if tensor.lanes != 1:
        return None
    if tensor.code == _BFLOAT:
        return types.covered_dtype("bfloat16") if tensor.bits == 16 else None
    try:
        return np.dtype(f"{_KINDS[tensor.code]}{tensor.bits // 8}")
    except (KeyError, TypeError):
        return None
