"""Where a collective call is: on the GPUs, where kernels carry it out, or on the host, where MPI or mapped memory does.

Ranks that went different ways would wait for each other for ever. So a rank may decide only by facts that MPI requires
to be the same on all ranks, or that all ranks learn:

* The operation, the root, ``algorithm=``, the number of ranks and their nodes are the same. So are count, element type
  and operation of a reduction, and the bytes of a call with equal counts.
* The datatypes are not: MPI compares elements alone, and in calls with private lengths each two ranks have types of
  their own. So kernels move elements of every datatype, as bytes where the lengths are private, and blocks without
  elements have no say. MPI carries out a call on GPUs only for its reduction, or because ``algorithm=`` says so.
* Counts, addresses, contiguity, alignment, derived datatypes and known plans are a rank's own. They change how the rank
  packs and launches, and never the way.
* The memory is a rank's own, too. All ranks pass memory of the same kind in the buffers that have a say: both buffers,
  or in a rooted call the buffer that every rank passes, because the others do not see the root's second buffer. One
  array of a GPU makes it a call on GPUs. A host array beside it goes through pinned memory: see `beside`.
* No elements at address 0 may be anywhere. Where no other buffer has a say, this rank is undecided: see `witness`.
"""

from __future__ import annotations

from typing import Literal

from mpicomm.collectives.operations import Operation
from mpicomm.mpi.arguments import Operand

CallLocation = Literal["gpu", "host", "anywhere"]


def place_of(operation: Operation, send: Operand | None, receive: Operand | None) -> CallLocation:
    """Return where a call with these buffers is, as far as this rank can know. Local.

    A buffer is None where it is ignored on this rank, or where the input is in place.
    """
    deciding = [send, receive]
    if operation.rooted == "receive" and send is not None:
        deciding = [send]
    elif operation.rooted == "send" and receive is not None:
        deciding = [receive]
    given = [operand for operand in deciding if operand is not None]
    if any(operand.on_device for operand in given):
        return "gpu"
    # Where all ranks have the same count, another buffer of this rank is as empty, and its class says where it lies.
    enough = all if operation.counts == "same" else any
    return "anywhere" if enough(operand.nowhere for operand in given) else "host"
