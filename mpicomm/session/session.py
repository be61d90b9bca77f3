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
        # All ranks have the same things in the same order, so the index names the thing on all ranks.
        position = next(number for number, each in enumerate(self._shared) if each is shared)  # == refuses arrays
        step = f"{what} {position}: close"
        late = self._meet(step)
        try:
            self._give_back([shared], step, late)
        finally:
            self._shared = tuple(each for each in self._shared if each is not shared)

    def check(self, stream: Any) -> None:
        """Wait for a stream, then raise the error of its work; see ``Communicator.check``. Local."""
        self._require_unfreed("check")
        self.require_intact("check")
        if self._has_device:
            self.backend.synchronize(self.backend.stream(stream))
            self.backend.check()

    def suspend(self, *, keep: bool) -> None:
        """Give device memory back; see ``Communicator.suspend``. Collective, blocking."""
        self._require_unfreed("suspend")
        if self.is_suspended:
            return
        self.set_up("suspend")
        self.require_intact("suspend")

        def memories() -> list[SharedSegments]:
            members = [member for member in (*self._beside, *self._shared) if isinstance(member, Suspendable)]
            return [shared for member in members for shared in member.memories() if shared.content is not None]

        suspension = Suspension(self.group, self.backend, self.kind)
        suspension.save(memories, self.before_suspension, keep=keep)
        # From here on no call may use the memory, also if a step fails.
        self._suspension, self._is_shut = suspension, True
        suspension.give_back()

    def resume(self) -> None:
        """Take device memory again; see ``Communicator.resume``. Collective, blocking."""
        self._require_unfreed("resume")
        suspension = self._suspension
        if suspension is None:
            return
        self.require_intact("resume")

        suspension.take_back()
        self._suspension, self._is_shut = None, False

    def close(self) -> None:
        """Release everything. Collective, blocking; local if the communicator is broken. Idempotent.

        If the communicator is not set up, this sets nothing up. Its ranks then wait for each other only if
        `_opened_unasked`.
        """
        if self._freed:
            return
        if not (self._groups or self._has_device or self._shared or self._beside or self._opened_unasked):
            # Most communicators of a program end so, because they carry only host messages.
            self._freed = self._is_shut = True
            if self._row is not None:
                self._row.hide()
            return
        if self._groups:
            self.group.extend_deadline = self.awaited_elsewhere
        late = self._meet("Free")
        if self.tracer is not None and late is None and self._groups and self.intact:
            self.tracer.read_clocks_again(self.group, self.private)
        self._freed = self._is_shut = True
        everything = [*reversed(self._shared), *self._beside]
        try:
            self._give_back(everything, "Free", late)
        except PeerError:
            # A Ctrl-C may take a rank out of its `close`. That rank comes to `close` once more, and may still send over
            # the private communicator. So nothing frees that communicator, because MPI would reuse its number.
            self._missed = True
            raise
        finally:
            self.row.hide()
            self._shared = ()
            if self._has_device:
                self.backend.close()
            # MPI gives the number of a freed communicator to another, which would get messages that are left.
            if self._private is not None and self.intact and not self._left_messages:
                self._private.Free()

    def leave_by(self, error: BaseException) -> None:
        """Let `close` name ``error`` to ranks that come later, and in its own error if ranks do not come. Local."""
        reason = f"rank {self.placement.rank} left its with block by {type(error).__name__}: {error}"
        if self._groups:
            self.group.absence_reason = lambda ranks: reason

    def release(self) -> None:
        """Unmap the peers' memory before MPI_Finalize; local, without a barrier.

        The memory of this rank lives until the process ends, because slower peers may still access it.
        """
        if self._freed:
            return
        self._freed = self._is_shut = True
        with contextlib.suppress(MpicommError):
            self.backend.synchronize()
            self._tell_error("MPI_Finalize")
            for member in (*self._shared, *self._beside):
                member.close_peers()

    @property
    def _opened_unasked(self) -> bool:
        """Whether peers may have opened this rank's outbox. A peer needs no set-up for it, and tells no other rank."""
        return self.placement.here.sends_headers

    def _meet(self, step: str) -> MpicommError | None:
        """Wait until all ranks are about to release the same things; return the error of a rank that does not come.

        After a timeout of an earlier call no rank waits: ranks that have given up tell the others.

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
        """Return the timeout of an earlier call, if there was one. Local."""
        self._tell_error(step)
        if isinstance(self._part_error, CollectiveTimeoutError):
            return self._part_error
        try:
            self.backend.check()
        except CollectiveTimeoutError as error:
            return error
        except MpicommError:
            return None
        return self.timeout_on_host()

    def _give_back(self, shared: Sequence[Shared], step: str, late: MpicommError | None) -> None:
        """Stop work, unmap the peers' memory, wait until all ranks have done so, free own memory; raise ``late``.

        The wait keeps a rank from freeing memory that a slower peer still maps or uses. No second wait is needed,
        because no rank uses the same memory again before the next allgather.
        """

        def stop_and_unmap() -> bool:
            """Return whether this rank may have sent messages that no receive takes."""
            with contextlib.ExitStack() as then:
                for member in reversed(shared):
                    then.callback(member.close_peers)
                if self._has_device:
                    self.backend.synchronize()
                    self._tell_error(step)
            return self._left_messages or self.leaves_messages()

        with contextlib.ExitStack() as last:
            for member in reversed(shared):
                last.callback(member.close_own)  # whatever fails before, because a peer that is gone maps nothing
            if self._groups and self.intact:
                self._left_messages |= any(self.group.allgather(f"{step}: unmap", stop_and_unmap))
            else:
                if self._opened_unasked and not self._groups:
                    last.callback(self._meet_without_groups, step)
                stop_and_unmap()
            if late is not None:
                raise late

    def _tell_error(self, step: str) -> None:
        """Log the error of work on the GPU if no call has raised it, because the program may have used the results."""
        error = None if isinstance(self.backend, HostBackend) else self.backend.untold()
        if error is not None:
            log.logger.error("%s: earlier calls on GPUs have failed, and their results are wrong: %s", step, error)

    def _meet_without_groups(self, step: str) -> None:
        try:
            monitored_barrier(self._comm, step, self.placement.here.timeout_s)
        except CollectiveTimeoutError:
            self._missed = True
            raise
