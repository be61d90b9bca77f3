"""The ways of calls on the host that MPI does not carry out directly, because of the arrays or of the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.collectives import beside
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.operations import Operation
from mpicomm.devices.host import array_at
from mpicomm.mpi.host_copies import BY_MPI, HostCopies, announce, require_no_graph
from mpicomm.mpi.location import require_here
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest
from mpicomm.session import Session
from mpicomm.ways.engines import Engines
from mpicomm.ways.reader import Reader
from mpicomm.ways.way import Carry
from mpicomm.ways.witness import Witness

_BYTE = np.dtype(np.uint8)
Prepare = Callable[[Operation, Arguments, MPI.Info, Any, str], MPI.Prequest]


class InMappedMemory:
    """The engine of the ranks' mapped memory, on one node or several. It blocks, because it has no thread."""

    def __init__(self, engines: Engines, witness: Witness) -> None:
        self._engines = engines
        self._witness = witness

    def enqueue(self, call: Call, *, blocking: bool) -> None:
        """See `Way.enqueue`."""
        self._witness.tell(call.operation, on_host=True)
        self._engines.of_hosts(call.operation.name).run(call, call.algorithm)


class WithEpilogue:
    """An all-reduce by another way, then its epilogue. It blocks."""

    def __init__(self, reader: Reader, carry: Carry) -> None:
        self._reader = reader
        self._carry = carry

    def enqueue(self, call: Call, *, blocking: bool) -> None:
        """See `Way.enqueue`."""
        epilogue, receive, given = call.epilogue, call.receive, call.arguments
        assert epilogue is not None and receive is not None and call.send is not None
        made = array_at(receive.pointer, receive.nbytes, _BYTE).view(epilogue.result)
        reduced, target = made, given.receive
        if epilogue.converts:
            reduced = target = np.empty(call.send.total, epilogue.dtype)
        part = self._reader.read(call.operation, Arguments(given.send, target, given.op), call.algorithm, None)
        part.of_call = call.signature  # with the epilogue, so that ranks compare it
        self._carry(part, blocking=True)
        epilogue.on_host(reduced, made)


class OnCopies:
    """Another way, on copies of this rank's device arrays in pinned memory, for a call on the host.

    It carries out calls that MPI carries out wherever the arrays are, and rooted calls in which only the root's second
    buffer is a device array: see `mpicomm.collectives.call_location`. The other ranks do not notice the copies, and
    may pass host arrays. So this rank makes MPI's call in the same form as a rank with host arrays: MPI does not match
    a blocking collective with a nonblocking or persistent one. No rank sets anything up here, because ranks with host
    arrays would not take part.
    """

    def __init__(self, session: Session, reader: Reader, carry: Carry, prepare: Prepare) -> None:
        self._session = session
        self._reader = reader
        self._completer = Completer()
        self._carry = carry
        self._prepare = prepare

    def enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest | None:
        """See `Way.enqueue`."""
        copies, given = self._copies(call)
        begun = self._carry(self._reader.read(call.operation, given, call.algorithm, None), blocking=blocking)
        if isinstance(begun, MPI.Request):
            request = DeferredRequest.of(begun.Test, copies.back)
            return self._completer.add(request, self._session.backend.prepare_thread)
        copies.back()
        return None

    def prepare(self, call: Call, info: MPI.Info) -> MPI.Prequest:
        """Return a persistent call that makes its copies at each start. The other ranks have MPI's request."""
        copies, given = self._copies(call)
        prepared = self._prepare(call.operation, given, info, None, call.algorithm)
        backend = self._session.backend

        def begin() -> DeferredRequest:
            copies.again(backend.stream(call.stream, call.device_array))
            copies.ready()
            prepared.Start()
            return self._completer.add(DeferredRequest.of(prepared.Test, copies.back), backend.prepare_thread)

        return PersistentRequest.of(begin, prepared.Free)

    def _copies(self, call: Call) -> tuple[HostCopies, Arguments]:
        """Return copies of the device arrays, and the arguments with them. Local, blocking.

        Raises `InvalidUsageError` in a capture, and for an array of another GPU. In a call on device arrays it also
        raises the error of earlier calls.
        """
        operation, given = call.operation.name, call.arguments
        backend = self._session.gpu(operation)
        for operand in call.operands:
            require_here(f"{operation}: {operand.name}", operand.device, backend.device)
        stream = backend.stream(call.stream, call.device_array)
        if call.on_device:
            self._session.require_usable(operation)
            require_no_graph(operation, backend, stream, BY_MPI)
            announce(operation, "only MPI can carry it out, or algorithm= asks for it")
        else:
            require_no_graph(operation, backend, stream, beside.BESIDE)
            beside.warn_of_host_array(operation)
        copies = HostCopies(backend, stream)
        send = copies.spec(given.send, writable=False, name="sendbuf", operand=call.send)
        receive = copies.spec(given.receive, writable=True, name="recvbuf", operand=call.receive)
        copies.ready()
        return copies, replace(given, send=send, receive=receive)
