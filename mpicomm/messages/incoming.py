"""The interfaces between a receive and the message that it receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpi4py import MPI

Correct = Callable[[MPI.Status], None]
"""A function that writes the source and the tag of a message into a status."""


class Incoming(Protocol):
    """A message to receive: the next message of a source and a tag, or a message that a probe has matched."""

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive as MPI's Recv does. Blocking."""

    def irecv_into(self, spec: Any) -> tuple[MPI.Request, Correct | None]:
        """Start to receive as MPI's Irecv does.

        Return a function that corrects the status, or None if MPI's is right.
        """


class Receiver(Protocol):
    """The receiver of matched messages into arrays of the host or of a GPU."""

    def receive_matched(self, message: Incoming, buf: Any, status: MPI.Status | None) -> None:
        """Receive ``message``; see mpi4py's ``Message.Recv``."""

    def start_receive_matched(self, message: Incoming, buf: Any) -> MPI.Request:
        """Start to receive ``message``; see mpi4py's ``Message.Irecv``."""
