"""Memory: what the messages of one communicator have taken, from the first of them to the end."""

from __future__ import annotations

import contextlib

from mpi4py import MPI

from mpicomm.cluster.agreement import release_before_finalize
from mpicomm.errors import MpicommError
from mpicomm.log import logger
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.transfers import Transfers
from mpicomm.waiting import wait_until


class Memory:
    """The outbox of this rank and those that it has mapped; none before the first message. All methods are local.

    It knows nothing of the communicator, which would otherwise live as long as any array of it.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._device: MessageDevice | None = None
        self._transfers: Transfers | None = None

    def transfers(self, device: MessageDevice) -> Transfers:
        """Return the transfers of the communicator, whose device it is."""
        if self._transfers is None:
            self._device, self._transfers = device, Transfers(device, self._rank)
            release_before_finalize(self)
        return self._transfers

    def close_peers(self) -> None:
        """Unmap the peers' outboxes, after this rank's work. A second call does nothing."""
        if self._transfers is not None:
            self._transfers.close_peers()

    def close_own(self) -> None:
        """Free this rank's outbox, after every peer's `close_peers`. A second call does nothing."""
        self._device = None
        if self._transfers is not None:
            self._transfers.close_own()

    def release(self) -> None:
        """Before MPI_Finalize: what was sent is to arrive, as MPI's messages do, and this process may end after it."""
        if self._device is None or self._transfers is None:
            return
        with contextlib.suppress(MpicommError):  # after an error nobody waits for what was sent
            self._device.synchronize()  # what this rank receives: its senders wait for that in turn
            self._device.check()
            # MPI has to go on meanwhile: a description may not have left yet.
            if not wait_until(self._transfers.is_taken, self._timeout_s, MPI.COMM_SELF.Iprobe):
                logger.warning("messages of GPU arrays were not received within %g s of the end", self._timeout_s)
            self._transfers.close_peers()
