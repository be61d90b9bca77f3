"""FaultPage: the page of host memory in which a kernel reports why it cannot go on."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.base import DifferingCalls
from mpicomm.devices.cuda.driver import DriverShutDownError, call
from mpicomm.devices.cuda.memory import PrimaryContext
from mpicomm.devices.handle import MemoryUse
from mpicomm.devices.host import fence
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError, equal_error
from mpicomm.kernels.experts import COMBINE, DISPATCH, ROOM, ROUTES
from mpicomm.kernels.team import COUNTS, EXCHANGE, MESSAGE, MISMATCH, OF_RECEIVE, RECEIVE_OVERFLOW, Faults
from mpicomm.kernels.variant import u32, u64
from mpicomm.kernels.window import COMES_FIRST, FENCE, LOCK, START, WAIT

_WRITTEN = 2  # kWritten in kernels/faults.cuh
_OPERATIONS = {
    1: "wait_signal",
    EXCHANGE: "collective",
    MESSAGE: "message",
    FENCE: "Win.Fence",
    START: "Win.Start: the Post",
    WAIT: "Win.Wait: the Complete",
    DISPATCH: "Experts.dispatch",
    COMBINE: "Experts.combine",
    LOCK: "Win.Lock",
}
_INVALID = {  # the errors of arguments, with places for the rank and the sequence number of the record
    ROUTES: "Experts.dispatch: topk_ids of rank {} has an id that is no expert at token {}: pass the number of an "
    "expert, or -1 for none",
    ROOM: "Experts.dispatch: rank {} gets {} rows, more than the capacity: create the Experts with a larger capacity",
    COUNTS: "Alltoallv: rank {} passed a count or displacement of sendbuf for rank {}, on the GPU, that is negative or "
    "goes beyond the end of the buffer: correct the counts before the call",
    COUNTS | OF_RECEIVE: "Alltoallv: rank {} passed a displacement of recvbuf for rank {}, on the GPU, that is "
    "negative: correct the counts before the call",
    RECEIVE_OVERFLOW: "Alltoallv: recvbuf of rank {} needs room for {} elements, by the counts on the GPU, and has "
    "less: pass a larger one",
}
_UNUSABLE = "the communicator is unusable: create another"


def called_differently(calls: Sequence[str], ranks: Sequence[int]) -> PeerError:
    """Return the error for ranks that made different calls; ``calls`` names the call of each rank."""
    return PeerError(f"ranks called different things: {'; '.join(calls)}; {_UNUSABLE}", ranks=ranks)


class FaultRecord(ctypes.Structure):
    """The host's copy of ``FaultRecord`` in kernels/faults.cuh."""

    _fields_ = [*u32("state", "operation"), *u64("sequence"), *u32("block", "peer"), *u64("elapsed_ns", "failed")]


class FaultPage:
    """One fault record in pinned host memory, and a word of the device that says whether a kernel has taken it.

    Kernels get ``faults``, the addresses of both.
    """

    _is_raised = False
    """Whether a check has raised the error."""

    def __init__(self, context: PrimaryContext, stream: int) -> None:
        self._context = context
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with context.current(), contextlib.ExitStack() as on_failure:
            address: int = call(driver.cuMemHostAlloc, mmap.PAGESIZE, flags)
            on_failure.callback(call, driver.cuMemFreeHost, address)
            ctypes.memset(address, 0, mmap.PAGESIZE)
            pointer = int(call(driver.cuMemHostGetDevicePointer, address, 0))
            self._failed = int(call(driver.cuMemAlloc, ctypes.sizeof(ctypes.c_uint32)))
            on_failure.callback(call, driver.cuMemFree, self._failed)
            call(driver.cuMemsetD32Async, self._failed, 0, 1, stream)
            call(driver.cuStreamSynchronize, stream)
            on_failure.pop_all()
        self._address = address
        self.record: Any = FaultRecord.from_address(address)
        """The record in the view of the host; None after `close`."""
        self._calls: Sequence[str] | None = None
        self.error: CollectiveTimeoutError | PeerError | None = None
        """The error that `fail` has set."""
        self.record.failed = self._failed
        self.faults = Faults(pointer, self._failed)

    def check(self, calls: DifferingCalls | None = None) -> None:
        """Raise `CollectiveTimeoutError` or `PeerError` if there is a record: at every call.

        Local; does not wait for the device. ``calls`` gives the text of a `PeerError`.
        """
        error = self._found(calls)
        if error is not None:
            self._is_raised = True
            raise error

    def unraised_error(self, calls: DifferingCalls | None = None) -> MpicommError | None:
        """Return the error that `check` would raise, if no check has raised it so far. Local."""
        return None if self._is_raised else self._found(calls)

    def _found(self, calls: DifferingCalls | None) -> MpicommError | None:
        if self.error is not None:
            return equal_error(self.error)
        # A record without its last field does not count yet. Its kernel still runs, and the next check sees the record.
        if self.record is None or self.record.state != _WRITTEN:
            return None
        # An acquire: it pairs with the store_release of `state` in report_fault. It orders the loads of the fields
        # after the load of the state that publishes them.
        fence()
        record = self.record
        if self._calls is None:  # once, because it may wait for other ranks to name their calls
            # After a timeout all ranks that come have named their calls. If this rank waited, it would report the
            # missing rank too late: ranks that wait for this rank would give up first, and name this rank.
            compares = record.operation in (EXCHANGE, MISMATCH)
            self._calls = calls(wait=record.operation == MISMATCH) if calls and compares else ()
        # Ranks that wait in different kernels do not meet. Their record is a timeout, and their calls tell the cause.
        if self._calls or record.operation == MISMATCH:
            said = self._calls or [f"rank {record.peer} sent data of another call or message than this rank expected"]
            return called_differently(said, [record.peer])
        operation, rank, number = record.operation, record.peer, record.sequence
        if operation == COUNTS:
            operation, number = operation | number & OF_RECEIVE, number & ~OF_RECEIVE
        if operation in _INVALID:
            return InvalidUsageError(f"{_INVALID[operation].format(rank, number)}; {_UNUSABLE}", ranks=[rank])
        late = f"number {number} from rank {rank} did not come"
        if operation == LOCK and number == COMES_FIRST:
            late = f"rank {rank} has its turn to take the lock first, and did not take it"
        elif operation == LOCK:
            late = f"rank {rank} holds the lock, and did not give it up"
        time = f"within {record.elapsed_ns / 1e9:.3g} s" if record.elapsed_ns else "in time, as another rank reports"
        text = f"{_OPERATIONS.get(operation, f'operation {operation}')}: {late} {time} (block {record.block})"
        return CollectiveTimeoutError(f"{text}; {_UNUSABLE}", ranks=[rank])

    def fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        """Let every check raise an error of the same class and text, which no kernel has reported; local."""
        self.error = equal_error(error)

    def memory_use(self) -> MemoryUse:
        """Return the memory of the page and of the word."""
        return MemoryUse("fault page", ctypes.sizeof(ctypes.c_uint32), mmap.PAGESIZE)

    def close(self) -> None:
        """Free the page; no kernel that has its address may run. A second call does nothing."""
        if self.record is not None:
            self.record = None
            with contextlib.suppress(DriverShutDownError), self._context.current():
                call(driver.cuMemFree, self._failed)
                call(driver.cuMemFreeHost, self._address)
