"""Subclasses with methods that record: of communicators, requests, windows, symmetric arrays and shared events.

An object gets a subclass of its class, like a freed communicator (`mpicomm.api.freed`). So programs that ask for its
class find the same class, and objects without records ask nothing in each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.observation.calls import OF_ARRAYS, OF_COMMUNICATORS, OF_EVENTS, OF_WINDOWS, Kind, MethodSignature
from mpicomm.recording.channel import Channel
from mpicomm.recording.record import Category, Record
from mpicomm.symmetric.array import SymmetricArray
from mpicomm.symmetric.events import SharedEvent

_FLUSHED = ("Free", "Disconnect", "check")
"""Each of these calls writes all earlier calls to the trace file, so that they outlive the process."""


def record_calls(called: Any, channel: Channel) -> None:
    """Let the methods of a communicator, window, array or event record their calls from now on. Local."""
    cls: Any = type(called)
    if not hasattr(cls, "_channel"):
        called.__class__ = _subclass(cls)
    called._channel = channel


def _recorded_request(request: MPI.Request, channel: Channel, started: Record) -> Any:
    """Return a request whose waits and starts are recorded like the call that has made it."""
    original: Any = type(request)
    cls = _request_class(original)
    try:
        made: Any = request
        made.__class__ = cls
    except TypeError:  # classes of mpi4py itself; the new object keeps the old one, which owns MPI's buffers
        made = cls(request)
        made._original = request
    made._channel, made._call, made._nbytes = channel, started.operation, started.nbytes
    made._dtype = started.dtype
    made._number, made._starts = started.number, 0
    return made


@functools.cache
def _subclass(cls: Any) -> Any:
    table: dict[str, Kind]
    if issubclass(cls, MPI.Comm):
        table = OF_COMMUNICATORS
    elif issubclass(cls, MPI.Win):
        table = OF_WINDOWS
    else:
        table = OF_ARRAYS if issubclass(cls, SymmetricArray) else OF_EVENTS
    methods = {name: _recorded(cls, name, *table[name]) for name in table if hasattr(cls, name)}
    return type(cls.__name__, (cls,), {**methods, "_channel": None, "__doc__": cls.__doc__})


def _recorded(cls: Any, name: str, category: Category, numbered: bool) -> Callable[..., Any]:
    method = getattr(cls, name)
    signature = MethodSignature.of(name, method)
    owner = "Win" if issubclass(cls, MPI.Win) else cls.__name__
    operation = name if issubclass(cls, MPI.Comm) else f"{owner}.{name}"

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        channel: Channel = self._channel
        facts = signature.facts(self, arguments, keywords)
        record = channel.begin(
            operation, category, numbered=numbered, nbytes=facts.nbytes, dtype=facts.dtype, details=facts.details
        )
        try:
            result = method(self, *arguments, **keywords)
        except BaseException as error:
            record.error = type(error).__name__
            raise
        finally:
            channel.end(record)
            if name in _FLUSHED:
                channel.flush()
        return _result(result, channel, record)

    return call


def _result(result: Any, channel: Channel, record: Record) -> Any:
    """Return the result of a call, so that calls on the result are recorded, too."""
    if isinstance(result, MPI.Request):
        return _recorded_request(result, channel, record)
    if isinstance(result, (SymmetricArray, SharedEvent)):
        record_calls(result, channel)
    return result


@functools.cache
def _request_class(cls: Any) -> Any:
    methods = {name: _waiting(cls, name) for name in ("Wait", "wait", "Start") if hasattr(cls, name)}
    return type(cls.__name__, (cls,), {**methods, "__doc__": cls.__doc__})


def _waiting(cls: Any, name: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        channel: Channel = self._channel
        if name == "Start":
            self._starts += 1
            category: Category = "collective" if self._number else "message"
            operation = f"{self._call.removesuffix('_init')} Start"
            record = channel.begin(operation, category, nbytes=self._nbytes, dtype=self._dtype)
        else:
            record = channel.begin(name, "wait", details={"of": self._call, "bytes": self._nbytes})
        # All ranks have started the requests that they prepared together equally often.
        record.number = f"{self._number}.{self._starts}" if self._number and self._starts else self._number
        try:
            return method(self, *arguments, **keywords)
        except BaseException as error:
            record.error = type(error).__name__
            raise
        finally:
            channel.end(record)

    return call
