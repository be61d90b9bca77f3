"""MPI's own calls: on device arrays, which go through pinned host copies, on Python objects, and probes.

MPI gets no device pointer. mpi4py's annotations say which methods take buffers, and which make communicators or matched
messages. `HostStaging` wraps the methods of a Communicator that the package does not implement. Intercommunicators, the
communicators made from them, and matched messages are mpi4py's own objects. `wrap` turns each of them into an object of
a subclass with wrapped methods. The object has the GPU of the Communicator that it comes from.

The doctor sees the blocking calls on objects. Receives of objects find the messages that probes took.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from mpi4py import MPI
from mpi4py.MPI import ANY_SOURCE, ANY_TAG

from mpicomm.activity.page import begin_mpi_call, mpi_call_number
from mpicomm.collectives.operations import BCAST
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import host_calls
from mpicomm.mpi.arguments import is_on_device
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.doctor_rows import probe, receiving, recv_object, sending, sendrecv_object
from mpicomm.mpi.host_calls import NEEDS_MPI, HostCopies, log_host_staging, require_no_capture
from mpicomm.mpi.partitioned import PartitionedRequest
from mpicomm.mpi.request_lists import replace
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest, ProgressThread
from mpicomm.mpi.spec import require_host_addresses

if TYPE_CHECKING:
    from mpicomm.messages.calls import Messages

Given = ParamSpec("Given")
Result = TypeVar("Result")
_COLLECTIVES = "barrier", "bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan"
Gpu = Callable[[str], GpuBackend]
"""A function that returns this rank's GPU for an operation.

It raises `InvalidUsageError` for a communicator on the cpu.
"""
Method = Callable[..., Any]
Divert = Callable[[Method, dict[str, Any], list[str]], Any]
"""Carries out a method of MPI on device arrays: gets the method, all arguments by name, and the names of the arrays."""

_MADE = re.compile(r"\b(Self|Message|CommT?|(Intra|Inter|Topo|Cart|Graph|Distgraph)comm)\b")
"""mpi4py's classes of communicators and messages, as its annotations name them."""
_RECEIVE_BUFFERS = ("recvbuf", "inoutbuf", "outbuf")
_RECEIVE_INTO_BUF = frozenset((
    "Recv", "Irecv", "Recv_init", "Sendrecv_replace", "Isendrecv_replace", *BCAST.methods,
))  # fmt: skip


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
    elif isinstance(result, (MPI.Comm, MPI.Message)) and result != MPI.COMM_NULL:
        cls: type = type(result)
        result = _wrapped_class(cls)(result)
        result._gpu = gpu
    return result


@functools.cache
def _wrapped_class(cls: type) -> Callable[[Any], Any]:
    return type(cls.__name__, (Wrapped, cls), {**_wrapped_methods(cls), "__doc__": cls.__doc__})


def buffers_of(method: Method) -> tuple[str, ...]:
    """Return the names of a method's buffer arguments."""
    return tuple(name for name, kind in _annotations(method).items() if "Buf" in kind and name != "return")


def _annotations(method: Method) -> dict[str, str]:
    """Return the annotations by mpi4py, which `functools.wraps` does not copy from Python 3.14 on."""
    return dict(inspect.unwrap(method).__annotations__)


def _wrapped_methods(cls: Any) -> dict[str, Method]:
    """Return wrapped methods for all of ``cls`` that take buffers, or make communicators or messages."""
    methods: dict[str, Method] = {}
    for name in dir(cls):
        method: Any = getattr(cls, name)
        if not name[0].isupper() or not inspect.ismethoddescriptor(method):
            continue
        if buffers_of(method):
            if issubclass(cls, MPI.Message):
                method = _receiving_bytes(method)
            methods[name] = diverted(method, functools.partial(_through_host, cls))
        elif _MADE.search(_annotations(method)["return"]):
            methods[name] = _wrapped_maker(method)
    return methods


