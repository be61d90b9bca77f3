"""The calls of a window of host memory: MPI's, after a check that no buffer lies in device memory."""

from __future__ import annotations

from typing import Any, Literal

from mpi4py import MPI
from numpy import ndarray

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.location import is_on_device, refuse_stream

# MPI's methods, because `install` replaces the names.
_put, _get = MPI.Win.Put, MPI.Win.Get
_rput, _rget = MPI.Win.Rput, MPI.Win.Rget
_accumulate, _raccumulate = MPI.Win.Accumulate, MPI.Win.Raccumulate
_get_accumulate, _rget_accumulate = MPI.Win.Get_accumulate, MPI.Win.Rget_accumulate
_fetch_and_op, _compare_and_swap = MPI.Win.Fetch_and_op, MPI.Win.Compare_and_swap
_attach = MPI.Win.Attach
_fence = MPI.Win.Fence
_post = MPI.Win.Post
_start = MPI.Win.Start
_complete = MPI.Win.Complete
_wait = MPI.Win.Wait
_test = MPI.Win.Test
_lock = MPI.Win.Lock
_unlock = MPI.Win.Unlock
_lock_all = MPI.Win.Lock_all
_unlock_all = MPI.Win.Unlock_all
_flush = MPI.Win.Flush
_flush_all = MPI.Win.Flush_all
_flush_local = MPI.Win.Flush_local
_flush_local_all = MPI.Win.Flush_local_all
_sync = MPI.Win.Sync
_shared_query, _tomemory = MPI.Win.Shared_query, MPI.Win.tomemory


