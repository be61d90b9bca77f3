"""The collectives of a Communicator. `mpicomm.api.methods` makes all of them except `Barrier`."""

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

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
        pair e * A, besides roundings to float32 and to the elements' type. AVG divides all that by the number of ranks.
        A block is NaN as a whole on all ranks if it has a NaN or an infinity on any rank, or if its sum exceeds
        float32. A magnitude within 1/32 of the largest number of its type may become infinite by rounding. Device
        arrays in several peer domains, and other types, operations and algorithms than "auto", "one_shot" and
        "two_shot", raise `InvalidUsageError`. It saves time on GPUs from 1 MiB on. Smaller calls, and calls on the
        host, may take longer than without ``wire_dtype``.

        ``order="tree"`` adds with ``MPI.SUM`` along a binary tree: ranks 0 and 1, 2 and 3, ..., then pairs of their
        sums. `tree_sum` adds the leaves of a rank in the same way. So 1, 2, 4 or more ranks that hold the ``leaves`` of
        the `Communicator` in equal blocks get the same bits. All ranks pass the same ``order``. A number of ranks that
        is no power of two or exceeds ``leaves``, elements of 16 bits or fewer, and the algorithms "ring", "chain" and
        "mpi" raise `InvalidUsageError`.
        """

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

    def Alltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Bring block s of rank r's ``sendbuf`` to block r of rank s's ``recvbuf``. Blocks differ in datatype.

        A buffer is ``[array, counts, displacements, types]``, with an entry for each rank. Displacements are in bytes.
        On GPUs vectors, subarrays and other regular blocks go from layout to layout without packing. A kernel packs
        other blocks.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            x, y = cp.arange(4.0 * comm.size).reshape(4, comm.size), cp.empty((4, comm.size))
            column = MPI.DOUBLE.Create_vector(4, 1, comm.size).Commit()
            columns = [1] * comm.size, [8 * rank for rank in range(comm.size)], [column] * comm.size
            comm.Alltoallw([x, *columns], [y, *columns])
        """

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

        With ``order="tree"`` the bits of a sum do not depend on the number of ranks: see `Allreduce`.
        """

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

        With ``order="tree"`` the bits of a sum do not depend on the number of ranks: see `Allreduce`.
        """

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

    def Iallgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto", wire_dtype: Any = None
    ) -> MPI.Request:
        """Start `Allgather` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            request = comm.Iallgather(x, y)
            request.Wait()
        """

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgatherv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            request = comm.Iallgatherv(x, [y, counts])
            request.Wait()
        """

    def Iallreduce(
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
    ) -> MPI.Request:
        """Start `Allreduce` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Iallreduce(x, y, op=MPI.MAX)
            request.Wait()
        """

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoall` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.arange(2 * comm.size), cp.empty(2 * comm.size, int)
            request = comm.Ialltoall(x, y)
            request.Wait()
        """

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.size * (comm.rank + 1))
            request = comm.Ialltoallv([x, counts], [y, [comm.rank + 1] * comm.size])
            request.Wait()
        """

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallw` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.arange(4.0 * comm.size).reshape(4, comm.size), cp.empty((4, comm.size))
            column = MPI.DOUBLE.Create_vector(4, 1, comm.size).Commit()
            columns = [1] * comm.size, [8 * rank for rank in range(comm.size)], [column] * comm.size
            request = comm.Ialltoallw([x, *columns], [y, *columns])
            request.Wait()
        """

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Bcast` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x = cp.arange(8) if comm.rank == 0 else cp.empty(8, int)
            request = comm.Ibcast(x, root=0)
            request.Wait()
        """

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Exscan` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.full(8, comm.rank), cp.zeros(8, int)
            request = comm.Iexscan(x, y)
            request.Wait()
        """

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gather` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            request = comm.Igather(x, y if comm.rank == 0 else None, root=0)
            request.Wait()
        """

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gatherv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            request = comm.Igatherv(x, [y, counts] if comm.rank == 0 else None, root=0)
            request.Wait()
        """

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        order: str = "auto",
    ) -> MPI.Request:
        """Start `Reduce` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Ireduce(x, y if comm.rank == 0 else None, op=MPI.MAX, root=0)
            request.Wait()
        """

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Request:
        """Start `Reduce_scatter` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.rank + 1)
            request = comm.Ireduce_scatter(x, y, recvcounts=counts)
            request.Wait()
        """

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
        order: str = "auto",
    ) -> MPI.Request:
        """Start `Reduce_scatter_block` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.ones(3 * comm.size), cp.empty(3)
            request = comm.Ireduce_scatter_block(x, y)
            request.Wait()
        """

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scan` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.full(8, comm.rank), cp.empty(8, int)
            request = comm.Iscan(x, y)
            request.Wait()
        """

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatter` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            x, y = cp.arange(3 * comm.size), cp.empty(3, int)
            request = comm.Iscatter(x if comm.rank == 0 else None, y, root=0)
            request.Wait()
        """

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatterv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.arange(sum(counts)), cp.empty(comm.rank + 1, int)
            request = comm.Iscatterv([x, counts] if comm.rank == 0 else None, y, root=0)
            request.Wait()
        """

class PersistentCollectives(MPI.Intracomm):
    """mpi4py's persistent collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. On host arrays the request is MPI's, which
    gets ``info``. If MPI lacks the type or the operation, ``Start`` begins the nonblocking call. On device arrays
    ``Start`` enqueues the collective, and ``Wait`` blocks until the device has finished it. ``Free`` releases the
    request.
    """

    def Allgather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
    ) -> MPI.Prequest:
        """Prepare `Allgather` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            request = comm.Allgather_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Allgatherv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            request = comm.Allgatherv_init(x, [y, counts])
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        epilogue: Any = None,
        wire_dtype: Any = None,
        order: str = "auto",
        **operands: Any,
    ) -> MPI.Prequest:
        """Prepare `Allreduce` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Allreduce_init(x, y, op=MPI.MAX)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoall` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.arange(2 * comm.size), cp.empty(2 * comm.size, int)
            request = comm.Alltoall_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.size * (comm.rank + 1))
            request = comm.Alltoallv_init([x, counts], [y, [comm.rank + 1] * comm.size])
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallw` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.arange(4.0 * comm.size).reshape(4, comm.size), cp.empty((4, comm.size))
            column = MPI.DOUBLE.Create_vector(4, 1, comm.size).Commit()
            columns = [1] * comm.size, [8 * rank for rank in range(comm.size)], [column] * comm.size
            request = comm.Alltoallw_init([x, *columns], [y, *columns])
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Bcast` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x = cp.arange(8) if comm.rank == 0 else cp.empty(8, int)
            request = comm.Bcast_init(x, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Exscan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Exscan` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.full(8, comm.rank), cp.zeros(8, int)
            request = comm.Exscan_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Gather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Gather` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.full(3, comm.rank), cp.empty(3 * comm.size, int)
            request = comm.Gather_init(x, y if comm.rank == 0 else None, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Gatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Gatherv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.full(comm.rank + 1, comm.rank), cp.empty(sum(counts), int)
            request = comm.Gatherv_init(x, [y, counts] if comm.rank == 0 else None, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        order: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Reduce_init(x, y if comm.rank == 0 else None, op=MPI.MAX, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.ones(sum(counts)), cp.empty(comm.rank + 1)
            request = comm.Reduce_scatter_init(x, y, recvcounts=counts)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
        order: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter_block` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.ones(3 * comm.size), cp.empty(3)
            request = comm.Reduce_scatter_block_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Scan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scan` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.full(8, comm.rank), cp.empty(8, int)
            request = comm.Scan_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scatter` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            x, y = cp.arange(3 * comm.size), cp.empty(3, int)
            request = comm.Scatter_init(x if comm.rank == 0 else None, y, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """

    def Scatterv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scatterv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            counts = [rank + 1 for rank in range(comm.size)]
            x, y = cp.arange(sum(counts)), cp.empty(comm.rank + 1, int)
            request = comm.Scatterv_init([x, counts] if comm.rank == 0 else None, y, root=0)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
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

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send the same block to each.

        ``sendbuf`` has n elements, and ``recvbuf`` n for each neighbour that sends, in MPI's order of neighbours.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_allgather(x, y)
        """

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send the same block to each. Blocks differ in length.

        ``recvbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour
        that sends.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_allgatherv(x, [y, [3, 3]])
        """

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each.

        Both buffers have n elements for each neighbour, in MPI's order of neighbours.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_alltoall(x, y)
        """

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each. Blocks differ in length.

        A buffer is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour, in
        elements.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_alltoallv([x, [3, 3]], [y, [3, 3]])
        """

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each. Blocks differ in datatype.

        A buffer is ``[array, counts, displacements, types]``, with an entry for each neighbour. Displacements are in
        bytes.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), float(grid.rank)), cp.empty((2, 3))
                blocks = [1, 1], [0, x.nbytes // 2], [MPI.DOUBLE.Create_contiguous(3).Commit()] * 2
                grid.Neighbor_alltoallw([x, *blocks], [y, *blocks])
        """

    def Ineighbor_allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgather` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                request = grid.Ineighbor_allgather(x, y)
                request.Wait()
        """

    def Ineighbor_allgatherv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgatherv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                request = grid.Ineighbor_allgatherv(x, [y, [3, 3]])
                request.Wait()
        """

    def Ineighbor_alltoall(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoall` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                request = grid.Ineighbor_alltoall(x, y)
                request.Wait()
        """

    def Ineighbor_alltoallv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallv` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                request = grid.Ineighbor_alltoallv([x, [3, 3]], [y, [3, 3]])
                request.Wait()
        """

    def Ineighbor_alltoallw(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallw` with its arguments; return the request.

        Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), float(grid.rank)), cp.empty((2, 3))
                blocks = [1, 1], [0, x.nbytes // 2], [MPI.DOUBLE.Create_contiguous(3).Commit()] * 2
                request = grid.Ineighbor_alltoallw([x, *blocks], [y, *blocks])
                request.Wait()
        """

    def Neighbor_allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgather` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                request = grid.Neighbor_allgather_init(x, y)
                for _ in range(3):
                    request.Start()
                    request.Wait()
                request.Free()
        """

    def Neighbor_allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgatherv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                request = grid.Neighbor_allgatherv_init(x, [y, [3, 3]])
                for _ in range(3):
                    request.Start()
                    request.Wait()
                request.Free()
        """

    def Neighbor_alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoall` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                request = grid.Neighbor_alltoall_init(x, y)
                for _ in range(3):
                    request.Start()
                    request.Wait()
                request.Free()
        """

    def Neighbor_alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallv` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                request = grid.Neighbor_alltoallv_init([x, [3, 3]], [y, [3, 3]])
                for _ in range(3):
                    request.Start()
                    request.Wait()
                request.Free()
        """

    def Neighbor_alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallw` with its arguments; return the request.

        Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), float(grid.rank)), cp.empty((2, 3))
                blocks = [1, 1], [0, x.nbytes // 2], [MPI.DOUBLE.Create_contiguous(3).Commit()] * 2
                request = grid.Neighbor_alltoallw_init([x, *blocks], [y, *blocks])
                for _ in range(3):
                    request.Start()
                    request.Wait()
                request.Free()
        """
