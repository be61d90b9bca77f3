"""Carrier: an engine that moves parcels of device memory between cliques, behind one face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from mpicomm.collectives.signature import Signature
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.domains.steps import Wire
from mpicomm.errors import MpicommError

Name = Literal["mapped", "nccl", "mpi", "staged"]


class Carrier(Protocol):
    """Moves parcels between device memory of different cliques."""

    name: Name
    capturable: bool
    """Whether CUDA graphs can hold its work; else it blocks the host, and a capture is an error."""

    def start(self, wire: Wire, stream: int, call: Signature) -> Callable[[], object]:
        """Start parcels behind the work that ``stream`` has; return the function that lets the stream wait for them.

        All ranks start equally many wires in the same order; one of them may be without parcels. The function raises
        `CollectiveTimeoutError` or `PeerError` as `Transfers.begin` says, or does not block.
        """

    def tell(self, error: MpicommError) -> None:
        """Tell ranks of other cliques why this rank has given a call up; local. See `Transfers.tell`."""

    def memory_use(self) -> tuple[MemoryUse, ...]:
        """Return the memory of this rank; local."""

    def close(self) -> None:
        """Give back what the carrier has; its work must be over, or have failed. Local."""
