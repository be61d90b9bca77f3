"""Works: the objects that ``torch.distributed`` returns for asynchronous calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.api.communicator import Communicator
from mpicomm.devices.base import SideStreams
from mpicomm.errors import CollectiveTimeoutError
from mpicomm.torch.current_stream import call_on, current_stream
from mpicomm.torch.failures import GroupTimeoutError, translated
from mpicomm.waiting import ENDING, start_thread, wait_until

Tensors = Sequence[torch.Tensor]
FOREVER = timedelta(0)
"""PyTorch's value for a wait without a limit."""
_then = torch._C.Future.then  # before `register` replaces it, because the callback of `PendingWork` makes no calls


class Work(c10d.Work):
    """A call that has ended, or that is enqueued on the current stream: see `ended`.

    Calls of the classes below may still be in progress.
    """

    # Attributes of every work are slots, because the host takes twice as long to make a work with a dictionary.
    __slots__ = ("__dict__", "_outputs")

    _error: BaseException | None = None
    _future: torch.futures.Future[Any] | None = None
    _source = -1
    _outputs: list[torch.Tensor]
    _value: Any = None

    @property
    def value(self) -> Any:
        """The value of the future: the outputs, unless the maker of the work has set another one."""
        return self._outputs if self._value is None else self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._value = value

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Wait until the outputs may be used. Raise the error of the call.

        For tensors of a GPU the current stream waits. The host waits only if ``timeout`` is given.
        """
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Let the current stream wait for the call. For host tensors, wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, also with an error. Local; does not wait."""
        return True

    def is_success(self) -> bool:
        """Return whether the call has ended without an error. Local; does not wait."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None if it has none yet. Local; does not wait."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the outputs, after the call has ended."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the sender's rank in the group."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of `value`, which is the outputs.

        For tensors of a GPU the future is complete, and a stream that takes its value waits for the call. If the call
        has an error, the future raises RuntimeError with its text.
        """
        return self._future or self._keep(self._complete())

    def get_future_result(self) -> torch.futures.Future[Any]:
        """Return a future that tells how the call has ended."""
        return self.get_future().then(self._result)

    def kept_by_cpp(self) -> c10d.Work:
        """Return a work of PyTorch's own for this one, which lives as long as code in C++ keeps it."""
        return c10d._create_work_from_future(self.get_future())

    def boxed(self) -> torch.ScriptObject:
        """Return the work as an argument for operators with code in C++ that may keep it."""
        return self.kept_by_cpp().boxed()

    def _complete(self) -> torch.futures.Future[Any]:
        future = self._new_future()
        # For tensors of a GPU PyTorch records events on the current streams. A stream that takes the value waits for
        # them.
        future.set_result(self.value)
        return future

    def _keep(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """Return the future of the work: ``future``, or the future of another thread that was faster."""
        return self.__dict__.setdefault("_future", future)

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=list({output.device for output in self._outputs if output.is_cuda}))

    def _result(self, _: Any) -> int:
        if self._error is None:
            return int(c10d.WorkResult.SUCCESS)
        timed_out = isinstance(self._error, CollectiveTimeoutError)
        return int(c10d.WorkResult.TIMEOUT if timed_out else c10d.WorkResult.COMM_ERROR)


def ended(outputs: Tensors) -> Work:
    """Return the work of a call that has ended, or that is enqueued on the current stream. Local.

    This is no ``__init__``, because an ``__init__`` in Python would make a work take half as long again.
    """
    work = Work()
    work._outputs = list(outputs)
    return work


