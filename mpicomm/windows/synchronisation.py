"""Synchronisation: the epochs of a window on this rank, in the order of streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mpi4py import MPI

from mpicomm.activity import layout
from mpicomm.activity.reading import read_calls
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.host import HostBackend
from mpicomm.errors import InvalidUsageError, name_ranks
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.spec import index_of
from mpicomm.windows.access_order import AccessOrder
from mpicomm.windows.memory import WindowMemory
from mpicomm.windows.steps import COMPLETES, FENCES, POSTS, Steps, ranks_in

_ASSERTIONS = {
    "Win.Fence": MPI.MODE_NOSTORE | MPI.MODE_NOPUT | MPI.MODE_NOPRECEDE | MPI.MODE_NOSUCCEED,
    "Win.Post": MPI.MODE_NOCHECK | MPI.MODE_NOSTORE | MPI.MODE_NOPUT,
    "Win.Start": MPI.MODE_NOCHECK,
    "Win.Lock": MPI.MODE_NOCHECK,
    "Win.Lock_all": MPI.MODE_NOCHECK,
}
"""The assertions that MPI allows in each call. Only MODE_NOSUCCEED changes what a call does."""


class Synchronisation:
    """The epochs of this rank. All calls are stream-ordered, and local except `Fence`."""

    def _begin(self, memory: WindowMemory, array: Any, group: MPI.Group) -> None:
        """Begin without an epoch. Local. ``array`` of this rank's part has the library whose stream is current."""
        self._memory, self._array, self._group = memory, array, group
        self._owner = owner = memory.owner
        self._fence_open = False
        self._fence_used = False
        """Whether this rank has accessed memory since the last fence."""
        self._targets: int | None = None
        """The targets of `Start`. Sets of ranks are bit masks: see `ranks_in`."""
        self._posted: int | None = None
        """The origins of `Post`."""
        self._locked: dict[int, int] = {}
        """The types of the locks that this rank holds or waits for, by rank."""
        self._locked_all = False
        assert not isinstance(owner.backend, HostBackend)
        self._backend: GpuBackend = owner.backend
        self._rank = owner.node.rank
        self._size = owner.node.size
        self._everyone = (1 << self._size) - 1
        self._is_waited: Callable[[], bool] = lambda: True
        self._without_atomics: dict[int, str] | None = None
        self._steps = Steps(self._backend, memory.boards, self._rank)
        self._order = AccessOrder(self._backend)
        self._row = memory.row
        self._is_interrupted = False

    def _require_usable(self, what: str) -> None:
        """Raise if the window or its communicator was freed, or if an earlier error broke the communicator."""
        if self._memory.closed:
            raise RefusedByMpiError(f"{what}: the window was freed: create another", MPI.ERR_WIN)
        self._owner.require_usable(what)
        if self._is_interrupted:
            raise InvalidUsageError(
                f"{what}: an exception, such as one of a signal handler, has ended a synchronisation of this window "
                "halfway, so other ranks may wait for it: free the communicator, and create both again"
            )

    def Fence(self, assertion: int = 0, *, stream: Any = None) -> None:
        """End an epoch of all ranks, and begin the next. Collective. It holds the stream, not the host."""
        self._check("Win.Fence", assertion)
        with self._synchronising(stream) as resolved:
            self._require_no_epoch("Win.Fence", "Start", "Post", "Lock")
            self._fence_open, self._fence_used = not assertion & MPI.MODE_NOSUCCEED, False
            self._row.log(0).post("Win.Fence")
            others = self._everyone & ~(1 << self._rank)
            self._steps.signal_and_wait(FENCES, others, others, resolved)

    def Post(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Let the ranks of ``group`` access this rank's part, after all earlier work of the stream."""
        self._check("Win.Post", assertion)
        origins = self._rank_mask(group, "Win.Post")
        with self._synchronising(stream) as resolved:
            self._end_fence("Win.Post", "Post")
            self._posted = origins
            self._row.count(layout.POSTED, origins)
            self._steps.signal_and_wait(POSTS, origins, 0, resolved)

    def Start(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of the ranks of ``group``. The stream waits for their `Post`."""
        self._check("Win.Start", assertion)
        targets = self._rank_mask(group, "Win.Start")
        with self._synchronising(stream) as resolved:
            self._end_fence("Win.Start", "Start", "Lock")
            self._targets = targets
            self._steps.signal_and_wait(POSTS, 0, targets, resolved)

    def Complete(self, *, stream: Any = None) -> None:
        """End the epoch of `Start`."""
        self._check("Win.Complete")
        with self._synchronising(stream) as resolved:
            targets, self._targets = self._targets, None
            if targets is None:
                raise _epoch_error("Win.Complete: no Start came before it")
            self._row.count(layout.COMPLETED, targets)
            self._steps.signal_and_wait(COMPLETES, targets, 0, resolved)

    def Wait(self, *, stream: Any = None) -> Literal[True]:
        """End the epoch of `Post`. The stream waits for the `Complete` of all ranks of its group."""
        self._check("Win.Wait")
        origins = self._origins("Win.Wait")
        with self._synchronising(stream) as resolved:
            # Before the wait, because a Ctrl-C may end it: a second Wait for this epoch would take signals of the next.
            self._posted = None
            self._steps.signal_and_wait(COMPLETES, 0, origins, resolved)
            self._is_waited = self._backend.completion(resolved)
        return True

    def Test(self, *, stream: Any = None) -> bool:
        """Return whether all ranks of `Post` have called `Complete`; if so, do as `Wait`. Not capturable.

        It blocks for some microseconds.
        """
        self._check("Win.Test")
        origins = self._origins("Win.Test")
        # The last Wait may still be in flight. It advances the counts with which this call compares.
        have_signalled = self._is_waited() and self._steps.have_signalled(COMPLETES, origins)
        return (have_signalled or self._have_completed(origins)) and self.Wait(stream=stream)

    def _origins(self, what: str) -> int:
        """Return the origins of the exposure epoch."""
        if self._posted is None:
            raise _epoch_error(f"{what}: no Post came before it")
        return self._posted

    def _have_completed(self, origins: int) -> bool:
        """Return whether the hosts of the ranks have called `Complete`. Their GPUs may do so later.

        A program that knows of these calls, for example from a barrier, expects that `Test` returns true. This reads
        the count that `Complete` has written on the peer's page. It orders no data: the wait that follows pairs with
        the signal of the peer's GPU.
        """
        places, key = self._owner.placement.places, self._row.words[layout.KEY]
        for origin in ranks_in(origins):
            calls = read_calls(places[origin].pid, key)
            if calls is None or calls.completed[self._rank] != self._row.posted(origin):
                return False
        return True

    def Lock(self, rank: int, lock_type: int = MPI.LOCK_EXCLUSIVE, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the part of ``rank``, which takes no part. The stream waits for the lock."""
        self._check("Win.Lock", assertion)
        if rank == MPI.PROC_NULL:
            return
        self._require_rank("Win.Lock", "rank", rank)
        self._require_atomics("Win.Lock", 1 << rank)
        exclusive = lock_type == MPI.LOCK_EXCLUSIVE
        # A rank that holds a lock lets no other rank pass, because that rank may wait for the lock.
        yields = not (self._locked or self._locked_all)
        with self._synchronising(stream) as resolved:
            if lock_type not in (MPI.LOCK_EXCLUSIVE, MPI.LOCK_SHARED):
                raise RefusedByMpiError(
                    f"Win.Lock: lock_type={lock_type}: pass MPI.LOCK_EXCLUSIVE or MPI.LOCK_SHARED", MPI.ERR_LOCKTYPE
                )
            if rank in self._locked:
                raise _epoch_error(f"Win.Lock: this rank has locked rank {rank} already: call Unlock({rank}) before it")
            self._end_fence("Win.Lock", "Start", "Lock_all")
            self._locked[rank] = lock_type
            self._steps.lock(0, 1 << rank, resolved, exclusive=exclusive, yields=yields and not exclusive)

    def Unlock(self, rank: int, *, stream: Any = None) -> None:
        """End the epoch of `Lock`, after all accesses of this rank."""
        self._check("Win.Unlock")
        if rank == MPI.PROC_NULL:
            return
        self._require_rank("Win.Unlock", "rank", rank)
        with self._synchronising(stream) as resolved:
            if rank not in self._locked:
                raise _epoch_error(f"Win.Unlock: rank={rank} is not locked: call Lock before it")
            lock_type = self._locked.pop(rank)
            self._steps.lock(1 << rank, 0, resolved, exclusive=lock_type == MPI.LOCK_EXCLUSIVE)

    def Lock_all(self, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of all ranks with shared locks."""
        self._check("Win.Lock_all", assertion)
        self._require_atomics("Win.Lock_all", self._everyone)
        with self._synchronising(stream) as resolved:
            self._end_fence("Win.Lock_all", "Start", "Lock")
            self._locked_all = True
            self._steps.lock(0, self._everyone, resolved, exclusive=False, yields=True)

    def Unlock_all(self, *, stream: Any = None) -> None:
        """End the epoch of `Lock_all`."""
        self._check("Win.Unlock_all")
        with self._synchronising(stream) as resolved:
            if not self._locked_all:
                raise _epoch_error("Win.Unlock_all: no Lock_all came before it")
            self._locked_all = False
            self._steps.lock(self._everyone, 0, resolved, exclusive=False)

    def Flush(self, rank: int, *, stream: Any = None) -> None:
        """Let later work of the stream follow all accesses of this rank to the part of ``rank``."""
        self._flush("Win.Flush", rank, stream)

    def Flush_all(self, *, stream: Any = None) -> None:
        """Let later work of the stream follow all accesses of this rank."""
        self._flush("Win.Flush_all", None, stream)

    def Flush_local(self, rank: int, *, stream: Any = None) -> None:
        """Do as `Flush`."""
        self._flush("Win.Flush_local", rank, stream)

    def Flush_local_all(self, *, stream: Any = None) -> None:
        """Do as `Flush_all`."""
        self._flush("Win.Flush_local_all", None, stream)

    def _flush(self, what: str, rank: int | None, stream: Any) -> None:
        self._check(what)
        if rank == MPI.PROC_NULL:
            return
        if not what.endswith("_all"):
            self._require_rank(what, "rank", rank)
        if not (self._locked_all or (bool(self._locked) if rank is None else rank in self._locked)):
            named = "" if rank is None else f"rank={rank} "
            raise _epoch_error(f"{what}: {named}is not locked: call Lock or Lock_all before it")
        with self._synchronising(stream):
            pass  # a stream orders the accesses of its rank

    def Sync(self, *, stream: Any = None) -> None:
        """Let later work of the stream see all that other ranks have published to this rank."""
        self._check("Win.Sync")
        with self._synchronising(stream):
            pass  # a stream orders the accesses of its rank

    def _require_access(self, what: str, target: int) -> None:
        """Raise unless an epoch lets this rank access the part of ``target``."""
        if self._locked_all or target in self._locked or (self._targets is not None and self._targets >> target & 1):
            return
        if not self._fence_open:
            raise _epoch_error(
                f"{what}: target_rank={target} is in no epoch: call Fence, Start, Lock or Lock_all before it"
            )
        self._fence_used = True

    def _require_no_epoch(self, what: str, *others: str) -> None:
        """Raise if an epoch of one of the calls ``others`` is open."""
        open_epochs = {
            "Start": (self._targets is not None, "Complete"),
            "Post": (self._posted is not None, "Wait"),
            "Lock": (bool(self._locked) or self._locked_all, "Unlock_all" if self._locked_all else "Unlock"),
            "Lock_all": (self._locked_all, "Unlock_all"),
        }
        for other in others:
            is_open, end = open_epochs[other]
            if is_open:
                held = f" of {name_ranks(sorted(self._locked))}" if end == "Unlock" else ""
                raise _epoch_error(f"{what}: the epoch of {other}{held} is open: call {end} before it")

    def _end_fence(self, what: str, *others: str) -> None:
        """End the fence epoch, because the call ``what`` begins another one. Raise as `_require_no_epoch` before."""
        self._require_no_epoch(what, *others)
        if self._fence_used:
            raise _epoch_error(
                f"{what}: the epoch of the last Fence has calls that are not complete: call Fence before it"
            )
        self._fence_open = False

    def _require_atomics(self, what: str, ranks: int) -> None:
        """Raise unless the links to ``ranks`` carry atomics. Local."""
        if self._without_atomics is None:
            self._without_atomics = {
                rank: link.path
                for rank, link in enumerate(self._owner.links())
                if not (link.native_atomics or (link.path == "self" and self._owner.kind != "staged"))
            }
        for rank in ranks_in(ranks):
            if rank in self._without_atomics:
                path = self._without_atomics[rank]
                raise InvalidUsageError(
                    f"{what}: the link to the memory of rank {rank} ({path}) carries no atomics, which locks and "
                    "accumulates need: use Put and Get between Fence, or GPUs with NVLink"
                )

    def _require_rank(self, what: str, name: str, rank: Any) -> None:
        """Raise unless ``rank`` is a rank of the window."""
        if not 0 <= index_of(rank, name, what) < self._size:
            raise RefusedByMpiError(f"{what}: {name}={rank}: use 0 to {self._size - 1}", MPI.ERR_RANK)

    def _check(self, what: str, assertion: int = 0) -> None:
        self._require_usable(what)
        if index_of(assertion, "assertion", what) & ~_ASSERTIONS.get(what, 0):
            raise RefusedByMpiError(
                f"{what}: assertion={assertion} has other modes than the MPI.MODE_* of {what}", MPI.ERR_ASSERT
            )

    @contextlib.contextmanager
    def _synchronising(self, stream: Any) -> Iterator[int]:
        """Give the stream of a synchronisation in a ``with`` block, after all accesses of this rank."""
        resolved, captures = self._order.resolve(stream, self._array)
        self._order.before_synchronisation(resolved, captures=captures)
        try:
            yield resolved
            self._order.after_synchronisation(resolved, captures=captures)
        except RefusedByMpiError:
            raise  # it comes before anything changes
        except BaseException:
            # The epoch may have changed without its step: `Unlock` would give up a lock that this rank does not hold.
            self._is_interrupted = True
            raise
        # The epoch and its steps belong together from here on. An exception only ends the wait of the host.
        if self._backend.completes:
            self._backend.complete(resolved)

    def _rank_mask(self, group: Any, what: str) -> int:
        if not isinstance(group, MPI.Group) or group == MPI.GROUP_NULL:
            raise RefusedByMpiError(
                f"{what}: group={group!r} is no group: pass win.Get_group().Incl(...)", MPI.ERR_GROUP
            )
        ranks = group.Translate_ranks(range(group.size), self._group)
        if MPI.UNDEFINED in ranks:
            raise RefusedByMpiError(f"{what}: group has ranks that the window does not have", MPI.ERR_GROUP)
        return sum(1 << rank for rank in set(ranks))


def _epoch_error(text: str) -> RefusedByMpiError:
    return RefusedByMpiError(text, MPI.ERR_RMA_SYNC)
