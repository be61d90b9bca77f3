"""Guard: what a Communicator makes that is no Communicator refuses device arrays, which MPI would crash on.

Communicators with a topology, intercommunicators and matched messages are mpi4py's own objects. They become ones of
subclasses whose methods look at their buffers first; which those are, mpi4py's annotations tell.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.location import is_on_device


class Guarded:
    """Marks the subclasses of mpi4py's classes whose methods take host arrays alone."""


def require_host(operation: str, *buffers: Any) -> None:
    """Raise for a device array: MPI would take its address for one of host memory, and crash."""
    if any(is_on_device(buffer) for buffer in buffers):
        raise InvalidUsageError(
            f"{operation} takes host arrays alone: use Send, Recv, Sendrecv, Isend, Irecv or a collective of a "
            "Communicator for device arrays, or copy to the host first"
        )


def guard(result: Any) -> Any:
    """Return a communicator or message of MPI's, or a tuple or None with such, as one that refuses device arrays."""
    if isinstance(result, tuple):
        return tuple(guard(each) for each in result)
    if not isinstance(result, (MPI.Comm, MPI.Message)) or isinstance(result, Guarded) or result == MPI.COMM_NULL:
        return result
    cls: type = type(result)
    return _guarded_class(cls)(result)


@functools.cache
def _guarded_class(cls: type) -> Callable[[Any], Any]:
    methods = {}
    for name in dir(cls):
        method = getattr(cls, name)
        if name[0].isupper() and callable(method) and not inspect.isclass(method):
            signature = inspect.signature(method)
            makes = any(word in str(signature.return_annotation) for word in ("omm", "Message", "Self"))
            if "self" in signature.parameters and (_buffers(signature) or makes):
                methods[name] = _guarded_method(method)
    return type(cls.__name__, (Guarded, cls), {**methods, "__doc__": cls.__doc__})


def _guarded_method(method: Callable[..., Any]) -> Callable[..., Any]:
    buffers = _buffers(inspect.signature(method))

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for place, name in buffers:
            require_host(method.__name__, arguments[place] if place < len(arguments) else keywords.get(name))
        return guard(method(self, *arguments, **keywords))

    return call


def _buffers(signature: inspect.Signature) -> list[tuple[int, str]]:
    """Return place and name of the parameters that are buffers."""
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    return [(place, each.name) for place, each in enumerate(parameters) if "Buf" in str(each.annotation)]


class Offspring(MPI.Intracomm):
    """mpi4py's methods that make communicators which are no Communicators, or messages: what they return is guarded."""


for _name in (
    "Accept", "Connect", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph",
    "Create_intercomm", "Improbe", "Ishrink", "Mprobe", "Shrink", "Spawn", "Spawn_multiple",
):  # fmt: skip
    if hasattr(MPI.Intracomm, _name):  # some are of MPI 5
        setattr(Offspring, _name, _guarded_method(getattr(MPI.Intracomm, _name)))
