"""The keys of arguments of a call, by which `PlanCache` finds the call again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.mpi.layout import layout_of
from mpicomm.mpi.plain_arrays import plain_array

_PLAIN = frozenset((int, str, type(None)))  # types with values as keys; no subclasses, because bool is one of int


def identify_cupy(array: Any) -> Hashable:
    """Return the key of an array of CuPy."""
    return plain_array(array) or (array.data.ptr, array.size, array.dtype, array.shape, array.strides)


def identify_torch(tensor: Any) -> Hashable:
    """Return the key of a tensor; None if `PlanCache` cannot recognise it."""
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


def identify_said(said: Any, arrays: Callable[[Any], Hashable] | None = None) -> Hashable:
    """Return the key of counts, displacements and types as they are now; None if the cache cannot recognise them.

    ``arrays`` is as in `PlanCache.identity_of`.
    """
    kind = type(said)
    if kind is list or kind is tuple:  # a list and a tuple mean different things
        if _PLAIN.issuperset(map(type, said)):
            return kind, *said
        parts = tuple(identify_said(part, arrays) for part in said)
        return None if None in parts else (kind, parts)
    if kind is np.ndarray:
        return (kind, said.dtype.str, said.shape, said.tobytes()) if said.dtype.kind in "iu" else None
    if kind is MPI.Datatype:
        return (kind, said.handle) if said.is_predefined else layout_of(said)
    if kind in _PLAIN or isinstance(said, np.integer):
        return kind, said
    return None if arrays is None else arrays(said)
