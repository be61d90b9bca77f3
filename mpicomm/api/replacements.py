"""The methods of mpi4py that `install` replaces: they do not know a Communicator's requests, nor device arrays."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.buffers import array_of, read
from mpicomm.mpi.location import is_on_device
from mpicomm.mpi.requests import PersistentRequest

_waitall = MPI.Request.Waitall
_startall = MPI.Prequest.Startall
_attach = MPI.Attach_buffer
_detach = MPI.Detach_buffer
_NULL = MPI.REQUEST_NULL
_attached: list[Any] = []


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of the module or of a class of mpi4py; return what was there."""
    if not isinstance(owner, type):
        original = getattr(owner, name)
        setattr(owner, name, value)
        return original
    # Classes of extension modules refuse changes. A subclass in a class's place would not be the class of the objects
    # that mpi4py makes, and programs compare classes. So this changes the dictionary behind the class's read-only view.
    (attributes,) = gc.get_referents(owner.__dict__)
    original = attributes[name]
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # it clears the interpreter's cache of attributes
    return original


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced: the module or the class, the name, and the replacement."""
    yield MPI.Request, "Waitall", staticmethod(_wait_for_all)
    yield MPI.Prequest, "Startall", staticmethod(_start_all)
    yield MPI, "Attach_buffer", _attach_buffer
    yield MPI, "Detach_buffer", _detach_buffer
    for cls in (MPI.Win, MPI.File):
        for name in sorted(cls.__dict__):
            method = getattr(cls, name)
            if name[0].isupper() and callable(method) and (buffers := _buffers_of(method)):
                guarded = _guarded(method, f"{cls.__name__}.{name}", buffers)
                yield cls, name, guarded if inspect.ismethoddescriptor(method) else staticmethod(guarded)


def _wait_for_all(requests: Sequence[MPI.Request], statuses: Any = None) -> bool:
    """Wait for all requests; see mpi4py."""
    # MPICH ends a program that waits for an open generalized request beside a null one.
    if all(request != _NULL for request in requests):
        return _waitall(requests, statuses)
    if statuses is None:
        return _waitall([request for request in requests if request != _NULL])
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(requests) - len(statuses)))
    nulls = [request == _NULL for request in requests]
    for null in (True, False):
        places = [place for place, each in enumerate(nulls) if each is null]
        _waitall([requests[place] for place in places], [statuses[place] for place in places if place < len(statuses)])
    return True


def _start_all(requests: Sequence[MPI.Prequest]) -> None:
    """Start all requests; see mpi4py."""
    for request in requests:
        if isinstance(request, PersistentRequest):
            request.Start()
    _startall([request for request in requests if not isinstance(request, PersistentRequest)])


def _attach_buffer(buf: Any) -> None:
    """Attach a buffer for sends in buffered mode; see mpi4py. For device memory MPI gets host memory of its size."""
    if buf is None or isinstance(buf, int) or not is_on_device(buf):
        _attach(buf)
        return
    _attach(np.empty(read(array_of(buf), True, "buf").nbytes, np.uint8))
    _attached.append(buf)


def _detach_buffer() -> Any:
    """Remove the attached buffer; see mpi4py."""
    detached = _detach()
    return _attached.pop() if _attached else detached


def _buffers_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's buffer arguments, by mpi4py's annotations."""
    with contextlib.suppress(ValueError):
        parameters = inspect.signature(method).parameters.values()
        return tuple(each.name for each in parameters if "Buf" in str(each.annotation))
    return ()


def _guarded(method: Callable[..., Any], name: str, buffers: Sequence[str]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            given = signature.bind_partial(*arguments, **keywords).arguments
        except TypeError:
            return method(*arguments, **keywords)  # which says why
        for buffer in buffers:
            if is_on_device(given.get(buffer)):
                raise InvalidUsageError(
                    f"{name}: {buffer} lies in device memory, which MPI cannot access: copy it to the host, or use "
                    "comm.empty() for memory that all ranks of a node open"
                )
        return method(*arguments, **keywords)

    return call
