"""The calls of a window of host memory: MPI's, after a check that no buffer lies in device memory."""

from __future__ import annotations

from typing import Any

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


class HostWindowCalls(MPI.Win):
    """The calls of ``MPI.Win`` that take buffers. They have the results, the requests and the speed of MPI."""

    def Put(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy ``origin`` into the part of ``target_rank``; see mpi4py."""
        require_on_host("Put", stream, origin=origin)
        _put(self, origin, target_rank, target)

    def Get(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> None:
        """Copy from the part of ``target_rank`` into ``origin``; see mpi4py."""
        require_on_host("Get", stream, origin=origin)
        _get(self, origin, target_rank, target)

    def Rput(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Put`; return its request."""
        require_on_host("Rput", stream, origin=origin)
        return _rput(self, origin, target_rank, target)

    def Rget(self, origin: Any, target_rank: int, target: Any = None, *, stream: Any = None) -> MPI.Request:
        """Start `Get`; return its request."""
        require_on_host("Rget", stream, origin=origin)
        return _rget(self, origin, target_rank, target)

    def Accumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> None:
        """Combine ``origin`` with the part of ``target_rank``, element by element; see mpi4py."""
        require_on_host("Accumulate", stream, origin=origin)
        _accumulate(self, origin, target_rank, target, op)

    def Raccumulate(
        self, origin: Any, target_rank: int, target: Any = None, op: MPI.Op = MPI.SUM, *, stream: Any = None
    ) -> MPI.Request:
        """Start `Accumulate`; return its request."""
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

    def Attach(self, memory: Any) -> None:
        """Add host memory to a window of `Create_dynamic`; see mpi4py."""
        require_on_host("Attach", None, memory=memory)
        _attach(self, memory)


def require_on_host(what: str, stream: Any, **buffers: Any) -> None:
    """Raise `InvalidUsageError` for a buffer in device memory, which MPI cannot access, and for a stream."""
    if stream is not None:
        refuse_stream(f"Win.{what}", stream)
    for name, buffer in buffers.items():
        if (type(buffer) is not ndarray or buffer.base is not None) and is_on_device(buffer):
            raise InvalidUsageError(
                f"Win.{what}: {name} lies in device memory, and the window in host memory, where MPI carries the call "
                "out: copy it to the host, or create the window with device memory"
            )
