"""Where a collective call is: kernels carry it out on the GPUs, or MPI or mapped memory carries it out on the host.

Ranks that decided differently would wait for each other for ever. So a rank decides only by facts that MPI requires to
be the same on all ranks, or that all ranks learn:

* The operation, the root, ``algorithm=``, the number of ranks and their nodes are the same on all ranks. So are the
  count, the element type and the operation of a reduction, and the bytes of a call with equal counts.
* The datatypes may differ. MPI compares only elements, and in calls with private lengths each pair of ranks may use
  other types. So kernels move elements of every datatype, as bytes if the lengths are private. Blocks without elements
  do not count. MPI carries out a call on GPUs only for its reduction, or because ``algorithm=`` says so.
* Counts, addresses, contiguity, alignment, derived datatypes and known plans may differ between ranks. They change how
  a rank packs and launches, and never where the call is.
* The memory may differ, too. Ranks must agree only on the kind of memory in the deciding buffers. These are both
  buffers, or in a rooted call the buffer that every rank passes, because other ranks do not see the root's second
  buffer. One array on a GPU makes it a call on GPUs. A host array beside it goes through pinned memory: see `beside`.
* A buffer without elements at address 0 belongs to no kind of memory. If no other buffer decides, this rank is
  undecided: see `witness`.

If MPI carries out a call wherever its arrays are, ranks with only host arrays may take part. Each rank copies its own
device arrays, and makes the same call of MPI as the others: see `mpicomm.ways.on_host.OnCopies`. In all other calls on
GPUs, a rank with only host arrays breaks the rule. It waits in MPI, and the other ranks raise an error. They read its
call from its page: see `mpicomm.cluster.calls_on_host`.

No better rule is both safe and free of costs:

* Ranks could agree on the location at each call. Then every call, also on the host, reads words of all ranks, and waits
  if two ranks write at once. That takes as long as a small call of MPI. Ranks of other nodes have no such words.
* Ranks could repeat the call on the host after kernels have waited in vain. A call on GPUs returns when it is enqueued.
  So its rank may be in a later call by MPI, and MPI would match that call with the call of the rank that waits. The
  stream may have used the wrong result. In a graph no host takes part.
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
