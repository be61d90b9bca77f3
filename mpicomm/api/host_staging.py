"""MPI's own calls on device arrays: they go through pinned host copies, because MPI gets no device pointer.

The tables below name mpi4py's methods that take buffers, and the methods that make communicators or matched messages.

`HostStaging` wraps the methods of a Communicator that the package does not implement. Intercommunicators, the
communicators made from them, and matched messages are mpi4py's own objects. `wrap` turns each of them into an object of
a subclass with wrapped methods. The object has the GPU of the Communicator that it comes from.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.operations import BCAST, OPERATIONS
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import host_calls
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.host_calls import BY_MPI, HostCopies, announce, require_no_graph
from mpicomm.mpi.location import is_on_device
from mpicomm.mpi.partitioned import PartitionedRequest
from mpicomm.mpi.request_lists import holding, replace
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest
from mpicomm.mpi.spec import require_host_addresses

Places = tuple[tuple[int, str], ...]
"""The buffers among the arguments of a method: the position and the name of each."""

Gpu = Callable[[str], GpuBackend]
"""A function that returns this rank's GPU for an operation.

It raises `InvalidUsageError` for a communicator on the cpu.
"""

_BUF: Places = ((0, "buf"),)
_SEND_AND_RECEIVE: Places = ((0, "sendbuf"), (1, "recvbuf"))
_EXCHANGE = ((0, "sendbuf"), (3, "recvbuf"))
_FLAG = ((0, "flag"),)

# One table serves all classes, because a method has the same buffers in each class that has it.
BUFFERS: dict[str, Places] = {
    name: places
    for places, names in (
        (_BUF, "Send Ssend Bsend Rsend Recv Sendrecv_replace Attach_buffer"),
        (_BUF, "Isend Issend Ibsend Irsend Irecv Isendrecv_replace"),
        (_BUF, "Send_init Ssend_init Bsend_init Rsend_init Recv_init Psend_init Precv_init"),
        (_EXCHANGE, "Sendrecv Isendrecv"),
        (_FLAG, "Iagree"),
    )
    for name in names.split()
} | {name: _BUF if row.rooted == "bcast" else _SEND_AND_RECEIVE for row in OPERATIONS.values() for name in row.methods}

# These methods return a communicator or a message, or a tuple with one.
MAKERS = frozenset((
    "Accept", "Clone", "Connect", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent",
    "Create_graph", "Create_group", "Create_intercomm", "Dup", "Dup_with_info", "Idup", "Idup_with_info", "Improbe",
    "Ishrink", "Merge", "Mprobe", "Shrink", "Spawn", "Spawn_multiple", "Split", "Split_type", "Sub",
))  # fmt: skip


_RECEIVE_BUFFERS = ("recvbuf", "inoutbuf", "outbuf")
_RECEIVE_INTO_BUF = frozenset((
    "Recv", "Irecv", "Recv_init", "Sendrecv_replace", "Isendrecv_replace", *BCAST.methods,
))  # fmt: skip
_HOST_ALONE = frozenset(("Attach_buffer", "Iagree"))
"""Methods with memory that MPI uses after the call, so that host copies cannot stand for it."""


class Wrapped:
    """The marker of the subclasses of mpi4py's classes with wrapped methods."""

    _gpu: Gpu


def wrap(result: Any, gpu: Gpu) -> Any:
    """Return a wrapped object for a communicator or message of mpi4py, also in a tuple.

    Return all other objects as they are.
    """
    if isinstance(result, tuple):
        return tuple(wrap(each, gpu) for each in result)
    if isinstance(result, Wrapped):  # also if MPI has not finished the duplicate of Idup
        result._gpu = gpu
        return result
    if not isinstance(result, (MPI.Comm, MPI.Message)) or isinstance(result, HostStaging) or result == MPI.COMM_NULL:
        return result
    cls: type = type(result)
    wrapped = _wrapped_class(cls)(result)
    wrapped._gpu = gpu
    return wrapped


@functools.cache
def _wrapped_class(cls: type) -> Callable[[Any], Any]:
    return type(cls.__name__, (Wrapped, cls), {**wrapped_methods(cls), "__doc__": cls.__doc__})


