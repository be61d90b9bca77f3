"""The collectives of a Communicator. `mpicomm.api.methods` makes all of them except `Barrier`."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.activity.page import begin_mpi_call, mpi_call_number
from mpicomm.api.methods import UncompiledMethod
from mpicomm.collectives.operations import OPERATIONS

# MPI's own method, looked up once, because `super()` takes a tenth of the time of a small call.
_barrier = MPI.Intracomm.Barrier
_BARRIER = mpi_call_number("Barrier")


class BlockingCollectives(MPI.Intracomm):
    """mpi4py's blocking collectives, on host arrays and on device arrays. All of them are *collective*.

    **Order.** A call on host arrays blocks. A call on device arrays is stream-ordered: it returns when it is enqueued
    on ``stream``. Without ``stream`` it takes the current stream of the library that the array comes from. Later work
    on that stream finds the result. The buffers are in use until the stream has come that far. Calls that MPI carries
    out block, also on device arrays. These are all calls with "mpi", and reductions of types and operations that only
    MPI has.

    **Peer domains.** Kernels serve up to 8 ranks of a node, a *peer domain*. More ranks are several peer domains.
    Between peer domains of GPUs an engine moves the data. ``python -m mpicomm.info`` shows the engine, and
    MPICOMM_INTERNODE names it. "nccl" is stream-ordered. "mpi" (a CUDA-aware MPI) and "pinned" (MPI through pinned
    memory) block the host until the data of all ranks has come. They raise `InvalidUsageError` in a capture.

    **Buffers.** A buffer has any form of mpi4py: an array, or a list such as ``[array, count, type]``. Counts are in
    elements. The two buffers of a rank have the same element type and counts that fit each other. All ranks pass the
    same counts, except in the calls with names that end in v. If only the root needs a buffer, the call ignores it on
    other ranks. MPI does not check the addresses of derived datatypes and of ``MPI.BOTTOM`` in host memory, as in
    mpi4py.

    **Memory.** A call in which any rank passes an array on the GPU is a call on device arrays, on all ranks. A host
    array in it goes through pinned memory, with a warning. Then the call blocks (the nonblocking form blocks in its
    request), and raises `InvalidUsageError` in a capture. In Gather, Gatherv, Reduce, Scatter and Scatterv the buffers
    that every rank passes decide, and the root's other buffer lies anywhere. A buffer without elements at address 0,
    such as ``MPI.memory.fromaddress(0, 0)``, lies nowhere and fits every other buffer. None in a list does so, too. On
    a communicator of GPUs a call without a device array waits until the ranks of the node have made it, as long as MPI
    would. The ranks of a node whose arrays all lie on the host cannot join a call on GPUs of another node.

    **In place.** ``sendbuf=MPI.IN_PLACE`` means that ``recvbuf`` holds the input, at the place that MPI prescribes. In
    Gather, Gatherv and Reduce only the root may pass it. In Scatter and Scatterv the root passes
    ``recvbuf=MPI.IN_PLACE`` to keep its block where it is. A reduction with the same memory as both buffers is also in
    place. Buffers must not overlap otherwise.

    **Element types.** bool, integers of 8 to 64 bits, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2,
    complex64 and complex128, whether or not MPI has them. MPI carries out calls with its other types, ``MAXLOC`` and
    ``MINLOC``, and operations that the user has created, whatever the ``algorithm``.

    **Operations** are MPI's operations, `AVG`, and `Op`, which is an expression of the user.

    **Reductions** are in rank order, and bitwise the same on all ranks and in every run. Floats of 16 bits or fewer are
    accumulated in float32 and rounded once. Each peer domain reduces in the order of its ranks. Then the results of the
    domains are reduced in the order of the domains. Only "ring", ``order="tree"``, and calls that MPI carries out, such
    as calls on small host arrays, have other orders. ``MAX`` and ``MIN`` keep a NaN. If MPI reduces, ranks may have
    different results of ``MAX``, ``MIN``, ``MAXLOC`` and ``MINLOC`` of NaNs, and different signs of a zero.
    ``reductions="ordered"`` of the `Communicator` leaves only ``MAXLOC``, ``MINLOC`` and types that mpicomm lacks to
    MPI.

    **Movements.** Collectives that only move data move bytes. The buffers of one call, and the buffers of two ranks,
    may have different types of the same length in bytes.

    **algorithm** is the same on all ranks:

    - "auto" takes the fastest, and reduces in rank order.
    - "one_shot": every rank sends straight to every rank. For every collective, above all for small messages.
    - "two_shot": each rank reduces a part, or sends a part on. For large Allreduce and Bcast, and Reduce on GPUs.
    - "ring": each rank sends only to the next rank. For large Allreduce. The order of the reduction follows the ring.
    - "chain": each rank sends on the data that it receives. For large Bcast on GPUs, and Reduce on GPUs to the first or
      last rank, except floats of 16 bits or fewer and ``AVG``.
    - "copy_engine": copy engines move the data, for programs that need the multiprocessors at the same time. For
      Allgather, Allreduce, Alltoall, Bcast, Gather, Reduce, Reduce_scatter_block and Scatter on GPUs.
    - "mpi": MPI carries out the call, on pinned host copies of device arrays. Some ranks may pass host arrays.

    Several peer domains have "auto", "one_shot" (one network step), "two_shot" (two network steps), "copy_engine" (in
    each domain) and "mpi".

    **Symmetric output.** The output of Allgather, Allreduce, Alltoall or Bcast may lie in a `SymmetricArray`. Then it
    lies there on all ranks, at the same place. Large messages are then stored straight into it.

    **Errors.** Bad arguments raise `InvalidUsageError` (a ValueError) or TypeError, on the ranks that pass them. If
    mpi4py raises ``MPI.Exception``, BufferError or KeyError for them, the error is also that exception. If the ranks
    call different things, all ranks raise `PeerError`. If a rank does not come in time, the ranks that come raise
    `CollectiveTimeoutError`. On device arrays the next call or ``check()`` raises these two errors. Waits inside MPI
    have no limit, and cannot raise. If ranks of GPUs make calls on host arrays and on device arrays in different
    orders, they may wait there for each other, and `mpicomm.doctor` names the calls.
    """

    def Barrier(self, *, stream: Any = None) -> None:
        """Block until all ranks have called it. Collective.

        With ``stream``, a stream of this rank's GPU, hold that stream until the streams of all ranks have come here.
        This form does not block, except if an engine between peer domains blocks the host. Without ``stream`` the wait
        is MPI's and has no limit. With it `CollectiveTimeoutError` comes from the next call or from `check`.

            comm.Barrier()
        """
        if stream is None:
            begin_mpi_call(self._row, _BARRIER)
            _barrier(self)
        else:
            self._collectives.barrier(stream)


class NonblockingCollectives(MPI.Intracomm):
    """mpi4py's nonblocking collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. They return a request:

    - On host arrays it is MPI's, or on a communicator of GPUs one that first waits for the ranks to say where their
      arrays lie. The start waits for no rank after the first collective of a communicator. If MPI lacks the type or
      the operation, or with ``algorithm=`` other than "auto" and "mpi", MPI moves the data of all ranks, and the
      request reduces it in rank order. A rank that has a result needs memory for the data of all ranks for this.
    - On device arrays the call enqueues the collective. ``Wait`` blocks until the device has finished it. The request
      also works in ``MPI.Request.Waitall`` and the other calls on lists. Later work on the same stream needs no wait,
      except if MPI carries out the call: then the result is there after ``Wait``.
    """


class PersistentCollectives(MPI.Intracomm):
    """mpi4py's persistent collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. On host arrays the request is MPI's, which
    gets ``info``. If MPI lacks the type or the operation, ``Start`` begins the nonblocking call. On device arrays
    ``Start`` enqueues the collective, and ``Wait`` blocks until the device has finished it. ``Free`` releases the
    request.
    """


class NeighborCollectives(MPI.Topocomm):
    """mpi4py's collectives of neighbours, on host arrays and on device arrays. All of them are *collective*.

    **Blocks.** The send buffer has a block for each rank to which this rank sends. The receive buffer has a block for
    each rank from which this rank receives. The blocks are in the order in which MPI names the neighbours. In the two
    gathering calls all neighbours get the same block. A rank may be its own neighbour and may occur several times. The
    block of ``MPI.PROC_NULL``, beyond the edge of a grid, stays as it is. What leaves a rank of a grid in one direction
    arrives from the other, also if both neighbours are one rank, in every form and with every MPI. No call is in place.

    **Order.** MPI carries out calls on host arrays. A call on device arrays is stream-ordered, and one exchange of
    kernels serves all neighbours of the peer domain, also in a CUDA graph. With ``algorithm="mpi"`` MPI carries it out
    on pinned host copies, and it blocks, also in the nonblocking form. ``Start`` of a persistent request on device
    arrays enqueues the call.

    A rank without neighbours also calls. It passes empty buffers in the memory that the other ranks use, or buffers
    that lie nowhere: see **Memory** of `BlockingCollectives`.

    **Errors.** Bad arguments raise `InvalidUsageError` (a ValueError) or TypeError, on the ranks that pass them. If two
    neighbours have device arrays with different numbers of bytes for each other, all ranks raise `PeerError`. They also
    raise it if ranks call different things. If a rank does not come in time, the ranks that come raise
    `CollectiveTimeoutError`. On device arrays the next call or ``check()`` raises these two errors. Waits inside MPI
    have no limit.
    """


for _row in OPERATIONS.values():
    for _mode, _of_all in enumerate((BlockingCollectives, NonblockingCollectives, PersistentCollectives)):
        _cls = NeighborCollectives if _row.of_neighbors else _of_all
        setattr(_cls, _row.methods[_mode], UncompiledMethod(_cls, _row, _mode))
