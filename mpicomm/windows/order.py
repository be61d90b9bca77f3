"""The order of a window's calls: the epochs by MPI's rules, and the streams on which the calls go."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.devices.cuda.types import GpuBackend
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
        self._locked[target] = lock_type

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


_DEFAULT_STREAMS = (0, 1, 2)  # the null stream, cudaStreamLegacy and cudaStreamPerThread


class StreamUse:
    """The streams on which this rank has accessed a window. All methods are local, and do not block.

    A synchronisation follows the accesses on all streams since the synchronisation before it. The next accesses on
    other streams follow it. As with collectives, this does not hold between a captured graph and other work, because
    CUDA refuses events across a capture. The program orders launches of its graphs.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._stream = 0  # the stream of the last synchronisation
        self._mark: Any = None  # the point after the last synchronisation; None if no other work has to follow it
        self._followed: set[int] = set()  # streams that follow the last synchronisation
        self._accesses: dict[int, Any] = {}  # the point after the last access, by stream
        self._accessed_here = False  # whether a default stream has accesses after a synchronisation on it

    def resolve(self, stream: Any, array: Any) -> tuple[int, bool]:
        """Return the address of a ``stream=`` argument, and whether the stream captures a graph; as ``Backend.stream``.

        Raises the error of earlier work, if there is one.
        """
        eager = self._backend.eager_stream(stream, array)  # one question is cheaper than two
        return (self._backend.stream(stream, array), True) if eager is None else (eager, False)

    def before_access(self, stream: int, *, captures: bool) -> None:
        """Let ``stream``, on which an access goes next, follow the last synchronisation."""
        if self._mark is not None and stream != self._stream and stream not in self._followed and not captures:
            self._backend.side_streams.follow(stream, self._mark)
            self._followed.add(stream)

    def after_access(self, stream: int, *, captures: bool) -> None:
        """Note an access on ``stream``, which is enqueued."""
        if captures:
            return
        # A mark takes a microsecond. It is needed because the program may destroy the stream before the next
        # synchronisation. No program destroys a default stream, so that synchronisation waits for the stream itself.
        if stream in _DEFAULT_STREAMS and stream == self._stream:
            self._accessed_here = True
        else:
            self._accesses[stream] = self._backend.side_streams.mark(stream, self._accesses.get(stream))

    def before_synchronisation(self, stream: int, *, captures: bool) -> None:
        """Let ``stream``, on which a synchronisation goes next, follow all accesses and the last synchronisation."""
        if captures:
            return
        for mark in self._accesses.values():
            self._backend.side_streams.follow(stream, mark)
        if stream == self._stream:
            return
        if self._accessed_here:
            self._backend.side_streams.wait_stream(stream, self._stream)
        elif self._mark is not None:
            self._backend.side_streams.follow(stream, self._mark)

    def after_synchronisation(self, stream: int, *, captures: bool) -> None:
        """Note a synchronisation on ``stream``, which is enqueued."""
        if not captures:
            self._stream, self._mark = stream, self._backend.side_streams.mark(stream)
            self._accesses.clear()
            self._accessed_here = False
            self._followed.clear()
