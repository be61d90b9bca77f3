"""Outgoing: what MPI gets for a buffer that is sent: a description, or a host copy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.devices.base import Backend
from mpicomm.errors import HandleError
from mpicomm.log import logger
from mpicomm.messages.outbox import OutboxFullError
from mpicomm.messages.transfers import Transfers
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.host_copies import HostCopies

_said: set[str] = set()


@dataclass
class Outgoing:
    """What MPI gets for a buffer that is sent, and the ``owner`` of memory that has to live until that is done."""

    spec: Any
    owner: Any = None
    withdraw: Callable[[], None] | None = None

    @contextlib.contextmanager
    def withdrawn_on_failure(self) -> Iterator[None]:
        """Give a ``with`` block that hands this to MPI; what MPI refuses leaves nothing behind."""
        try:
            yield
        except BaseException:
            if self.withdraw is not None:
                self.withdraw()
            raise


class Sending:
    """A message under way: kept, with all that it needs, by the request that asks whether it is `done`.

    ``copied`` says whether the device is done with the buffer; it is not called again once it has said so.
    """

    def __init__(self, outgoing: Outgoing, request: MPI.Request, copied: Callable[[], bool]) -> None:
        self._outgoing = outgoing
        # A description is sent at once, as a rule. To ask MPI later may take long: a thread that waits in MPI keeps
        # others out.
        self._request = None if request.Test() else request
        self._copied = copied

    def done(self) -> bool:
        """Return whether the buffer may be used again."""
        if self._request is not None and self._request.Test():
            self._request = None
        return self._request is None and self._copied()


def describe(
    transfers: Transfers, operand: Operand, nbytes: int, secret: bytes, rank: int, stream: int
) -> Outgoing | None:
    """Copy a message of rank ``rank`` into its outbox; None where there is no room, which is said."""
    try:
        described = transfers.send(operand.pointer, nbytes, stream)
    except (OutboxFullError, HandleError) as error:
        say_once(str(error))
        return None
    message = np.frombuffer(described.pack(secret), np.uint8)
    return Outgoing(
        # Packed: what matches every type that the receiver may name.
        [message, message.size, MPI.PACKED],
        operand.owner,
        lambda: transfers.drop(described, rank, stream),
    )


def packed(backend: Backend, operand: Operand, nbytes: int, stream: int) -> Outgoing:
    """Copy a plain array to the host. Blocking."""
    host = backend.pinned(nbytes)
    backend.copy(host.ctypes.data, operand.pointer, nbytes, stream)
    backend.synchronize(stream)
    return Outgoing([host, nbytes, MPI.PACKED])  # also of types that MPI does not know


def copied(backend: Backend, spec: Any, stream: int) -> Outgoing:
    """Copy to the host what a derived datatype describes. Blocking."""
    copies = HostCopies(backend, stream)
    host = copies.spec(spec, writable=False, name="buf")
    copies.ready()
    return Outgoing(host, copies)


def say_once(reason: str) -> None:
    """Warn, once per reason, of messages that take the slow way."""
    if reason not in _said:
        _said.add(reason)
        logger.warning("messages of GPU arrays go through pinned host memory and MPI, which is slower: %s", reason)
