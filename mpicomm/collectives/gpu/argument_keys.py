"""ArgumentKeys: recognises the arguments of a call on device arrays by their memory and their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.mpi.layout import layout_of
from mpicomm.mpi.plain_arrays import plain_array

_PLAIN = frozenset((int, str, type(None)))  # types with values as keys; no subclasses, because bool is one of int


class ArgumentKeys:
    """The keys of buffer arguments. Two arguments with one key mean the same memory, counts and types."""

    def __init__(self) -> None:
        self._identify: dict[type, Callable[[Any], Hashable]] = {
            type(None): id,
            type(MPI.IN_PLACE): id,
            of_library("cupy", "ndarray"): _identify_cupy,
        }

    def identity_of(self, argument: Any) -> Hashable:
        """Return the key of a buffer argument; None if the cache cannot recognise it."""
        if type(argument) in (list, tuple) and argument:
            array, length = self.identity_of(argument[0]), len(argument)
            said = None if array is None else identity_of_said(argument[1] if length == 2 else tuple(argument[1:]))
            return None if said is None else (array, length, said)
        identify = self._identify.get(type(argument)) or self._find(type(argument))
        return None if identify is None else identify(argument)

    def _find(self, array: type) -> Callable[[Any], Hashable] | None:
        if array is of_library("torch", "Tensor"):
            self._identify[array] = _identify_torch
        return self._identify.get(array)


def of_library(library: str, name: str) -> Any:
    """Return a class of a library; None if the library is not imported, because then no object of it exists."""
    return getattr(sys.modules.get(library), name, None)


def _identify_cupy(array: Any) -> Hashable:
    return plain_array(array) or (array.data.ptr, array.size, array.dtype, array.shape, array.strides)


def _identify_torch(tensor: Any) -> Hashable:
    plain = plain_array(tensor)
    if plain is not None or not tensor.is_cuda:  # empty tensors on the host and on a GPU have the same address
        return plain
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a sparse tensor, for example; `read` refuses it
        return None
    # The key marks views that `read` refuses, because their memory may be the memory of another tensor in a known call.
    refused = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return pointer, tensor.numel(), tensor.dtype, tensor.shape, tensor.stride(), refused


def identity_of_said(said: Any) -> Hashable:
    """Return the key of counts, displacements and types as they are now; None if the cache cannot recognise them."""
    kind = type(said)
    if kind is list or kind is tuple:  # a list and a tuple mean different things
        if _PLAIN.issuperset(map(type, said)):
            return kind, *said
        parts = tuple(map(identity_of_said, said))
        return None if None in parts else (kind, parts)
    if kind is np.ndarray:
        return (kind, said.dtype.str, said.shape, said.tobytes()) if said.dtype.kind in "iu" else None
    if kind is MPI.Datatype:
        return (kind, said.handle) if said.is_predefined else layout_of(said)
    return (kind, said) if kind in _PLAIN or isinstance(said, np.integer) else None
