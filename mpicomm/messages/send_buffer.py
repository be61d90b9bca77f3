"""What MPI gets for the device array of a send: a description, or a copy in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import Backend
from mpicomm.log import logger, tell_slow_way
from mpicomm.messages.endpoint import Endpoint
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


def eager(backend: Backend, sent: Endpoint, stream: int) -> SendBuffer:
    """Copy a device array to the host. Blocking."""
    if not sent.is_flat:
        return _eager_derived(backend, sent.spec, stream)
    host = backend.pinned(sent.nbytes)
    backend.copy(host.ctypes.data, sent.pointer, sent.nbytes, stream)
    backend.synchronize(stream)
    return SendBuffer([host, sent.nbytes, MPI.PACKED])  # packed: MPI lacks a type for some elements


def _eager_derived(backend: Backend, spec: Any, stream: int) -> SendBuffer:
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
