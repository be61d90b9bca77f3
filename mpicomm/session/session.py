"""Session: all that one communicator has on this rank, its suspension and its teardown."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from mpicomm import log
from mpicomm.cluster.monitored_barrier import monitored_barrier
from mpicomm.devices.host import HostBackend
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.session.set_up import SetUp
from mpicomm.sharing.segments import Shared, SharedSegments, Suspendable
from mpicomm.sharing.suspension import Suspension


class Session(SetUp):
    """All that the communicator ``comm`` has on this rank. It exists as long as the communicator.

    It sets itself up at first need, because many communicators of a program carry only host messages.
    """

    def close_shared(self, shared: Shared, what: str) -> None:
        """Release one array or event; see its ``close``."""
        if self._freed:
            return
        # All ranks keep the same things in the same order, so the index names the thing on all ranks.
        position = next(number for number, each in enumerate(self._shared) if each is shared)  # == refuses arrays
        step = f"{what} {position}: close"
        error = self._meet(step)
        try:
            self._release_members([shared], step, error)
        finally:
            del self._shared[position]  # a thread that keeps something meanwhile appends it

    def check(self, stream: Any) -> None:
        """Wait for a stream, then raise the error of its work: see ``Communicator.check``. Local."""
        self._require_unfreed("check")
        self.require_intact("check")
        if self._has_device:
            self.backend.synchronize(self.backend.stream(stream))
            self.backend.check()

    def suspend(self, *, keep: bool) -> None:
        """Free device memory for a while: see ``Communicator.suspend``. Collective, blocking."""
        self._require_unfreed("suspend")
        if self.is_suspended:
            return
        self.set_up("suspend")
        self.require_intact("suspend")

        def memories() -> list[SharedSegments]:
            members = [member for member in (*self._local, *self._shared) if isinstance(member, Suspendable)]
            return [shared for member in members for shared in member.memories() if shared.content is not None]

        suspension = Suspension(self.group, self.backend, self.kind)
        suspension.save(memories, self.before_suspension, keep=keep)
        # From here on no call may use the memory, also if a step fails.
        self._suspension, self._is_unusable = suspension, True
        suspension.release()

    def resume(self) -> None:
        """Allocate device memory again: see ``Communicator.resume``. Collective, blocking."""
        self._require_unfreed("resume")
        suspension = self._suspension
        if suspension is None:
            return
        self.require_intact("resume")
        suspension.restore()
        self._suspension, self._is_unusable = None, False

    def close(self) -> None:
        """Release everything. Collective, blocking; local if the communicator is broken. Idempotent.

        It never sets the communicator up. Without a set-up its ranks wait for each other only if
        `_peers_may_map_outbox`.
        """
        if self._freed:
            return
        if not (self._groups or self._has_device or self._shared or self._local or self._peers_may_map_outbox):
            # Most communicators of a program end here, because they carry only host messages.
            self._freed = self._is_unusable = True
            if self._row is not None:
                self._row.hide()
            return
        if self._groups:
            self.group.extend_deadline = self.peers_wait_elsewhere
        error = self._meet("Free")
        if self.tracer is not None and error is None and self._groups and self.intact:
            self.tracer.read_clocks_again(self.group, self.private)
        self._freed = self._is_unusable = True
        everything = [*reversed(self._shared), *self._local]
        try:
            self._release_members(everything, "Free", error)
        except PeerError:
            # A Ctrl-C may take a rank out of its `close`. That rank may call `close` once more, and then sends over the
            # private communicator. So nothing frees that communicator, because MPI would reuse its context id.
            self._rank_is_missing = True
            raise
        finally:
            self.row.hide()
            self._shared.clear()
            if self._has_device:
                self.backend.close()
            # MPI gives the context id of a freed communicator to another, which would get stray messages.
            if self._private is not None and self.intact and not self._stray_messages:
                self._private.Free()

    def explain_exit(self, error: BaseException) -> None:
        """Let `close` give ``error`` as the reason to late ranks, and in its own error if ranks are missing. Local."""
        reason = f"rank {self.placement.rank} left its with block by {type(error).__name__}: {error}"
        if self._groups:
            self.group.absence_reason = lambda ranks: reason

    def release(self) -> None:
        """Unmap the peers' memory before MPI_Finalize; local.

        The memory of this rank stays until the process ends, because slower peers may still access it.
        """
        if self._freed:
            return
        self._freed = self._is_unusable = True
        with contextlib.suppress(MpicommError):
            self.backend.synchronize()
            self._log_unraised_error("MPI_Finalize")
            for member in (*self._shared, *self._local):
                member.close_peers()

    @property
    def _peers_may_map_outbox(self) -> bool:
        """Whether peers may have mapped this rank's outbox. A peer does so without a set-up and without notice."""
        return self.placement.here.sends_headers

    def _meet(self, step: str) -> MpicommError | None:
        """Wait until all ranks are about to release the same things; return the error if a rank is missing.

        After a timeout of an earlier call no rank waits: ranks that have given up abort the group.

        Raises `PeerError` if ranks make different calls. Then nothing is released, and all ranks can go on.
        """
        if not (self._groups and self.intact):
            return None
        timeout = self._timeout(step)
        if timeout is not None:
            self.group.abort(timeout)
            return None
        try:
            self.group.barrier(step)
        except MpicommError as error:
            if self.intact:
                raise
            if not self.group.aborted:
                return error
            log.logger.info("%s: other ranks have given up an earlier call: %s", step, error)
        return None

    def _timeout(self, step: str) -> CollectiveTimeoutError | None:
        """Return the timeout of an earlier call, if any. Local."""
        self._log_unraised_error(step)
        if isinstance(self._part_error, CollectiveTimeoutError):
            return self._part_error
        try:
            self.backend.check()
        except CollectiveTimeoutError as error:
            return error
        except MpicommError:
            return None
        return self.host_timeout()

    def _release_members(self, members: Sequence[Shared], step: str, error: MpicommError | None) -> None:
        """Synchronize, unmap the peers' memory, meet all ranks, free own memory; raise ``error``, if any.

        The ranks meet so that none frees memory that a slower peer still maps or uses. They need not meet again,
        because no rank uses the same memory again before the next allgather.
        """

        def synchronize_and_unmap() -> bool:
            """Return whether this rank may have sent messages that no receive takes."""
            with contextlib.ExitStack() as stack:
                for member in reversed(members):
                    stack.callback(member.close_peers)
                if self._has_device:
                    self.backend.synchronize()
                    self._log_unraised_error(step)
            return self._stray_messages or self.has_stray_messages()

        with contextlib.ExitStack() as stack:
            for member in reversed(members):
                stack.callback(member.close_own)  # whatever fails before, because a peer that is gone maps nothing
            if self._groups and self.intact:
                self._stray_messages |= any(self.group.allgather(f"{step}: unmap", synchronize_and_unmap))
            else:
                if self._peers_may_map_outbox and not self._groups:
                    stack.callback(self._meet_without_groups, step)
                synchronize_and_unmap()
            if error is not None:
                raise error

    def _log_unraised_error(self, step: str) -> None:
        """Log an error of work on the GPU that no call has raised, because the program may have used the results."""
        error = None if isinstance(self.backend, HostBackend) else self.backend.unraised_error()
        if error is not None:
            log.logger.error("%s: earlier calls on GPUs have failed, and their results are wrong: %s", step, error)

    def _meet_without_groups(self, step: str) -> None:
        try:
            monitored_barrier(self._comm, step, self.placement.here.timeout_s)
        except CollectiveTimeoutError:
            self._rank_is_missing = True
            raise
