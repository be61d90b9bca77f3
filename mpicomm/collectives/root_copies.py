"""A device array of the root in a call on the host: MPI, or mapped memory, works on a copy in pinned memory.

The other ranks do not see it. They pass host arrays, so the call is on the host: see `place`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpicomm.collectives.beside import require_no_graph, warn_of_host_array
from mpicomm.collectives.call import Arguments, Call
from mpicomm.mpi.host_copies import HostCopies
from mpicomm.mpi.location import require_here
from mpicomm.session import Session


def copies_on_host(session: Session, call: Call, stream: Any) -> tuple[HostCopies, Arguments]:
    """Return copies of the device array of a call on the host, and the arguments with them. Local, blocking.

    Raises `InvalidUsageError` in a capture, and for an array of another GPU.
    """
    operation, given = call.operation.name, call.arguments
    backend = session.gpu(operation)
    for operand in call.operands:
        require_here(f"{operation}: {operand.name}", operand.device, session.backend.device)
    resolved = backend.stream(stream, call.device_array)
    require_no_graph(operation, backend, resolved)
    warn_of_host_array(operation)
    copies = HostCopies(backend, resolved)
    send = copies.spec(given.send, writable=False, name="sendbuf")
    receive = copies.spec(given.receive, writable=True, name="recvbuf")
    copies.ready()
    return copies, replace(given, send=send, receive=receive)