class PendingWork(Work):
    """A call that may be in progress when its future is made."""

    _failure: BaseException | None = None
    """The reason for which the complete future has no value."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`."""
        if self._future is not None:
            return self._future
        ended = self._new_future()
        # PyTorch's code in C++ would take an exception of `set_exception` for a value, and DDP takes that for tensors.
        # An exception of a callback is an error there, too.
        future = _then(ended, self._outcome)
        kept = self._keep(future)
        if kept is future:
            self._settle(ended)
        return kept

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        self._settle_with(ended, self._error)

    def _settle_with(self, ended: torch.futures.Future[Any], failure: BaseException | None) -> None:
        self._failure = failure
        ended.set_result(None if failure is not None else self.value)

    def _outcome(self, _: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return self.value


class StreamSource(Protocol):
    """The streams of a group: see `Streams`."""

    comm: Communicator
    devices: list[torch.device]
    """A list with only its GPU."""
    gpu: int
    marks: SideStreams
    stream: torch.cuda.Stream
    """The stream of its asynchronous calls."""
    idle: list[int]


class StreamWork(Work):
    """A call that is enqueued on a stream, which may capture a graph. `Streams` makes it.

    It is also the mark of the end of the call. It keeps the tensors of the call until a wait by the stream that has
    begun it: the later work of that stream follows the call, as if it were a call on that stream. PyTorch's
    `record_stream` protects the memory of tensors without such a wait, and takes longer.
    """

    __slots__ = ("kept", "name", "ptr", "side")
    ptr: int
    """The event after the call. It goes back to ``side.idle``, except if it is the event of `mark`."""
    side: StreamSource
    kept: tuple[int, Tensors] | None
    """The address of the current stream when the call began, and the tensors of the call."""
    name: str
    mark: Any = None
    stream: torch.cuda.Stream | None = None
    """The stream of the call; None for the stream of the group."""
    limit: timedelta | None = None
    """The time that the host waits in `wait`. `FOREVER` is no limit. If it is None, the host does not wait."""

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, and the call goes on."""
        side = self.side
        current = current_stream(side.gpu)
        side.marks.follow(current, self)
        kept = self.kept
        if kept is not None and kept[0] == current:
            self.kept = None
        limit = timeout or self.limit
        if limit is not None:
            self._wait_on_host(limit)
        if self._error is not None:
            raise self._error
        return True

    def __del__(self) -> None:
        if self.kept is not None:
            for tensor in self.kept[1]:
                tensor.record_stream(self.side.stream)
        if self.ptr and self.mark is None:
            # A stream that waits for the event waits for the record at that time, whatever comes later. This is no
            # object with a finalizer, because the garbage collector may call the finalizers of both in any order.
            self.side.idle.append(self.ptr)

    def _wait_on_host(self, limit: timedelta) -> None:
        if torch.cuda.is_current_stream_capturing():  # a capture executes nothing
            return
        if not wait_until(self.is_completed, limit.total_seconds() or math.inf):
            raise too_late(self.name, limit)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self.side.marks.passed(self):
            return False
        self.kept = None
        if self._error is None:
            try:
                self.side.comm._check_at_once()
            except Exception as error:
                self._error = translated(error, self.name)
        return True

    def _complete(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self.side.devices if self._outputs else None)
        call_on(self.stream or self.side.stream, future.set_result, self.value)
        return future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """See `Work.get_future_result`."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(failure: BaseException | None) -> None:
            self._error = self._error or failure  # of a device that has failed
            future.set_result(self._result(None))

        when_over(self, self.name, math.inf, self.side.comm._prepare_thread, settle)
        return future


class MessageWork(PendingWork):
    """A message that is sent or received. MPI moves it only inside its calls, so a `Completer` looks at it as well."""

    over = driven = False

    def __init__(
        self,
        request: MPI.Request,
        tensor: torch.Tensor,
        name: str,
        timeout_s: float,
        prepare_thread: Callable[[], None],
        *,
        receives: bool,
    ) -> None:
        super().__init__([tensor])
        self._prepare_thread = prepare_thread
        self._request = request
        self._name = name
        self._timeout_s = timeout_s
        self._receives = receives
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, or after the group's timeout."""
        limit_s = timeout.total_seconds() or self._timeout_s
        if not wait_until(self.is_completed, limit_s):
            raise too_late(self._name, timedelta(seconds=limit_s))
        return super().wait()

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        with self._lock:
            if not self.over:
                status = MPI.Status()
                try:
                    self.over = self._request.Test(status)
                except Exception as error:
                    self.over, self._error = True, translated(error, self._name)
                if self.over and self._receives:
                    self._source = status.source
        return self.over

    advance = is_completed

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        def tell(failure: BaseException | None) -> None:
            self._settle_with(ended, failure or self._error)

        when_over(self, self._name, self._timeout_s, self._prepare_thread, tell)


def when_over(
    work: Work,
    name: str,
    limit_s: float,
    prepare_thread: Callable[[], None],
    settle: Callable[[BaseException | None], None],
) -> None:
    """Call ``settle`` in a new thread when ``work`` is over or a wait for it fails, with the error of the wait. Local.

    Each future has its own thread, because its callbacks may wait for other works. At the end of the program nobody
    waits for the future.
    """

    def run() -> None:
        prepare_thread()
        failure: BaseException | None = None
        try:
            if not wait_until(lambda: ENDING.is_set() or work.is_completed(), limit_s):
                failure = too_late(name, timedelta(seconds=limit_s))
        except Exception as error:
            failure = error
        if not ENDING.is_set():
            settle(failure)

    start_thread(run, f"mpicomm {name}")


def too_late(name: str, timeout: timedelta) -> GroupTimeoutError:
    """Return the error of a call that has not ended within ``timeout``. Local."""
    return GroupTimeoutError(f"{name} has not ended within {timeout.total_seconds():g} s")