def diverted(method: Method, divert: Divert) -> Method:
    """Return ``method``, whose calls with device arrays go to ``divert``.

    Its calls with MPI.BOTTOM and addresses of a GPU raise `InvalidUsageError`.
    """
    buffers, has_self = buffers_of(method), "." in method.__qualname__
    positions = [(n + has_self, name) for n, name in enumerate(_annotations(method)) if name in buffers]

    @functools.wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        for position, name in positions:
            buffer = arguments[position] if position < len(arguments) else keywords.get(name)
            require_host_addresses(buffer, name)
            if is_on_device(buffer):
                given = inspect.signature(method).bind(*arguments, **keywords).arguments
                return divert(method, given, [name for _, name in positions if is_on_device(given.get(name))])
        return method(*arguments, **keywords)

    return call


def refuse(method: Method, given: dict[str, Any], on_device: list[str]) -> Any:
    """Raise `InvalidUsageError`. It is for methods with memory that MPI uses after the call, when copies are gone."""
    raise InvalidUsageError(
        f"{method.__qualname__}: {on_device[0]} lies in device memory, which MPI cannot access: copy it to the host, "
        "or use comm.empty() for memory that all ranks of a node open"
    )


def _receiving_bytes(method: Method) -> Method:
    """Return a method of MPI.Message that also receives elements without a type of MPI. They travel as bytes."""

    @functools.wraps(method)
    def receive(self: MPI.Message, buf: Any, *rest: Any, **keywords: Any) -> Any:
        return host_calls.call(functools.partial(method, **keywords), self, buf, *rest, receives=0)

    return receive


