"""Epochs: which ranks this rank may access through a window now, by MPI's rules. All methods are local."""

from __future__ import annotations

from mpi4py import MPI

from mpicomm.errors import name_ranks
from mpicomm.mpi.faults import RefusedByMpiError


class Epochs:
    """The access epochs and the exposure epoch of one window on this rank. Every fault is a `RefusedByMpiError`."""

    def __init__(self) -> None:
        self._fence_open = False
        self._fence_used = False  # whether this rank has accessed memory since the last fence
        self._started: frozenset[int] | None = None
        self._posted: frozenset[int] | None = None
        self._locked: dict[int, int] = {}
        self._locked_all = False

    def require_access(self, what: str, target: int) -> None:
        """Raise unless an epoch lets this rank access the part of ``target``."""
        if self._locked_all or target in self._locked or (self._started is not None and target in self._started):
            return
        if not self._fence_open:
            raise _wrong(f"{what}: target_rank={target} is in no epoch: call Fence, Start, Lock or Lock_all before it")
        self._fence_used = True

    def require_passive(self, what: str, target: int | None) -> None:
        """Raise unless this rank holds a lock of ``target``; None stands for any rank."""
        if not (self._locked_all or (bool(self._locked) if target is None else target in self._locked)):
            where = "" if target is None else f"rank={target} "
            raise _wrong(f"{what}: {where}is not locked: call Lock or Lock_all before it")

    def fence(self, *, closes: bool) -> None:
        """Begin a new fence epoch, or none if ``closes``."""
        self._require_no("Win.Fence", others=("Start", "Post", "Lock"))
        self._fence_open, self._fence_used = not closes, False

    def start(self, targets: frozenset[int]) -> None:
        """Begin an access epoch for ``targets``."""
        self._require_no("Win.Start", others=("Start", "Lock"))
        self._end_fence("Win.Start")
        self._started = targets

    def complete(self) -> frozenset[int]:
        """End the epoch of `start`, and return its targets."""
        if self._started is None:
            raise _wrong("Win.Complete: no Start came before it")
        targets, self._started = self._started, None
        return targets

    def post(self, origins: frozenset[int]) -> None:
        """Begin an exposure epoch for ``origins``."""
        self._require_no("Win.Post", others=("Post",))
        self._end_fence("Win.Post")
        self._posted = origins

    def exposed_to(self, what: str) -> frozenset[int]:
        """Return the origins of the exposure epoch."""
        if self._posted is None:
            raise _wrong(f"{what}: no Post came before it")
        return self._posted

    def end_exposure(self) -> None:
        """End the epoch of `post`."""
        self._posted = None

    @property
    def locks(self) -> bool:
        """Whether this rank holds or awaits a lock."""
        return bool(self._locked) or self._locked_all

    def lock(self, target: int, lock_type: int) -> None:
        """Begin an access epoch for ``target`` alone."""
        if lock_type not in (MPI.LOCK_EXCLUSIVE, MPI.LOCK_SHARED):
            raise RefusedByMpiError(
                f"Win.Lock: lock_type={lock_type}: pass MPI.LOCK_EXCLUSIVE or MPI.LOCK_SHARED", MPI.ERR_LOCKTYPE
            )
        if target in self._locked:
            raise _wrong(f"Win.Lock: this rank has locked rank {target} already: call Unlock({target}) before it")
        self._require_no("Win.Lock", others=("Start", "Lock_all"))
        self._end_fence("Win.Lock")
        self._locked = {**self._locked, target: lock_type}  # a new one, so that a copy of this object keeps its own

    def unlock(self, target: int) -> int:
        """End the epoch of `lock`, and return the type of the lock."""
        if target not in self._locked:
            raise _wrong(f"Win.Unlock: rank={target} is not locked: call Lock before it")
        return self._locked.pop(target)

    def lock_all(self) -> None:
        """Begin an access epoch for all ranks."""
        self._require_no("Win.Lock_all", others=("Start", "Lock"))
        self._end_fence("Win.Lock_all")
        self._locked_all = True

    def unlock_all(self) -> None:
        """End the epoch of `lock_all`."""
        if not self._locked_all:
            raise _wrong("Win.Unlock_all: no Lock_all came before it")
        self._locked_all = False

    def require_none(self, what: str) -> None:
        """Raise if an epoch is open that another call must end."""
        self._require_no(what, others=("Start", "Post", "Lock"))

    def _end_fence(self, what: str) -> None:
        if self._fence_used:
            raise _wrong(f"{what}: the epoch of the last Fence has calls that are not complete: call Fence before it")
        self._fence_open = False

    def _require_no(self, what: str, *, others: tuple[str, ...]) -> None:
        open_epochs = {
            "Start": (self._started is not None, "Complete"),
            "Post": (self._posted is not None, "Wait"),
            "Lock": (self.locks, "Unlock_all" if self._locked_all else "Unlock"),
            "Lock_all": (self._locked_all, "Unlock_all"),
        }
        for other in others:
            is_open, end = open_epochs[other]
            if is_open:
                held = f" of {name_ranks(sorted(self._locked))}" if end == "Unlock" else ""
                raise _wrong(f"{what}: the epoch of {other}{held} is open: call {end} before it")


def _wrong(text: str) -> RefusedByMpiError:
    return RefusedByMpiError(text, MPI.ERR_RMA_SYNC)
