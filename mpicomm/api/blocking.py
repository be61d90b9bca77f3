"""The blocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALL, CALLS_BY_MPI
from mpicomm.activity.page import begin_by_mpi, by_mpi
from mpicomm.collectives import operations as rows
from mpicomm.collectives.host.fast_path import PlainCheck
from mpicomm.collectives.wire import as_wire
from mpicomm.epilogues import as_epilogue
from mpicomm.ways.dispatch import Dispatcher
from mpicomm.ways.reader import REFUSALS

# These are MPI's own methods, looked up once, because `super()` takes a tenth of the time of a small call.
_allreduce = MPI.Intracomm.Allreduce
_barrier = MPI.Intracomm.Barrier
# The numbers by which the doctor names these calls.
_ALLREDUCE = by_mpi("Allreduce")
_BARRIER = by_mpi("Barrier")


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
    domains are reduced in the order of the domains. Only "ring", and calls that MPI carries out, such as calls on small
    host arrays, have other orders. ``MAX`` and ``MIN`` keep a NaN. If MPI reduces, ranks may have different results of
    ``MAX``, ``MIN``, ``MAXLOC`` and ``MINLOC`` of NaNs, and different signs of a zero. ``reductions="ordered"`` of the
    `Communicator` leaves only ``MAXLOC``, ``MINLOC`` and types that mpicomm lacks to MPI.

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

    _collectives: Dispatcher
    _row: memoryview
    """The doctor reads this rank's calls here, in the words of `layout`."""
    _plain: dict[str, PlainCheck]
    """The calls that go to MPI at once: see `fast_path.at_once`."""

    def Barrier(self, *, stream: Any = None) -> None:
        """Block until all ranks have called it. Collective.

        With ``stream``, a stream of this rank's GPU, hold that stream until the streams of all ranks have come here.
        This form does not block, except if an engine between peer domains blocks the host. Without ``stream`` the wait
        is MPI's and has no limit. With it `CollectiveTimeoutError` comes from the next call or from `check`.

            comm.Barrier()
        """
        if stream is None:
            begin_by_mpi(self._row, _BARRIER)
            _barrier(self)
        else:
            self._collectives.barrier(stream)

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        epilogue: Any = None,
        wire_dtype: Any = None,
        order: str = "auto",
        **operands: Any,
    ) -> None:
        """Reduce the ``sendbuf`` of all ranks with ``op`` into every rank's ``recvbuf``, element by element.

        Both buffers have n elements of one type, and n is the same on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "two_shot", "ring", "copy_engine" or
        "mpi", the same on all ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call
        different things, and `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call
        raises the last two.

            x, y = cp.ones(8), cp.empty(8)
            comm.Allreduce(x, y, op=MPI.MAX)

        ``epilogue`` is applied to each element of the result before it is stored. It is an expression, or one of
        `mpicomm.epilogues`. In the expression v is the element and i its index. ``operands`` have their names there,
        and are numbers or arrays: ``epilogue="v * scale + bias[i]", scale=0.5, bias=b``. See `Epilogue`. In "one_shot"
        and "two_shot" on GPUs the kernel that reduces applies the epilogue. In other calls one more kernel follows and
        applies it, or NumPy does on host arrays.

        ``wire_dtype`` is "float8_e4m3fn" or "int8", the same on all ranks. Elements of float32, float16 or bfloat16
        then travel quantized, with a power of two as the scale of each block of 128. ``op`` is SUM or AVG. The sum
        travels quantized again, except with a pair such as ("int8", None). Its bits do not depend on rank, run,
        algorithm and device. Let A be the sum over the ranks of the largest magnitude in the block, and e be 1/16 for
        "float8_e4m3fn" and 1/127 for "int8". The sum differs from the exact sum by at most e * (2 + e) * A, or with a
        pair e * A, besides roundings to float32 and to the elements' type. AVG divides all that by the number of
        ranks. A block is NaN as a whole on all ranks if it has a NaN or an infinity on any rank, or if its sum exceeds
        float32. A magnitude within 1/32 of the largest number of its type may become infinite by rounding. Device
        arrays in several peer domains, and other types, operations and algorithms than "auto", "one_shot" and
        "two_shot", raise `InvalidUsageError`. It saves time on GPUs from 1 MiB on. Smaller calls, and calls on the
        host, may take longer than without ``wire_dtype``.

        ``order="tree"`` adds with ``MPI.SUM`` along a binary tree: ranks 0 and 1, 2 and 3, ..., then pairs of their
        sums. `tree_sum` adds the leaves of a rank in the same way. So 1, 2, 4 or more ranks that hold the
        ``leaves`` of the `Communicator` in equal blocks get the same bits. All ranks pass the same ``order``. A number
        of ranks that is no power of two or exceeds ``leaves``, elements of 16 bits or fewer, and the algorithms "ring",
        "chain" and "mpi" raise `InvalidUsageError`.
        """
        if order != "auto":
            op = self._collectives.in_order(rows.ALLREDUCE, op, order)
        if wire_dtype is not None or epilogue is not None or operands:
            finish, wire = as_epilogue(epilogue, operands), as_wire(wire_dtype)
            return self._collectives.run(
                rows.ALLREDUCE, stream, algorithm, sendbuf, recvbuf, op, epilogue=finish, wire=wire
            )
        if stream is None and algorithm == "auto" and self._plain["Allreduce"](sendbuf, recvbuf, op):
            row = self._row
            row[CALLS_BY_MPI] += 1
            row[CALL] = _ALLREDUCE
            try:
                return _allreduce(self, sendbuf, recvbuf, op)
            except REFUSALS as error:
                return self._collectives.again(error, rows.ALLREDUCE, sendbuf, recvbuf, op)
        return self._collectives.run(rows.ALLREDUCE, stream, algorithm, sendbuf, recvbuf, op)

    # scripts/write_methods.py writes all that follows, from the table of operations.

    def Allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto", wire_dtype: Any = None
    ) -> None:
        """Bring block r, the ``sendbuf`` of rank r, to every rank's ``recvbuf``.

        ``sendbuf`` has n elements, n is the same on all ranks, and ``recvbuf`` has n for each rank, in rank order.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "copy_engine" or "mpi", the same on all
        ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            comm.Allgather(x, y)

        With ``wire_dtype`` elements travel as fp8 or int8: see `Allreduce`. Each rank also stores its own block as it
        has sent it, so all ranks have the same bits. An element differs from its input by at most e * A.
        """
        if stream is None and algorithm == "auto" and wire_dtype is None and self._plain["Allgather"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLGATHER)
            try:
                return _allgather(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.again(error, rows.ALLGATHER, sendbuf, recvbuf)
        return self._collectives.run(rows.ALLGATHER, stream, algorithm, sendbuf, recvbuf, wire=as_wire(wire_dtype))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring block r, the ``sendbuf`` of rank r, to every rank's ``recvbuf``. Blocks differ in length.

        ``recvbuf`` is ``[array, counts]``, ``[array, (counts, displacements)]`` or ``[array, counts, displacements,
        type]``. Counts and displacements have an entry for each rank, in elements, and are the same on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            comm.Allgatherv(x, [y, counts])
        """
        if stream is None and algorithm == "auto" and self._plain["Allgatherv"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLGATHERV)
            try:
                return _allgatherv(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.again(error, rows.ALLGATHERV, sendbuf, recvbuf)
        return self._collectives.run(rows.ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``, for all r and s.

        Both buffers have n elements for each rank, in rank order, and n is the same on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "copy_engine" or "mpi", the same on all
        ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.arange(2 * comm.size), cp.empty(2 * comm.size, int)
            comm.Alltoall(x, y)
        """
        if stream is None and algorithm == "auto" and self._plain["Alltoall"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLTOALL)
            try:
                return _alltoall(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.again(error, rows.ALLTOALL, sendbuf, recvbuf)
        return self._collectives.run(rows.ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``. Blocks differ in length.

        A buffer is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each rank, in
        elements. Rank r's count for s in ``sendbuf`` is rank s's count for r in ``recvbuf``.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.size * (comm.rank + 1))
            comm.Alltoallv([x, counts], [y, [comm.rank + 1] * comm.size])

        Counts may be integer arrays on the GPU, of int32 or int64: ``[sendbuf, counts]`` and ``[recvbuf, counts]``.
        Then the call reads the counts of ``sendbuf`` in stream order, and writes the counts that have come into the
        counts of ``recvbuf``. ``recvbuf`` has room for the most elements that may come. Blocks follow each other in
        rank order, unless ``(counts, displacements)`` say other places. If a rank has too little room, or a count does
        not fit ``sendbuf``, all ranks raise `InvalidUsageError` in the next call or in ``check``, and the communicator
        is unusable.
        """
        if stream is None and algorithm == "auto" and self._plain["Alltoallv"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLTOALLV)
            try:
                return _alltoallv(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.again(error, rows.ALLTOALLV, sendbuf, recvbuf)
        return self._collectives.run(rows.ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``. Blocks differ in datatype.

        A buffer is ``[array, counts, displacements, types]``, with an entry for each rank. Displacements are in bytes.
        On GPUs a kernel packs and unpacks derived datatypes.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.arange(4.0 * comm.size).reshape(4, comm.size), cp.empty((4, comm.size))
            column = MPI.DOUBLE.Create_vector(4, 1, comm.size).Commit()
            columns = [1] * comm.size, [8 * rank for rank in range(comm.size)], [column] * comm.size
            comm.Alltoallw([x, *columns], [y, *columns])
        """
        return self._collectives.run(rows.ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring the root's ``buf`` to every rank's ``buf``.

        ``buf`` has the same number of elements on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "two_shot", "chain", "copy_engine" or
        "mpi", the same on all ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call
        different things, and `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call
        raises the last two.

            x = cp.arange(8) if comm.rank == 0 else cp.empty(8, int)
            comm.Bcast(x, root=0)
        """
        if stream is None and algorithm == "auto" and self._plain["Bcast"](None, buf):
            begin_by_mpi(self._row, _BCAST)
            try:
                return _bcast(self, buf, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.BCAST, None, buf, root=root)
        return self._collectives.run(rows.BCAST, stream, algorithm, None, buf, root=root)

    def Exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Reduce the ``sendbuf`` of the ranks before r into rank r's ``recvbuf``. The ``recvbuf`` of rank 0 does not
        change.

        Both buffers have n elements of one type, and n is the same on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.full(8, comm.rank), cp.zeros(8, int)
            comm.Exscan(x, y)
        """
        if stream is None and algorithm == "auto" and self._plain["Exscan"](sendbuf, recvbuf, op):
            begin_by_mpi(self._row, _EXSCAN)
            try:
                return _exscan(self, sendbuf, recvbuf, op)
            except REFUSALS as error:
                return self._collectives.again(error, rows.EXSCAN, sendbuf, recvbuf, op)
        return self._collectives.run(rows.EXSCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring the ``sendbuf`` of rank r to block r of the root's ``recvbuf``.

        ``sendbuf`` has n elements, n is the same on all ranks, and the root's ``recvbuf`` has n for each rank, in rank
        order. Other ranks pass None for it.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "copy_engine" or "mpi", the same on all
        ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            comm.Gather(x, y if comm.rank == 0 else None, root=0)
        """
        if stream is None and algorithm == "auto" and self._plain["Gather"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _GATHER)
            try:
                return _gather(self, sendbuf, recvbuf, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.GATHER, sendbuf, recvbuf, root=root)
        return self._collectives.run(rows.GATHER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Bring the ``sendbuf`` of rank r to block r of the root's ``recvbuf``. Blocks differ in length.

        The root's ``recvbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each
        rank, in elements. Other ranks pass None for it.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            comm.Gatherv(x, [y, counts] if comm.rank == 0 else None, root=0)
        """
        if stream is None and algorithm == "auto" and self._plain["Gatherv"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _GATHERV)
            try:
                return _gatherv(self, sendbuf, recvbuf, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.GATHERV, sendbuf, recvbuf, root=root)
        return self._collectives.run(rows.GATHERV, stream, algorithm, sendbuf, recvbuf, root=root)

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        order: str = "auto",
    ) -> None:
        """Reduce the ``sendbuf`` of all ranks with ``op`` into the root's ``recvbuf``, element by element.

        Both buffers have n elements of one type, and n is the same on all ranks. Other ranks pass None for ``recvbuf``.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "two_shot", "chain", "copy_engine" or
        "mpi", the same on all ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call
        different things, and `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call
        raises the last two.

            x, y = cp.ones(8), cp.empty(8)
            comm.Reduce(x, y if comm.rank == 0 else None, op=MPI.MAX, root=0)
        """
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE, op, order)
        if stream is None and algorithm == "auto" and self._plain["Reduce"](sendbuf, recvbuf, op, root):
            begin_by_mpi(self._row, _REDUCE)
            try:
                return _reduce(self, sendbuf, recvbuf, op, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.REDUCE, sendbuf, recvbuf, op, root)
        return self._collectives.run(rows.REDUCE, stream, algorithm, sendbuf, recvbuf, op, root)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> None:
        """Reduce block r of all ranks' ``sendbuf`` with ``op`` into rank r's ``recvbuf``. Blocks differ in length.

        Block r has ``recvcounts[r]`` elements. Without ``recvcounts`` the ranks exchange the counts of their
        ``recvbuf``, which blocks. If the other ranks are in place, a rank with count 0 need not be in place, except in
        a persistent call on host arrays.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.rank + 1)
            comm.Reduce_scatter(x, y, recvcounts=counts)
        """
        if (
            stream is None
            and algorithm == "auto"
            and recvcounts is not None
            and self._plain["Reduce_scatter"](sendbuf, recvbuf, op)
        ):
            begin_by_mpi(self._row, _REDUCE_SCATTER)
            try:
                return _reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
            except REFUSALS as error:
                return self._collectives.again(error, rows.REDUCE_SCATTER, sendbuf, recvbuf, op, counts=recvcounts)
        return self._collectives.run(rows.REDUCE_SCATTER, stream, algorithm, sendbuf, recvbuf, op, counts=recvcounts)

    def Reduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
        order: str = "auto",
    ) -> None:
        """Reduce block r of all ranks' ``sendbuf`` with ``op`` into rank r's ``recvbuf``.

        ``recvbuf`` has n elements, n is the same on all ranks, and ``sendbuf`` has n for each rank, in rank order.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "copy_engine" or "mpi", the same on all
        ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.ones(3 * comm.size), cp.empty(3)
            comm.Reduce_scatter_block(x, y)

        With ``wire_dtype`` elements travel as fp8 or int8: see `Allreduce`. The blocks of 128 elements begin with block
        r. The sum differs from the exact sum by at most e * A, besides roundings to float32 and to the elements' type.
        """
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE_SCATTER_BLOCK, op, order)
        if (
            stream is None
            and algorithm == "auto"
            and wire_dtype is None
            and self._plain["Reduce_scatter_block"](sendbuf, recvbuf, op)
        ):
            begin_by_mpi(self._row, _REDUCE_SCATTER_BLOCK)
            try:
                return _reduce_scatter_block(self, sendbuf, recvbuf, op)
            except REFUSALS as error:
                return self._collectives.again(error, rows.REDUCE_SCATTER_BLOCK, sendbuf, recvbuf, op)
        return self._collectives.run(
            rows.REDUCE_SCATTER_BLOCK, stream, algorithm, sendbuf, recvbuf, op, wire=as_wire(wire_dtype)
        )

    def Scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Reduce the ``sendbuf`` of the ranks up to and including r into rank r's ``recvbuf``.

        Both buffers have n elements of one type, and n is the same on all ranks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.full(8, comm.rank), cp.empty(8, int)
            comm.Scan(x, y)
        """
        if stream is None and algorithm == "auto" and self._plain["Scan"](sendbuf, recvbuf, op):
            begin_by_mpi(self._row, _SCAN)
            try:
                return _scan(self, sendbuf, recvbuf, op)
            except REFUSALS as error:
                return self._collectives.again(error, rows.SCAN, sendbuf, recvbuf, op)
        return self._collectives.run(rows.SCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Bring block r of the root's ``sendbuf`` to rank r's ``recvbuf``.

        ``recvbuf`` has n elements, n is the same on all ranks, and the root's ``sendbuf`` has n for each rank, in rank
        order. Other ranks pass None for it.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot", "copy_engine" or "mpi", the same on all
        ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.arange(3 * comm.size), cp.empty(3, int)
            comm.Scatter(x if comm.rank == 0 else None, y, root=0)
        """
        if stream is None and algorithm == "auto" and self._plain["Scatter"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _SCATTER)
            try:
                return _scatter(self, sendbuf, recvbuf, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.SCATTER, sendbuf, recvbuf, root=root)
        return self._collectives.run(rows.SCATTER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Bring block r of the root's ``sendbuf`` to rank r's ``recvbuf``. Blocks differ in length.

        The root's ``sendbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each
        rank, in elements. Other ranks pass None for it.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.arange(sum(counts)), cp.empty(comm.rank + 1, int)
            comm.Scatterv([x, counts] if comm.rank == 0 else None, y, root=0)
        """
        if stream is None and algorithm == "auto" and self._plain["Scatterv"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _SCATTERV)
            try:
                return _scatterv(self, sendbuf, recvbuf, root)
            except REFUSALS as error:
                return self._collectives.again(error, rows.SCATTERV, sendbuf, recvbuf, root=root)
        return self._collectives.run(rows.SCATTERV, stream, algorithm, sendbuf, recvbuf, root=root)


_allgather, _ALLGATHER = MPI.Intracomm.Allgather, by_mpi("Allgather")
_allgatherv, _ALLGATHERV = MPI.Intracomm.Allgatherv, by_mpi("Allgatherv")
_alltoall, _ALLTOALL = MPI.Intracomm.Alltoall, by_mpi("Alltoall")
_alltoallv, _ALLTOALLV = MPI.Intracomm.Alltoallv, by_mpi("Alltoallv")
_bcast, _BCAST = MPI.Intracomm.Bcast, by_mpi("Bcast")
_exscan, _EXSCAN = MPI.Intracomm.Exscan, by_mpi("Exscan")
_gather, _GATHER = MPI.Intracomm.Gather, by_mpi("Gather")
_gatherv, _GATHERV = MPI.Intracomm.Gatherv, by_mpi("Gatherv")
_reduce, _REDUCE = MPI.Intracomm.Reduce, by_mpi("Reduce")
_reduce_scatter, _REDUCE_SCATTER = MPI.Intracomm.Reduce_scatter, by_mpi("Reduce_scatter")
_reduce_scatter_block, _REDUCE_SCATTER_BLOCK = MPI.Intracomm.Reduce_scatter_block, by_mpi("Reduce_scatter_block")
_scan, _SCAN = MPI.Intracomm.Scan, by_mpi("Scan")
_scatter, _SCATTER = MPI.Intracomm.Scatter, by_mpi("Scatter")
_scatterv, _SCATTERV = MPI.Intracomm.Scatterv, by_mpi("Scatterv")