def wrapped_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the wrapped methods of the table that ``cls`` has. The version of MPI decides which methods these are."""
    made: dict[str, Callable[..., Any]] = {}
    for name in (*BUFFERS, *MAKERS):
        method = getattr(cls, name, None)
        if method is not None:
            if issubclass(cls, MPI.Message) and name in BUFFERS:
                method = _receiving_bytes(method)
            made[name] = _wrapped_maker(method) if name in MAKERS else _wrapped_call(cls, method, BUFFERS[name])
    return made


def _wrapped_call(cls: type, method: Callable[..., Any], buffers: Places) -> Callable[..., Any]:
    collective = buffers is _SEND_AND_RECEIVE

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for position, name in buffers:
            buffer = arguments[position] if position < len(arguments) else keywords.get(name)
            require_host_addresses(buffer, name)
            # An int is MPI.BUFFER_AUTOMATIC, an argument of Attach_buffer.
            if not isinstance(buffer, int) and is_on_device(buffer):
                given = inspect.signature(method).bind(self, *arguments, **keywords).arguments
                given.pop("self")
                return _through_host(self, cls, method.__name__, given, [name for _, name in buffers])
        result = method(self, *arguments, **keywords)
        # mpi4py keeps the buffers of messages and of only some collectives, so the request keeps them for collectives.
        return holding(result, (arguments, keywords)) if collective and result is not None else result

    return call


def _receiving_bytes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of MPI.Message that also receives elements without a type of MPI. They travel as bytes."""

    @functools.wraps(method)
    def receive(self: MPI.Message, buf: Any, *rest: Any, **keywords: Any) -> Any:
        return host_calls.call(functools.partial(method, **keywords), self, buf, *rest, writable=True)

    return receive


def _wrapped_maker(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def make(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return wrap(method(self, *arguments, **keywords), self._gpu)

    return make


def _through_host(called: Any, cls: type, operation: str, given: dict[str, Any], buffers: list[str]) -> Any:
    """Carry out a method on host copies of the device arrays among its arguments ``given``."""
    backend = called._gpu(operation)
    if operation in _HOST_ALONE:
        raise InvalidUsageError(f"{operation} takes only host arrays, because MPI keeps the memory: copy to the host")
    announce(operation, "only MPI has the call")
    if operation in ("Psend_init", "Precv_init"):
        call = functools.partial(getattr(cls, operation), called)
        return PartitionedRequest.prepare(operation, call, given, backend, _completer())
    if operation.endswith("_init"):
        given.pop("info", None)  # hints are for MPI's persistent requests
        started = f"I{operation.removesuffix('_init').lower()}"
        return PersistentRequest.of(lambda: _start(called, cls, started, given, buffers, backend))
    if operation[0] == "I" and operation != "Improbe":
        return _start(called, cls, operation, given, buffers, backend)
    return on_host_copies(functools.partial(getattr(cls, operation), called), operation, given, buffers, backend)


def on_host_copies(
    call: Callable[..., Any], operation: str, given: dict[str, Any], buffers: Sequence[str], backend: GpuBackend
) -> Any:
    """Call ``call`` with the arguments ``given``, after host copies have replaced the device arrays. Blocking."""
    copies, arguments = _copies(operation, given, buffers, backend)
    result = call(**arguments)
    copies.back()
    return result


def _copies(
    operation: str, given: dict[str, Any], buffers: Sequence[str], backend: GpuBackend
) -> tuple[HostCopies, dict[str, Any]]:
    """Return the copies of the device arrays of a call, and the arguments for MPI. Blocking.

    The copies are in the order of the current stream of the library that the arrays come from.
    """
    arrays = [array_of(given[name]) for name in buffers if is_on_device(given.get(name))]
    stream = backend.stream(None, arrays[0])
    require_no_graph(operation, backend, stream, BY_MPI)
    copies, arguments = HostCopies(backend, stream), dict(given)
    for name in buffers:
        if name in given:
            writable = name in _RECEIVE_BUFFERS or (name == "buf" and operation in _RECEIVE_INTO_BUF)
            arguments[name] = copies.spec(given[name], writable=writable, name=name)
    copies.ready()
    return copies, arguments


def _start(
    called: Any, cls: type, operation: str, given: dict[str, Any], buffers: list[str], backend: GpuBackend
) -> DeferredRequest:
    """Start MPI's nonblocking call on host copies. The work is done when the device arrays hold the result."""
    copies, arguments = _copies(operation, given, buffers, backend)
    request: MPI.Request = getattr(cls, operation)(called, **arguments)
    # Only messages have a status, because Open MPI writes undefined memory into the status of other calls.
    status = MPI.Status() if "send" in operation or "recv" in operation else None

    def finish() -> None:
        if status is None or not status.Is_cancelled():
            copies.back()

    work = DeferredRequest.of(lambda: request.Test(status), finish, status, request.Cancel)
    work.kept = (copies, given)
    return _completer().add(work, backend.prepare_thread)


@functools.cache
def _completer() -> Completer:
    return Completer()  # not at import, because it asks MPI


class HostStaging(MPI.Intracomm):
    """mpi4py's wrapped methods: all that a Communicator does not implement, or that make communicators."""

    _gpu: Gpu


for _name, _method in wrapped_methods(MPI.Intracomm).items():
    setattr(HostStaging, _name, _method)


_attach = MPI.Attach_buffer


@functools.wraps(_attach)
def _attach_host_memory(buf: Any) -> None:
    if not isinstance(buf, int) and is_on_device(buf):  # an int is MPI.BUFFER_AUTOMATIC
        raise InvalidUsageError("Attach_buffer: buf lies in device memory, which MPI cannot access: attach host memory")
    _attach(buf)


# No call of MPI tells what is attached. In device memory the next Bsend, also of a Communicator, would end the process.
replace(MPI, "Attach_buffer", _attach_host_memory)
