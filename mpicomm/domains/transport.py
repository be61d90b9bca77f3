"""Transport: the interface of the engines that move network messages of device memory between peer domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from mpicomm.collectives.signature import Signature
from mpicomm.domains.steps import NetworkStep
from mpicomm.errors import MpicommError

Name = Literal["mapped", "nccl", "mpi", "pinned"]


class Transport(Protocol):
    """Moves network messages between device memory of different domains."""

    name: Name
    capturable: bool
    """Whether CUDA graphs can hold its work; else it blocks the host, and a capture is an error."""

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """Start messages after the work of ``stream``. Return a function that makes the stream wait for them.

        All ranks start equally many network steps in the same order. A step may have no network messages. The function
        does not block, or raises `CollectiveTimeoutError` or `PeerError` as `Transfers.begin` says.
        """

    def tell(self, error: MpicommError) -> None:
        """Tell ranks of other domains why this rank has given up a call; local. See `Transfers.tell`."""

    def close(self) -> None:
        """Release the resources of the transport; its work must be over, or have failed. Local."""