def _wrapped_maker(method: Method) -> Method:
    @functools.wraps(method)
    def make(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return wrap(method(self, *arguments, **keywords), self._gpu)

    return make


def _through_host(cls: type, method: Method, given: dict[str, Any], on_device: list[str]) -> Any:
    """Carry out a method of ``cls`` on host copies of the device arrays among its arguments ``given``."""
    operation, called, buffers = method.__name__, given.pop("self"), buffers_of(method)
    backend = called._gpu(operation)
    if operation in ("Attach_buffer", "Iagree"):
        return refuse(method, given, on_device)
    log_host_staging(operation, "only MPI has the call")
    if operation in ("Psend_init", "Precv_init"):
        call = functools.partial(getattr(cls, operation), called)
        return PartitionedRequest.prepare(operation, call, given, backend)
    if operation.endswith("_init"):
        given.pop("info", None)  # hints are for MPI's persistent requests
        started = f"I{operation.removesuffix('_init').lower()}"
        return PersistentRequest.of(lambda: _start(called, cls, started, given, buffers, backend))
    if operation[0] == "I":
        return _start(called, cls, operation, given, buffers, backend)
    return on_host_copies(functools.partial(getattr(cls, operation), called), operation, given, buffers, backend)


def on_host_copies(
    call: Callable[..., Any], operation: str, given: dict[str, Any], buffers: Sequence[str], backend: GpuBackend
) -> Any:
    """Call ``call`` with the arguments ``given``, after host copies have replaced the device arrays. Blocking."""
    copies, arguments = _copies(operation, given, buffers, backend)
    result = call(**arguments)
    copies.copy_back()
    return result


def _copies(
    operation: str, given: dict[str, Any], buffers: Sequence[str], backend: GpuBackend
) -> tuple[HostCopies, dict[str, Any]]:
    """Return the copies of the device arrays of a call, and the arguments for MPI. Blocking.

    The copies are in the order of the current stream of the library that the arrays come from.
    """
    arrays = [array_of(given[name]) for name in buffers if is_on_device(given.get(name))]
    stream = backend.stream(None, arrays[0])
    require_no_capture(operation, backend, stream, NEEDS_MPI)
    copies, arguments = HostCopies(backend, stream), dict(given)
    for name in buffers:
        if name in given:
            writable = name in _RECEIVE_BUFFERS or (name == "buf" and operation in _RECEIVE_INTO_BUF)
            arguments[name] = copies.stage(given[name], writable=writable, name=name)
    copies.wait()
    return copies, arguments


def _start(
    called: Any, cls: type, operation: str, given: dict[str, Any], buffers: Sequence[str], backend: GpuBackend
) -> DeferredRequest:
    """Start MPI's nonblocking call on host copies. The work is done when the device arrays hold the result."""
    copies, arguments = _copies(operation, given, buffers, backend)
    request: MPI.Request = getattr(cls, operation)(called, **arguments)
    # Only messages have a status, because Open MPI writes undefined memory into the status of other calls.
    status = MPI.Status() if "send" in operation or "recv" in operation else None

    def finish() -> None:
        if status is None or not status.Is_cancelled():
            copies.copy_back()

    work = DeferredRequest.of(lambda: request.Test(status), finish, status, request.Cancel)
    work.kept = (copies, given)
    return _progress_thread().add(work, backend.prepare_thread)


@functools.cache
def _progress_thread() -> ProgressThread:
    return ProgressThread()  # not at import, because it asks MPI


class HostStaging(Wrapped, MPI.Intracomm):
    """mpi4py's wrapped methods: all that a Communicator does not implement, or that make communicators."""


for _name, _method in _wrapped_methods(MPI.Intracomm).items():
    setattr(HostStaging, _name, _method)

# No call of MPI tells what is attached. In device memory the next Bsend, also of a Communicator, would end the process.
replace(MPI, "Attach_buffer", diverted(MPI.Attach_buffer, refuse))


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective call of mpi4py that tells the doctor its name."""
    number = mpi_call_number(method.__name__.replace("barrier", "Barrier"))

    @functools.wraps(method)
    def call(self: Any, /, *given: Any, **named: Any) -> Any:
        begin_mpi_call(self._row, number)
        return method(self, *given, **named)

    return call


def _probing(
    by_mpi: Callable[Concatenate[Any, Given], Result], *, wait: bool, matches: bool = False
) -> Callable[Concatenate[Any, Given], Result]:
    """Return a probe of mpi4py that also takes rendezvous headers for messages.

    With ``matches`` it returns a message that an array of the host or of a GPU receives.
    """

    @functools.wraps(by_mpi)
    def wrapper(self: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None) -> Any:
        messages = self._messages
        if not (messages.on_gpu if matches else messages.by_rendezvous):
            return by_mpi(self, source, tag, status)  # type: ignore[call-arg,arg-type]
        take = messages.unexpected.match if matches else messages.unexpected.probe
        return take(source, tag, status, wait=wait)

    method: Any = wrapper
    return method  # type: ignore[no-any-return]


class ObjectCalls(MPI.Intracomm):
    """mpi4py's blocking calls on Python objects, which MPI carries out. `Probes` has the calls that receive."""

    _row: memoryview

    send = sending(MPI.Intracomm.send)
    ssend = sending(MPI.Intracomm.ssend)


for _name in _COLLECTIVES:
    setattr(ObjectCalls, _name, _reported(getattr(MPI.Intracomm, _name)))


class Probes(MPI.Intracomm):
    """mpi4py's probes. Local. `Probe` and `Mprobe` block until a message is there.

    On a communicator of GPUs MPI carries rendezvous headers in place of long messages of GPU arrays. The probes still
    fill statuses with the length of the data. An array of the host or of a GPU receives the message that ``Mprobe`` or
    ``Improbe`` returns. A probe takes a header from MPI to read it. After that only the receives of this communicator
    find the message.
    """

    _messages: Messages

    Probe = probe = _probing(probe, wait=True)
    Iprobe = iprobe = _probing(MPI.Intracomm.Iprobe, wait=False)
    Mprobe = _probing(receiving(HostStaging.Mprobe, 0), wait=True, matches=True)
    Improbe = _probing(HostStaging.Improbe, wait=False, matches=True)
    # mpi4py's message keeps the pickled object.
    mprobe = _probing(receiving(MPI.Intracomm.mprobe, 0), wait=True, matches=True)
    improbe = _probing(MPI.Intracomm.improbe, wait=False, matches=True)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: MPI.Status | None = None
    ) -> Any:
        """Receive a Python object; see mpi4py."""
        matched = self._messages.unexpected.take(source, tag)
        return recv_object(self, buf, source, tag, status) if matched is None else matched.recv(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> MPI.Request:
        """Start to receive a Python object; see mpi4py."""
        matched = self._messages.unexpected.take(source, tag)
        return super().irecv(buf, source, tag) if matched is None else matched.irecv()

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send a Python object and receive another; see mpi4py."""
        if not self._messages.unexpected.queued:
            return sendrecv_object(self, sendobj, dest, sendtag, recvbuf, source, recvtag, status)
        request = self.isend(sendobj, dest, sendtag)
        try:
            return self.recv(recvbuf, source, recvtag, status)
        finally:
            request.wait()
