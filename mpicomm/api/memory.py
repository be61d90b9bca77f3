"""The memory of a Communicator: arrays and events that the ranks of a node share, and their suspension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from mpicomm.session import Session
from mpicomm.symmetric import create
from mpicomm.symmetric.array import SymmetricArray
from mpicomm.symmetric.create import SharedEvent


class MemoryCalls(MPI.Intracomm):
    """Methods that open memory to the other ranks of the node, or give it back. All of them are *collective*."""

    _session: Session

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> SymmetricArray:
        """Allocate an array on every rank and open it to the other ranks of the node. Collective, blocking.

        The contents are undefined. All ranks pass the same ``shape``, the shape of one rank's array, and the same
        ``dtype``. Arrays of size zero are allowed. The array's ``close()`` frees it, or `Free` of the communicator
        does.

        Raises the same error on all ranks: `InvalidUsageError` for a bad shape or dtype, or if the ranks differ in
        them; `HandleError` if memory cannot be allocated or opened; `CollectiveTimeoutError` if a rank does not come.

            with comm.empty((4, 8), "float32") as a:
                a.local[...] = comm.rank
        """
        return create.empty(self._session.set_up("empty"), shape, dtype, zero=False)

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> SymmetricArray:
        """Allocate an array as `empty` does, and fill it with zeros. Collective, blocking.

        Raises the errors of `empty`.

            a = comm.zeros(8, "float32")
            following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            a.peer(following)[...] = comm.rank
            a.signal(following)
            a.wait_signal(previous)
            a.close()
        """
        return create.empty(self._session.set_up("zeros"), shape, dtype, zero=True)

    def register(self, array: Any) -> SymmetricArray:
        """Open existing memory, one array per rank, to the other ranks of the node. Collective, blocking.

        On a GPU ``array`` is a C-contiguous CuPy, DLPack or ``__cuda_array_interface__`` array in memory of
        ``cudaMalloc``, or in virtual memory or a stream-ordered pool that can be exported as a file descriptor. The
        default pools of CuPy and PyTorch and PyTorch's expandable segments have such memory. Peers then see the whole
        block of the pool, or the whole allocations around the array. On the host ``array`` lies in a shared mapping:
        ``multiprocessing.shared_memory``, a writable ``numpy.memmap``, or memory that a communicator with the same
        ranks has made, such as ``a.local`` of `empty`. The memory stays the caller's, and must outlive the
        `SymmetricArray`. The `SymmetricArray` closes like an array of `empty`.

        Raises the same error on all ranks: `InvalidUsageError` for memory that peers cannot open, with its kind and the
        way out, and for shapes or dtypes that differ; `HandleError` if memory cannot be opened;
        `CollectiveTimeoutError` if a rank does not come.
        """
        return create.register(self._session.set_up("register"), array)

    def suspend(self, *, keep: bool = True) -> None:
        """Give the device memory of this communicator back to the driver, until `resume`. Collective, blocking.

        It is for programs that need the GPU's memory for another phase. The memory of collectives, messages, signals,
        symmetric arrays, windows and experts goes, and its addresses stay reserved. So captured graphs, known calls,
        views and registrations are valid again after `resume`. Registered memory stays, because it is the caller's. So
        do blocks of less than 2 MiB of private memory, and memory of NCCL between peer domains. Communicators of
        ``Dup`` and ``Split`` have memory of their own: suspend them, too.

        This call first waits for this rank's device. With ``keep`` the contents of symmetric arrays and of windows of
        `Win.Allocate` go to pinned memory of the host, and come back. With ``keep=False`` their contents are undefined
        after `resume`. That is faster, and takes no memory of the host.

        Until `resume`, calls on device arrays, symmetric arrays, events and windows raise `InvalidUsageError` on all
        ranks. Views of symmetric arrays must not be used. Calls on host arrays go on, as do `check`, `describe`, the
        ``close`` of arrays, and `Free`. A call on a suspended communicator does nothing.

        The communicator needs ``handle="fd"`` or ``"fabric"``. With ``"ipc"`` this raises `InvalidUsageError`, because
        memory cannot come back at its addresses. On the cpu and with ``"staged"`` all memory stays, because it is
        memory of the host. Raises the same error on all ranks: `InvalidUsageError` also if ranks differ in ``keep``;
        `CollectiveTimeoutError` if a rank does not come.
        """
        self._session.suspend(keep=bool(keep))

    def resume(self) -> None:
        """Take the device memory back that `suspend` has given to the driver. Collective, blocking.

        Graphs that hold calls of this communicator may be launched after it. A call on a communicator that is not
        suspended does nothing. Raises the same error on all ranks: `HandleError` if a rank finds too little memory;
        `CollectiveTimeoutError` if a rank does not come. After a `HandleError` the communicator is still suspended, has
        lost nothing, and can be resumed later.
        """
        self._session.resume()

    def shared_event(self) -> SharedEvent:
        """Create an event per rank that all ranks of the node can wait for. Collective, blocking.

        The event's ``close()`` releases it, or `Free` of the communicator does. Raises the errors of `empty`.
        """
        return create.shared_event(self._session.set_up("shared_event"))
