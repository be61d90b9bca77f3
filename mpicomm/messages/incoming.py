"""The interfaces between a receive and the message that it receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpi4py import MPI

Correct = Callable[[MPI.Status], None]
"""Lets a status name the source and the tag of a message."""


class Incoming(Protocol):
    """A message to receive: the next one of a source and a tag, or one that a probe has matched."""

    def recv_into(self, spec: Any, status: MPI.Status) -> None:
        """Receive as MPI's Recv does."""

    def irecv_into(self, spec: Any) -> tuple[MPI.Request, Correct | None]:
        """Start to receive as MPI's Irecv does; return a function that corrects the status, None if MPI's is right."""


class Receiver(Protocol):
    """Receives matched messages into arrays of the host or of a GPU."""

    def receive_matched(self, message: Incoming, buf: Any, status: MPI.Status | None) -> None:
        """Receive ``message``; see mpi4py's ``Message.Recv``."""

    def start_receive_matched(self, message: Incoming, buf: Any) -> MPI.Request:
        """Start to receive ``message``; see mpi4py's ``Message.Irecv``."""