class HostWindowCalls(MPI.Win):
    """The calls of ``MPI.Win``. They have the results, the requests and the speed of MPI, and take no ``stream=``."""

    def Put(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy ``origin`` into the part of ``target_rank``; see mpi4py."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Put", stream, origin=origin)
        _put(self, origin, target_rank, target)

    def Get(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy from the part of ``target_rank`` into ``origin``; see mpi4py."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Get", stream, origin=origin)
        _get(self, origin, target_rank, target)

    def Rput(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Put`; return its request."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Rput", stream, origin=origin)
        return _rput(self, origin, target_rank, target)

    def Rget(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Get`; return its request."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Rget", stream, origin=origin)
        return _rget(self, origin, target_rank, target)

    def Accumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> None:
        """Combine ``origin`` with the part of ``target_rank``, element by element; see mpi4py."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Accumulate", stream, origin=origin)
        _accumulate(self, origin, target_rank, target, op)

    def Raccumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> MPI.Request:
        """Start `Accumulate`; return its request."""
        if type(origin) is not ndarray or origin.base is not None or stream is not None:
            require_on_host("Raccumulate", stream, origin=origin)
        return _raccumulate(self, origin, target_rank, target, op)

    def Get_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> None:
        """Do as `Accumulate`, and copy the previous elements into ``result``; see mpi4py."""
        require_on_host("Get_accumulate", stream, origin=origin, result=result)
        _get_accumulate(self, origin, result, target_rank, target, op)

    def Rget_accumulate(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> MPI.Request:
        """Start `Get_accumulate`; return its request."""
        require_on_host("Rget_accumulate", stream, origin=origin, result=result)
        return _rget_accumulate(self, origin, result, target_rank, target, op)

    def Fetch_and_op(
        self,
        origin: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
    ) -> None:
        """Do as `Get_accumulate` with one element; see mpi4py."""
        require_on_host("Fetch_and_op", stream, origin=origin, result=result)
        _fetch_and_op(self, origin, result, target_rank, target_disp, op)

    def Compare_and_swap(
        self,
        origin: Any,
        compare: Any,
        result: Any,
        target_rank: int,
        target_disp: int = 0,
        *,
        stream: Any = None,
    ) -> None:
        """Store ``origin`` if the element equals ``compare``; copy the previous element into ``result``; see mpi4py."""
        require_on_host("Compare_and_swap", stream, origin=origin, compare=compare, result=result)
        _compare_and_swap(self, origin, compare, result, target_rank, target_disp)

    # Synchronisation.

    def Fence(self, assertion: int = 0, *, stream: Any = None) -> None:
        """End an epoch of all ranks, and begin the next; see mpi4py."""
        refuse_stream("Win.Fence", stream)
        _fence(self, assertion)

    def Post(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Let the ranks of ``group`` access this rank's part; see mpi4py."""
        refuse_stream("Win.Post", stream)
        _post(self, group, assertion)

    def Start(self, group: MPI.Group, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of the ranks of ``group``; see mpi4py."""
        refuse_stream("Win.Start", stream)
        _start(self, group, assertion)

    def Complete(self, *, stream: Any = None) -> None:
        """End the epoch of `Start`; see mpi4py."""
        refuse_stream("Win.Complete", stream)
        _complete(self)

    def Wait(self, *, stream: Any = None) -> Literal[True]:
        """End the epoch of `Post`; see mpi4py."""
        refuse_stream("Win.Wait", stream)
        return _wait(self)

    def Test(self, *, stream: Any = None) -> bool:
        """Return whether the epoch of `Post` is over; see mpi4py."""
        refuse_stream("Win.Test", stream)
        return _test(self)

    def Lock(self, rank: int, lock_type: int = MPI.LOCK_EXCLUSIVE, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the part of ``rank``; see mpi4py."""
        refuse_stream("Win.Lock", stream)
        _lock(self, rank, lock_type, assertion)

    def Unlock(self, rank: int, *, stream: Any = None) -> None:
        """End the epoch of `Lock`; see mpi4py."""
        refuse_stream("Win.Unlock", stream)
        _unlock(self, rank)

    def Lock_all(self, assertion: int = 0, *, stream: Any = None) -> None:
        """Begin to access the parts of all ranks; see mpi4py."""
        refuse_stream("Win.Lock_all", stream)
        _lock_all(self, assertion)

    def Unlock_all(self, *, stream: Any = None) -> None:
        """End the epoch of `Lock_all`; see mpi4py."""
        refuse_stream("Win.Unlock_all", stream)
        _unlock_all(self)

    def Flush(self, rank: int, *, stream: Any = None) -> None:
        """Complete all accesses of this rank to the part of ``rank``; see mpi4py."""
        refuse_stream("Win.Flush", stream)
        _flush(self, rank)

    def Flush_all(self, *, stream: Any = None) -> None:
        """Complete all accesses of this rank; see mpi4py."""
        refuse_stream("Win.Flush_all", stream)
        _flush_all(self)

    def Flush_local(self, rank: int, *, stream: Any = None) -> None:
        """Complete all accesses to the part of ``rank`` on this rank; see mpi4py."""
        refuse_stream("Win.Flush_local", stream)
        _flush_local(self, rank)

    def Flush_local_all(self, *, stream: Any = None) -> None:
        """Complete all accesses on this rank; see mpi4py."""
        refuse_stream("Win.Flush_local_all", stream)
        _flush_local_all(self)

    def Sync(self, *, stream: Any = None) -> None:
        """Order accesses of this rank to its part; see mpi4py."""
        refuse_stream("Win.Sync", stream)
        _sync(self)

    # The window itself.

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return the part of ``rank`` of `Allocate_shared`, as a buffer, and its displacement unit; see mpi4py."""
        return _shared_query(self, rank)

    def tomemory(self) -> Any:
        """Return this rank's part, as a buffer; see mpi4py."""
        return _tomemory(self)

    def Attach(self, memory: Any) -> None:
        """Add host memory to a window of `Create_dynamic`; see mpi4py."""
        require_on_host("Attach", None, memory=memory)
        _attach(self, memory)


def require_on_host(what: str, stream: Any, **buffers: Any) -> None:
    """Raise `InvalidUsageError` for a buffer in device memory, which MPI cannot access, and for a stream."""
    refuse_stream(f"Win.{what}", stream)
    for name, buffer in buffers.items():
        if (type(buffer) is not ndarray or buffer.base is not None) and is_on_device(buffer):
            raise InvalidUsageError(
                f"Win.{what}: {name} lies in device memory, and the window in host memory, where MPI carries the call "
                "out: copy it to the host, or create the window with device memory"
            )
