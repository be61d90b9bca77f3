"""Where a collective call is: kernels carry it out on the GPUs, or MPI or mapped memory carries it out on the host.

Ranks that decided differently would wait for each other for ever. So a rank decides only by facts that are the same on
all ranks, or that all ranks learn:

* The operation, the root, ``algorithm=``, the ranks and their nodes are the same. So are the count, the element type
  and the operation of a reduction, and the bytes of a call with equal counts.
* Datatypes, counts, addresses, contiguity and known plans may differ. They change how a rank packs and launches, and
  never where the call is. Kernels move elements of every datatype, as bytes if only two ranks know the lengths.
* The memory may differ, too. A rank decides by both buffers, or in a rooted call by the buffer that every rank passes,
  because other ranks do not see the root's second buffer. One array on a GPU of any rank makes it a call on GPUs, in
  which host arrays go through pinned memory (`beside`). Ranks vote (`mpicomm.ways.location_votes`).
* A buffer without elements at address 0 belongs to no kind of memory.

If MPI carries out a call wherever its arrays are, each rank copies its own device arrays, and makes the same call of
MPI as the others: see `mpicomm.ways.around.on_copies`.
"""

from __future__ import annotations

from typing import Literal

from mpicomm.collectives.operations import Operation
from mpicomm.mpi.arguments import Operand

CallLocation = Literal["gpu", "host", "anywhere"]


def location_of(operation: Operation, send: Operand | None, receive: Operand | None) -> CallLocation:
    """Return where a call with these buffers is, as far as this rank can know. Local.

    A buffer is None if this rank ignores it, or if the input is in place.
    """
    deciding = [send, receive]
    if operation.rooted == "receive" and send is not None:
        deciding = [send]
    elif operation.rooted == "send" and receive is not None:
        deciding = [receive]
    given = [operand for operand in deciding if operand is not None]
    if any(operand.on_device for operand in given):
        return "gpu"
    # If all ranks have the same count, this rank's other buffer is empty too, and its class says where it lies.
    enough = all if operation.counts == "same" else any
    return "anywhere" if enough(operand.nowhere for operand in given) else "host"
