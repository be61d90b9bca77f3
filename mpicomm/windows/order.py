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
        self.fence_open = False
        self.fence_used = False
        """Whether this rank has accessed memory since the last fence."""
        self.started: int | None = None
        """The targets of `Start`. A set of ranks is a number: bit r stands for rank r."""
        self.posted: int | None = None
        """The origins of `Post`."""
        self.locked: dict[int, int] = {}
        """The types of the locks that this rank holds or awaits, by rank."""
        self.locked_all = False

    def require_access(self, what: str, target: int) -> None:
        """Raise unless an epoch lets this rank access the part of ``target``."""
        if self.locked_all or target in self.locked or (self.started is not None and self.started >> target & 1):
            return
        if not self.fence_open:
            raise wrong(f"{what}: target_rank={target} is in no epoch: call Fence, Start, Lock or Lock_all before it")
        self.fence_used = True

    def require_passive(self, what: str, target: int | None) -> None:
        """Raise unless this rank holds a lock of ``target``; None stands for any rank."""
        if not (self.locked_all or (bool(self.locked) if target is None else target in self.locked)):
            where = "" if target is None else f"rank={target} "
            raise wrong(f"{what}: {where}is not locked: call Lock or Lock_all before it")

    def require_no(self, what: str, *others: str) -> None:
        """Raise if an epoch of one of the calls ``others`` is open."""
        open_epochs = {
            "Start": (self.started is not None, "Complete"),
            "Post": (self.posted is not None, "Wait"),
            "Lock": (bool(self.locked) or self.locked_all, "Unlock_all" if self.locked_all else "Unlock"),
            "Lock_all": (self.locked_all, "Unlock_all"),
        }
        for other in others:
            is_open, end = open_epochs[other]
            if is_open:
                held = f" of {name_ranks(sorted(self.locked))}" if end == "Unlock" else ""
                raise wrong(f"{what}: the epoch of {other}{held} is open: call {end} before it")

    def end_fence(self, what: str, *others: str) -> None:
        """End the fence epoch, because the call ``what`` begins another one. Raise as `require_no` before."""
        self.require_no(what, *others)
        if self.fence_used:
            raise wrong(f"{what}: the epoch of the last Fence has calls that are not complete: call Fence before it")
        self.fence_open = False


def wrong(text: str) -> RefusedByMpiError:
    """Return the error for a call in a wrong epoch."""
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
