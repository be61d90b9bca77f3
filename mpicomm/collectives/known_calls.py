"""KnownCalls: collectives on device arrays that were made before, recognised by their arguments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.collectives.calls import Arguments

if TYPE_CHECKING:
    from mpicomm.collectives.device_plan import Plan

_MOST = 1024  # calls that are kept


class KnownCalls:
    """Plans by the arguments of the calls they carry out, all of what a plan depends on.

    To read and check the arguments takes ten times as long as to enqueue a kernel, and programs call the same again and
    again. Only CuPy's and PyTorch's arrays are recognised, passed as they are.
    """

    def __init__(self) -> None:
        # With the operation itself: while it lives, nothing else has its id.
        self._plans: dict[tuple[Any, ...], tuple[Plan, MPI.Op | None]] = {}
        self._types: dict[type, Any] = {type(None): _id, type(MPI.IN_PLACE): _id}

    def key(self, operation: str, arguments: Arguments, algorithm: str) -> tuple[Any, ...] | None:
        """Return what the call is known by, None if it cannot be; local."""
        identify_send = self._types.get(type(arguments.send)) or self._identify(arguments.send)
        identify_receive = self._types.get(type(arguments.receive)) or self._identify(arguments.receive)
        if identify_send is None or identify_receive is None or arguments.counts is not None:
            return None
        return (
            operation,
            identify_send(arguments.send),
            identify_receive(arguments.receive),
            id(arguments.op),
            arguments.root,
            algorithm,
        )

    def find(self, key: tuple[Any, ...] | None) -> Plan | None:
        """Return the plan of a call that was made before."""
        found = self._plans.get(key) if key is not None else None
        return found[0] if found is not None else None

    def add(self, key: tuple[Any, ...] | None, plan: Plan, op: MPI.Op | None) -> None:
        """Keep the plan of a call."""
        if key is not None:
            if len(self._plans) >= _MOST:
                self._plans.clear()
            self._plans[key] = plan, op

    def _identify(self, array: Any) -> Any:
        for library, name, identify in (("cupy", "ndarray", _identify_cupy), ("torch", "Tensor", _identify_torch)):
            module = sys.modules.get(library)  # an array of a library exists only once that is imported
            if module is not None and type(array) is getattr(module, name):
                self._types[type(array)] = identify
                return identify
        return None


def _id(constant: Any) -> int:
    return id(constant)


def _identify_cupy(array: Any) -> tuple[Any, ...]:
    return array.data.ptr, array.shape, array.strides, array.dtype


def _identify_torch(array: Any) -> tuple[Any, ...]:
    return array.data_ptr(), array.shape, array.stride(), array.dtype
