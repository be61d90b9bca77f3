"""Works: the objects that ``torch.distributed`` returns for asynchronous calls, and the errors of their waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch._C import _distributed_c10d as c10d

from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.waiting import ENDING, start_thread, wait_until

Tensors = Sequence[torch.Tensor]
NO_TIMEOUT = timedelta(0)
"""PyTorch's value for a wait without a limit."""
WAIT_ERRORS = CollectiveTimeoutError, PeerError
"""The errors of waits for other ranks."""


class GroupTimeoutError(CollectiveTimeoutError, RuntimeError):
    """The error if ranks of the group did not come in time."""


class GroupPeerError(PeerError, RuntimeError):
    """The error if a rank of the group failed or called something else."""


def as_group_error(error: BaseException, name: str) -> BaseException:
    """Return an error of the call ``name``. The error of a wait for other ranks becomes a class above. Local."""
    expected: BaseException
    if isinstance(error, CollectiveTimeoutError):
        expected = GroupTimeoutError(f"{name}: the timeout is over: {error}", ranks=error.ranks)
    elif isinstance(error, PeerError):
        expected = GroupPeerError(f"{name}: {error}", ranks=error.ranks)
    else:
        return error
    expected.__cause__ = error
    return expected


class Work(c10d.Work):
    """A call that has ended, or that is enqueued on the current stream: see `completed_work`.

    Calls of the classes below may still be in progress.
    """

    # Attributes of every work are slots, because the host takes twice as long to make a work with a dictionary.
    __slots__ = ("__dict__", "_outputs")

    _error: BaseException | None = None
    _future: torch.futures.Future[Any] | None = None
    _source = -1
    _outputs: list[torch.Tensor]
    future_value: Any = None
    """The value of the future, in place of the outputs."""

    @property
    def value(self) -> Any:
        """The value of the future."""
        return self._outputs if self.future_value is None else self.future_value

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
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
        # Another thread may have been faster.
        return self._future or self.__dict__.setdefault("_future", self._make_future())

    def for_cpp(self) -> c10d.Work:
        """Return a work of PyTorch's own for this one, which lives as long as code in C++ keeps it."""
        return c10d._create_work_from_future(self.get_future())

    def boxed(self) -> torch.ScriptObject:
        """Return the work as an argument for operators with code in C++ that may keep it."""
        return self.for_cpp().boxed()

    def _make_future(self) -> torch.futures.Future[Any]:
        future = self._new_future()
        # For tensors of a GPU PyTorch records events on the current streams. A stream that takes the value waits for
        # them.
        future.set_result(self.value)
        return future

    def _new_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=list({output.device for output in self._outputs if output.is_cuda}))


def completed_work(outputs: Tensors) -> Work:
    """Return the work of a call that has ended, or that is enqueued on the current stream. Local.

    This is no ``__init__``, because an ``__init__`` in Python would make a work take half as long again.
    """
    work = Work()
    work._outputs = list(outputs)
    return work


class PendingWork(Work):
    """A call that may be in progress when its future is made.

    The future is `_outcome` as a callback of another future, which completes when the call is over. PyTorch's code in
    C++ would take an exception of `set_exception` for a value, and DDP takes that for tensors. An exception of a
    callback is an error there, too.
    """

    _failure: BaseException | None = None
    """The error of the future if the call has not ended in time."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def _outcome(self, _: Any) -> Any:
        error = self._failure or self._error
        if error is not None:
            raise error
        return self.value


class MessageWork(PendingWork):
    """A message that is sent or received. MPI moves it only inside its calls, so a `ProgressThread` polls it, too."""

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

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, or after the group's timeout."""
        limit_s = timeout.total_seconds() or self._timeout_s
        if not wait_until(self.is_completed, limit_s):
            raise timeout_error(self._name, timedelta(seconds=limit_s))
        return super().wait()

    def is_completed(self) -> bool:
        with self._lock:
            if not self.over:
                status = MPI.Status()
                try:
                    self.over = self._request.Test(status)
                except Exception as error:
                    self.over, self._error = True, as_group_error(error, self._name)
                if self.over and self._receives:
                    self._source = status.source
        return self.over

    advance = is_completed

    def _make_future(self) -> torch.futures.Future[Any]:
        """Complete the future at once, or in a new thread, because its callbacks may wait for other works.

        At the end of the program nobody waits for it.
        """
        over = self._new_future()
        if self.is_completed():
            over.set_result(self._outputs)
            return over.then(self._outcome)

        def run() -> None:
            self._prepare_thread()
            if not wait_until(lambda: ENDING.is_set() or self.is_completed(), self._timeout_s):
                self._failure = timeout_error(self._name, timedelta(seconds=self._timeout_s))
            if not ENDING.is_set():
                over.set_result(self._outputs)  # streams that take the value wait for the work of this thread's streams

        start_thread(run, f"mpicomm {self._name}")
        return over.then(self._outcome)


class JoinedWork(Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._outputs = [output for work in works for output in work._outputs]
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work.wait`. ``timeout`` bounds the wait for each call."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        over = all(work.is_completed() for work in self._works)
        self._error = next((work._error for work in self._works if work._error is not None), None)
        return over

    def _make_future(self) -> torch.futures.Future[Any]:
        def outcome(joined: torch.futures.Future[Any]) -> Any:
            # On a GPU PyTorch calls this with a stream of its own, which waits here for the calls.
            torch.futures.wait_all(joined.value())
            return self.value

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(outcome)


def timeout_error(name: str, timeout: timedelta) -> GroupTimeoutError:
    """Return the error of a call that has not ended within ``timeout``. Local."""
    return GroupTimeoutError(f"{name} has not ended within {timeout.total_seconds():g} s")
