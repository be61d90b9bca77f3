"""The calls that are recorded, and the facts of a call that its arguments tell."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.operations import OPERATIONS, Operation, Shape
from mpicomm.mpi.arguments import Operand, parse, parse_typed, parse_vector
from mpicomm.mpi.device_counts import has_device_counts
from mpicomm.recording.record import Category

_BUFFERS = ("buf", "sendbuf", "recvbuf", "src", "out", "origin", "result")
_PRODUCTS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")
_DETAILS = ("dest", "source", "root", "peer", "target_rank", "rank", "wire_dtype")
_ROWS: dict[str, Operation] = {name: row for row in OPERATIONS.values() for name in row.methods}
_COLLECTIVES = ("Barrier", *OPERATIONS)

Kind = tuple[Category, bool]
"""The category of a call, and whether it is *numbered*: all ranks make such calls in one order."""

_TABLE: tuple[tuple[Category, bool, str], ...] = (
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
OF_COMMUNICATORS: dict[str, Kind] = {
    name: (category, numbered) for category, numbered, names in _TABLE for name in names.split()
}
"""The methods of a communicator that are recorded, if the communicator has them."""
OF_ARRAYS: dict[str, Kind] = {
    **dict.fromkeys(("put", "get", "signal", "wait_signal"), ("memory", False)),
    "close": ("set-up", True),
}
OF_EVENTS: dict[str, Kind] = {**dict.fromkeys(("record", "wait"), ("memory", False)), "close": ("set-up", True)}
_LOCAL = (
    "Put Get Rput Rget Accumulate Raccumulate Get_accumulate Rget_accumulate Fetch_and_op Compare_and_swap Post Start "
    "Complete Wait Test Lock Unlock Lock_all Unlock_all Flush Flush_all Flush_local Flush_local_all Sync"
)
OF_WINDOWS: dict[str, Kind] = {
    **dict.fromkeys(_LOCAL.split(), ("memory", False)),
    "Fence": ("memory", True),
    "Free": ("set-up", True),
}


@dataclass(frozen=True)
class MethodSignature:
    """The arguments of a method by position, name and default."""

    name: str
    buffers: tuple[tuple[int, str], ...]
    details: tuple[tuple[int, str, Any], ...]

    @classmethod
    def of(cls, name: str, method: Callable[..., Any]) -> MethodSignature:
        """Return the signature of a method, whose first argument is the object."""
        try:
            parameters = [*inspect.signature(method).parameters.values()][1:]
        except ValueError:  # a method of C that does not tell its arguments
            parameters = []
        places = list(enumerate(parameters))
        buffers: tuple[str, ...] = ()  # the other methods take objects
        if name in _PRODUCTS:
            buffers = ("a",)
        elif name[0].isupper() or name in OF_ARRAYS:
            buffers = _BUFFERS
        return cls(
            name,
            tuple((place, each.name) for place, each in places if each.name in buffers),
            tuple((place, each.name, each.default) for place, each in places if each.name in _DETAILS),
        )

    def facts(self, called: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> CallFacts:
        """Return the facts of a call that its arguments tell. It raises nothing: the call reports all faults."""
        details: dict[str, Any] = {}
        for place, name, default in self.details:
            value = arguments[place] if place < len(arguments) else keywords.get(name, default)
            if isinstance(value, int) and value >= 0:  # no wildcard
                details[name] = value
            elif name == "wire_dtype" and value is not None:
                details[name] = str(value)
        nbytes, dtype = None, ""
        for place, name in self.buffers:
            buffer = arguments[place] if place < len(arguments) else keywords.get(name)
            found = _size_of(self.name, name, buffer, called)
            if found is not None:
                nbytes = max(nbytes or 0, found[0])
                dtype = dtype or found[1]
        if self.name == "get":  # it makes an array if the caller passes none
            nbytes, dtype = called.nbytes, str(called.dtype)
        return CallFacts(nbytes, dtype, details)


@dataclass(frozen=True)
class CallFacts:
    """The facts of a call for its record."""

    nbytes: int | None
    dtype: str
    details: dict[str, Any]


def _size_of(call: str, name: str, buffer: Any, called: Any) -> tuple[int, str] | None:
    """Return the bytes and the element type of a buffer argument; None if there is no buffer."""
    if buffer is None or buffer is MPI.IN_PLACE:
        return None
    nbytes, dtype = getattr(buffer, "nbytes", None), getattr(buffer, "dtype", None)
    if isinstance(nbytes, int) and dtype is not None:  # an array of any library, which only the call exports
        return nbytes, _type_name(dtype)
    try:
        operand = _parse(call, name, buffer, called)
    except Exception:  # the call reports the fault, unless it ignores the buffer
        return None
    named = operand.mpi_type.name if operand.dtype is None and operand.mpi_type else str(operand.dtype or "")
    return operand.packed_nbytes or _nbytes_by_mpi(operand), named


@functools.lru_cache
def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")  # NumPy takes a microsecond for the text


def _parse(call: str, name: str, buffer: Any, called: Any) -> Operand:
    row = _ROWS.get(call)
    shape: Shape = "one"
    if row is not None and name != "buf":
        shape = row.send if name == "sendbuf" else row.receive
    if shape == "vector" and has_device_counts(buffer):
        return parse(buffer[0], writable=False, name=name)  # only the GPU knows the counts
    if shape in ("vector", "typed"):
        size = called.size
        if row is not None and row.of_neighbors:
            size = len(called.inoutedges[name == "sendbuf"])
        read = parse_typed if shape == "typed" else parse_vector
        return read(buffer, size=size, writable=False, name=name)
    blocks = called.size if shape == "blocks" and row is not None and not row.of_neighbors else None
    return parse(buffer, blocks=blocks, writable=False, name=name)


def _nbytes_by_mpi(operand: Operand) -> int:
    """Return the bytes of elements of a datatype that only MPI knows."""
    return 0 if operand.mpi_type is None else operand.total * operand.mpi_type.Get_size()
