"""The guard of MPI's calls that take host memory alone: a device array in one of them is refused.

MPI would take the address of a device array for one of host memory, and crash. The table below names mpi4py's methods
that take buffers, and those that make communicators or matched messages.

`HostOnly` guards the methods of a Communicator that nothing else implements. Communicators with a topology,
intercommunicators and matched messages are mpi4py's own objects: `guard` turns them into objects of a subclass whose
methods are guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.location import is_on_device

Places = tuple[tuple[int, str], ...]
"""Where the buffers are among the arguments of a method: the position and the name of each."""

_BUF = ((0, "buf"),)
_SEND_AND_RECEIVE = ((0, "sendbuf"), (1, "recvbuf"))
_EXCHANGE = ((0, "sendbuf"), (3, "recvbuf"))
_FLAG = ((0, "flag"),)

# One table for all classes: a method has the same buffers in each class that has it.
BUFFERS: dict[str, Places] = {
    name: places
    for places, names in (
        # Messages.
        (_BUF, "Send Ssend Bsend Rsend Recv Sendrecv_replace Attach_buffer"),
        (_BUF, "Isend Issend Ibsend Irsend Irecv Isendrecv_replace"),
        (_BUF, "Send_init Ssend_init Bsend_init Rsend_init Recv_init Psend_init Precv_init"),
        (_EXCHANGE, "Sendrecv Isendrecv"),
        # Collectives.
        (_BUF, "Bcast Ibcast Bcast_init"),
        (_FLAG, "Iagree"),
        (_SEND_AND_RECEIVE, "Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw"),
        (_SEND_AND_RECEIVE, "Igather Igatherv Iscatter Iscatterv Iallgather Iallgatherv"),
        (_SEND_AND_RECEIVE, "Ialltoall Ialltoallv Ialltoallw"),
        (_SEND_AND_RECEIVE, "Gather_init Gatherv_init Scatter_init Scatterv_init Allgather_init Allgatherv_init"),
        (_SEND_AND_RECEIVE, "Alltoall_init Alltoallv_init Alltoallw_init"),
        (_SEND_AND_RECEIVE, "Reduce Allreduce Reduce_scatter Reduce_scatter_block Scan Exscan"),
        (_SEND_AND_RECEIVE, "Ireduce Iallreduce Ireduce_scatter Ireduce_scatter_block Iscan Iexscan"),
        (_SEND_AND_RECEIVE, "Reduce_init Allreduce_init Reduce_scatter_init Reduce_scatter_block_init"),
        (_SEND_AND_RECEIVE, "Scan_init Exscan_init"),
        # Collectives of neighbours, of communicators with a topology.
        (_SEND_AND_RECEIVE, "Neighbor_allgather Neighbor_allgatherv"),
        (_SEND_AND_RECEIVE, "Neighbor_alltoall Neighbor_alltoallv Neighbor_alltoallw"),
        (_SEND_AND_RECEIVE, "Ineighbor_allgather Ineighbor_allgatherv"),
        (_SEND_AND_RECEIVE, "Ineighbor_alltoall Ineighbor_alltoallv Ineighbor_alltoallw"),
        (_SEND_AND_RECEIVE, "Neighbor_allgather_init Neighbor_allgatherv_init"),
        (_SEND_AND_RECEIVE, "Neighbor_alltoall_init Neighbor_alltoallv_init Neighbor_alltoallw_init"),
    )
    for name in names.split()
}

# Methods that return a communicator or a message, also in a tuple.
MAKERS = frozenset((
    "Accept", "Clone", "Connect", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent",
    "Create_graph", "Create_group", "Create_intercomm", "Dup", "Dup_with_info", "Idup", "Idup_with_info", "Improbe",
    "Ishrink", "Merge", "Mprobe", "Shrink", "Spawn", "Spawn_multiple", "Split", "Split_type", "Sub",
))  # fmt: skip


class Guarded:
    """Marks the subclasses of mpi4py's classes whose methods are guarded."""


def _require_host(operation: str, buffer: Any) -> None:
    """Raise `InvalidUsageError` for a device array."""
    # An int is MPI.BUFFER_AUTOMATIC, which Attach_buffer takes.
    if not isinstance(buffer, int) and is_on_device(buffer):
        raise host_only(operation)


def host_only(operation: str) -> InvalidUsageError:
    """Return the error for a device array in a call that takes host memory alone."""
    return InvalidUsageError(
        f"{operation} takes host arrays alone: use Send, Recv, Sendrecv, Isend, Irecv or a collective of a "
        "Communicator for device arrays, or copy to the host first"
    )


def guard(result: Any) -> Any:
    """Return a guarded object in place of a communicator or message of mpi4py's, also in a tuple; else the same."""
    if isinstance(result, tuple):
        return tuple(guard(each) for each in result)
    if not isinstance(result, (MPI.Comm, MPI.Message)) or isinstance(result, Guarded) or result == MPI.COMM_NULL:
        return result
    cls: type = type(result)
    return _guarded_class(cls)(result)


@functools.cache
def _guarded_class(cls: type) -> Callable[[Any], Any]:
    return type(cls.__name__, (Guarded, cls), {**_guarded_methods(cls), "__doc__": cls.__doc__})


def _guarded_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of the table that ``cls`` has, guarded: which, depends on the version of MPI."""
    methods = {name: getattr(cls, name) for name in (*BUFFERS, *MAKERS) if hasattr(cls, name)}
    return {
        name: _guarded_maker(method) if name in MAKERS else _guarded_call(method, BUFFERS[name])
        for name, method in methods.items()
    }


def _guarded_call(method: Callable[..., Any], buffers: Places) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        for position, name in buffers:
            _require_host(method.__name__, arguments[position] if position < len(arguments) else keywords.get(name))
        return method(self, *arguments, **keywords)

    return call


def _guarded_maker(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def make(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return guard(method(self, *arguments, **keywords))

    return make


class HostOnly(MPI.Intracomm):
    """mpi4py's methods that take host memory alone, or make objects that do: guarded.

    The bases of a Communicator that come before this one replace most of them with methods that take device arrays.
    """


for _name, _method in _guarded_methods(MPI.Intracomm).items():
    setattr(HostOnly, _name, _method)
