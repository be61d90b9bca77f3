"""Hooks that record the calls of communicators, requests, windows, symmetric arrays and shared events.

The first object that records puts hooks into its class. A program that asks for no records runs without any hook.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi.arguments import parse
from mpicomm.mpi.device_counts import has_device_counts
from mpicomm.mpi.spec import Shape
from mpicomm.recording.record import Category, Record
from mpicomm.recording.tracer import Tracer
from mpicomm.symmetric.array import SymmetricArray
from mpicomm.symmetric.create import SharedEvent

_FLUSHED = ("Free", "Disconnect", "check")
"""Each of these calls flushes the trace file, so that earlier calls are in it even if the process is killed."""
_BUFFERS = ("buf", "sendbuf", "recvbuf", "src", "out", "origin", "result")
_PRODUCTS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")
_DETAILS = ("dest", "source", "root", "peer", "target_rank", "rank", "wire_dtype")
_ROWS: dict[str, Operation] = {name: row for row in OPERATIONS.values() for name in row.methods}
_COLLECTIVES = ("Barrier", *OPERATIONS)

CallKind = tuple[Category, bool]
"""The category of a call, and whether it is *numbered*: all ranks make such calls in one order."""


def _kinds(*rows: tuple[Category, bool, str]) -> dict[str, CallKind]:
    return {name: (category, numbered) for category, numbered, names in rows for name in names.split()}


OF_COMMUNICATORS = _kinds(
    ("collective", True, " ".join(f"{name} I{name.lower()} {name.lower()}" for name in _COLLECTIVES)),
    ("set-up", True, " ".join(f"{name}_init" for name in _COLLECTIVES)),
    ("message", False, "Send Ssend Bsend Rsend Recv Sendrecv Sendrecv_replace Probe Mprobe"),
    ("message", False, "Isend Issend Ibsend Irsend Irecv Isendrecv Isendrecv_replace"),
    ("message", False, "send ssend bsend recv sendrecv probe mprobe isend issend ibsend irecv"),
    ("set-up", False, "Send_init Ssend_init Bsend_init Rsend_init Recv_init Create_group check describe"),
    ("set-up", True, "Dup Dup_with_info Clone Idup Idup_with_info Create Split Split_type Create_cart Sub"),
    ("set-up", True, "Create_graph Create_dist_graph Create_dist_graph_adjacent Free Disconnect"),
    ("set-up", True, "empty zeros register shared_event"),
    ("collective", True, " ".join(_PRODUCTS)),
)
"""The methods of a communicator that are recorded, if the communicator has them."""
OF_ARRAYS = _kinds(("memory", False, "put get signal wait_signal"), ("set-up", True, "close"))
OF_EVENTS = _kinds(("memory", False, "record wait"), ("set-up", True, "close"))
OF_WINDOWS = _kinds(
    ("memory", False, "Put Get Rput Rget Accumulate Raccumulate Get_accumulate Rget_accumulate Fetch_and_op"),
    ("memory", False, "Compare_and_swap Post Start Complete Wait Test Lock Unlock Lock_all Unlock_all Flush Flush_all"),
    ("memory", False, "Flush_local Flush_local_all Sync"),
    ("memory", True, "Fence"),
    ("set-up", True, "Free"),
)
_TABLES = ((MPI.Comm, OF_COMMUNICATORS), (MPI.Win, OF_WINDOWS), (SymmetricArray, OF_ARRAYS), (SharedEvent, OF_EVENTS))

Facts = tuple[int | None, str, dict[str, Any]]
"""The bytes, the element type and further facts of a call, read from its arguments."""


def record_calls(called: Any, tracer: Tracer) -> None:
    """Let the methods of a communicator, window, array or event record their calls from now on. Local."""
    cls = type(called)
    table = next(table for base, table in _TABLES if issubclass(cls, base))
    _hook(cls, tuple(table), lambda name: _recorded(cls, name, *table[name]))
    called._tracer = tracer


def _hook(cls: Any, names: tuple[str, ...], hook: Callable[[str], Callable[..., Any]]) -> None:
    if "_tracer" not in vars(cls):
        cls._tracer = None
        for name in names:
            method = getattr(cls, name, None)
            if method is not None and not hasattr(method, "is_hook"):
                made: Any = functools.wraps(method)(hook(name))
                made.is_hook = True
                setattr(cls, name, made)


def _recorded(cls: Any, name: str, category: Category, numbered: bool) -> Callable[..., Any]:
    method = getattr(cls, name)
    facts_of = reader_of(name, method)
    owner = "Win" if issubclass(cls, MPI.Win) else cls.__name__
    operation = name if issubclass(cls, MPI.Comm) else f"{owner}.{name}"

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        tracer: Tracer | None = self._tracer
        if tracer is None:
            return method(self, *arguments, **keywords)
        nbytes, dtype, details = facts_of(self, arguments, keywords)
        facts: dict[str, Any] = {"nbytes": nbytes, "dtype": dtype, "details": details}
        try:
            with tracer.record(operation, category, numbered=numbered, **facts) as record:
                result = method(self, *arguments, **keywords)
        finally:
            if name in _FLUSHED:
                tracer.recorder.flush()
        if isinstance(result, MPI.Request):
            return _recorded_request(result, tracer, record)
        if isinstance(result, (SymmetricArray, SharedEvent)):
            record_calls(result, tracer)
        return result

    return call


def _recorded_request(request: MPI.Request, tracer: Tracer, started: Record) -> Any:
    original: Any = type(request)
    cls = _request_class(original)
    made: Any = request
    if not isinstance(request, cls):
        made = cls(request)
        made._original = request  # it owns MPI's buffers
    made._tracer, made._started, made._starts = tracer, started, 0
    return made


@functools.cache
def _request_class(cls: Any) -> Any:
    """Return a class of requests with hooks: a subclass if objects of the class take no attributes, as mpi4py's."""
    if not cls.__dictoffset__:
        cls = type(cls.__name__, (cls,), {"__doc__": cls.__doc__})
    _hook(cls, ("Wait", "wait", "Start"), functools.partial(_waiting, cls))
    return cls


