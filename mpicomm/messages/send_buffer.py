"""What MPI gets for the device array of a send: a description, or a copy in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import Backend
from mpicomm.errors import HandleError
from mpicomm.log import logger, tell_slow_way
from mpicomm.messages.description import DESCRIPTION_NBYTES
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.host_copies import HostCopies

_warned: set[str] = set()


@dataclass(slots=True)
class SendBuffer:
    """What MPI sends, and the ``owner`` of memory that has to live until the send is complete."""

    spec: Any
    owner: Any = None
    withdraw: Callable[[], None] | None = None
    """Gives back the place in the outbox of a message whose description MPI has not sent."""

    def hand_over(self, send: Callable[..., Any], comm: MPI.Intracomm, dest: int, tag: int) -> Any:
        """Let MPI send it, and return MPI's result. Where MPI refuses it, the message leaves the outbox."""
        try:
            return send(comm, self.spec, dest, tag)
        except BaseException:
            if self.withdraw is not None:
                self.withdraw()
            raise


def by_rendezvous(rendezvous: Rendezvous, operand: Operand, stream: int) -> SendBuffer | None:
    """Enqueue the copy of an array into the outbox; return None, and warn, where the outbox has no room."""
    try:
        if operand.derived is None:
            described, message = rendezvous.send(operand.pointer, operand.nbytes, stream)
        else:
            (elements,) = operand.derived
            described, message = rendezvous.pack(elements, stream)
    except (OutboxFullError, HandleError) as error:
        warn_once(str(error))
        return None
    # Packed: this type matches every type that the receiver names.
    spec = [message, DESCRIPTION_NBYTES, MPI.PACKED]
    return SendBuffer(spec, operand.owner, lambda: rendezvous.withdraw(described, stream))


def eager(backend: Backend, operand: Operand, stream: int) -> SendBuffer:
    """Copy an array of plain elements to the host. Blocking."""
    host = backend.pinned(operand.nbytes)
    backend.copy(host.ctypes.data, operand.pointer, operand.nbytes, stream)
    backend.synchronize(stream)
    return SendBuffer([host, operand.nbytes, MPI.PACKED])  # packed: MPI lacks a type for some elements


def eager_derived(backend: Backend, spec: Any, stream: int) -> SendBuffer:
    """Copy the memory that a derived datatype describes to the host. Blocking."""
    copies = HostCopies(backend, stream)
    host = copies.spec(spec, writable=False, name="buf")
    copies.ready()
    return SendBuffer(host, copies)


def warn_once(reason: str) -> None:
    """Warn, once per reason and process, that messages are eager."""
    tell_slow_way(f"through pinned host memory and MPI: {reason}")
    if reason not in _warned:
        _warned.add(reason)
        logger.warning("messages of GPU arrays go through pinned host memory and MPI, which is slower: %s", reason)
