"""The memory that the messages of one communicator hold, from its first long message until `Free`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from mpi4py import MPI

from mpicomm.cluster.agreement import release_before_finalize
from mpicomm.devices.base import GpuBackend
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import MpicommError
from mpicomm.log import logger
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.waiting import wait_until


class MessageMemory:
    """This rank's outbox and the blocks that it has opened in peers' outboxes. All methods are local.

    It has no reference to the communicator. A symmetric array refers to its domain, and the domain to this memory. So
    the reference would keep the communicator alive as long as any of its arrays.
    """

    def __init__(self, timeout_s: float, secret: bytes | None, most_nbytes: int | None) -> None:
        self._timeout_s = timeout_s
        self._secret = secret
        self._most_nbytes = most_nbytes
        self.made: Rendezvous | None = None
        """The rendezvous of the communicator; None until a message needs it."""

    def rendezvous(self, device: GpuBackend) -> Rendezvous:
        """Return the rendezvous of the communicator. ``device`` is the communicator's device."""
        if self.made is None:
            self.made = Rendezvous(device, self._secret, self._most_nbytes)
            release_before_finalize(self)
        return self.made

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of the outbox. Blocks of peers that this rank has opened count as the peers' memory."""
        return () if self.made is None else (self.made.memory_use(),)

    def close_peers(self) -> None:
        """Unmap the peers' outboxes. This rank's copies must be over. A second call does nothing."""
        if self.made is not None:
            self.made.close_peers()

    def close_own(self) -> None:
        """Free this rank's outbox, after every peer's `close_peers`. A second call does nothing."""
        rendezvous, self.made = self.made, None
        if rendezvous is not None:
            rendezvous.close_own()

    def give_back(self) -> None:
        """Free the outbox, which the next call that needs it allocates again. No peer may have opened it."""
        self.close_peers()
        self.close_own()

    def release(self) -> None:
        """Wait until the receivers have copied all messages, and unmap the peers' outboxes, before MPI_Finalize.

        MPI_Finalize also lets earlier messages arrive. The process may end after it, and its outbox ends with the
        process.
        """
        rendezvous = self.made
        if rendezvous is None:
            return
        with contextlib.suppress(MpicommError):  # after an error no message is sure to arrive
            rendezvous.device.synchronize()  # this rank's copies out of outboxes, because their senders wait for them
            rendezvous.device.check()
            # The wait calls MPI, because MPI may not have sent a header yet.
            if not wait_until(rendezvous.is_drained, self._timeout_s, MPI.Intracomm(MPI.COMM_SELF).Iprobe):
                logger.warning("messages of GPU arrays were not received within %g s of the end", self._timeout_s)
            rendezvous.close_peers()