def _waiting(cls: Any, name: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        tracer: Tracer | None = self._tracer
        if tracer is None:
            return method(self, *arguments, **keywords)
        started: Record = self._started
        category: Category = "wait"
        operation = name
        facts: dict[str, Any] = {"details": {"of": started.operation, "bytes": started.nbytes}}
        if name == "Start":
            self._starts += 1
            category = "collective" if started.number else "message"
            operation = f"{started.operation.removesuffix('_init')} Start"
            facts = {"nbytes": started.nbytes, "dtype": started.dtype}
        # All ranks have started the requests that they prepared together equally often.
        number = f"{started.number}.{self._starts}" if started.number and self._starts else started.number
        with tracer.record(operation, category, number=number, **facts):
            return method(self, *arguments, **keywords)

    return call


def reader_of(name: str, method: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Facts]:
    """Return a function that reads the facts of a call of a method. It raises nothing: the call reports all faults."""
    parameters = [*inspect.signature(method).parameters.values()][1:]
    names: tuple[str, ...] = ()  # the other methods take objects
    if name in _PRODUCTS:
        names = ("a",)
    elif name[0].isupper() or name in OF_ARRAYS:
        names = _BUFFERS
    buffers = [(position, each.name) for position, each in enumerate(parameters) if each.name in names]
    further = [(position, each.name, each.default) for position, each in enumerate(parameters) if each.name in _DETAILS]

    def facts_of(called: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Facts:
        details: dict[str, Any] = {}
        for position, argument, default in further:
            value = arguments[position] if position < len(arguments) else keywords.get(argument, default)
            if isinstance(value, int) and value >= 0:  # no wildcard
                details[argument] = value
            elif argument == "wire_dtype" and value is not None:
                details[argument] = str(value)
        if name == "get":  # it makes an array if the caller passes none
            return called.nbytes, str(called.dtype), details
        nbytes, dtype = None, ""
        for position, argument in buffers:
            buffer = arguments[position] if position < len(arguments) else keywords.get(argument)
            found = _size_of(name, argument, buffer, called)
            if found is not None:
                nbytes = max(nbytes or 0, found[0])
                dtype = dtype or found[1]
        return nbytes, dtype, details

    return facts_of


def _size_of(call: str, name: str, buffer: Any, called: Any) -> tuple[int, str] | None:
    """Return the bytes and the element type of a buffer argument; None if there is no buffer."""
    if buffer is None or buffer is MPI.IN_PLACE:
        return None
    nbytes, dtype = getattr(buffer, "nbytes", None), getattr(buffer, "dtype", None)
    if isinstance(nbytes, int) and dtype is not None:  # an array of any library, which only the call exports
        return nbytes, str(dtype).removeprefix("torch.")
    row, blocks = _ROWS.get(call), 1
    shape: Shape = "one" if row is None or name == "buf" else row.send if name == "sendbuf" else row.receive
    try:
        if shape == "vector" and has_device_counts(buffer):
            buffer, shape = buffer[0], "one"  # only the GPU knows the counts
        elif row is not None and shape != "one":
            blocks = len(called.inoutedges[name == "sendbuf"]) if row.of_neighbors else called.size
        operand = parse(buffer, shape=shape, blocks=blocks, writable=False, name=name)
    except Exception:  # the call reports the fault, unless it ignores the buffer
        return None
    of_mpi = operand.mpi_type  # only MPI knows the bytes of some datatypes
    named = of_mpi.name if operand.dtype is None and of_mpi else str(operand.dtype or "")
    return operand.packed_nbytes or (operand.total * of_mpi.Get_size() if of_mpi else 0), named
