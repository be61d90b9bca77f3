"""Streams: the calls of one group on tensors of its GPU, their works, and tensors in symmetric memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mpicomm.api.communicator import Communicator
from mpicomm.api.internals import AnyPlan, PlanCache
from mpicomm.symmetric.array import SymmetricArray
from mpicomm.torch.collectives import Args, TensorCall
from mpicomm.torch.works import NO_TIMEOUT, Tensors, Work, as_group_error, timeout_error
from mpicomm.waiting import wait_until

if TYPE_CHECKING:
    from mpicomm.devices.cuda.events import LocalEvent

T = TypeVar("T")

current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)
"""Returns the address of the current stream of a GPU. Local. PyTorch without CUDA has no such function."""


def call_on(stream: torch.cuda.Stream, call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, with ``stream`` as the current stream of its GPU, and its GPU as current device."""
    gpu = stream.device_index
    device, before = torch._C._cuda_getDevice(), torch._C._cuda_getCurrentStream(gpu)
    torch._C._cuda_setStream(stream.stream_id, gpu, stream.device_type)
    try:
        return call(*args)
    finally:
        torch._C._cuda_setStream(*before)
        if device != gpu:  # the line above has made the GPU of the streams the current device
            torch._C._cuda_setDevice(device)


class StreamWork(Work):
    """A call that is enqueued on a stream, which may capture a graph. `Streams` makes it.

    It is also the mark of the end of the call. It keeps the tensors of the call until a wait by the stream that has
    begun it: the later work of that stream follows the call, as if it were a call on that stream. PyTorch's
    `record_stream` protects the memory of tensors without such a wait, and takes longer.
    """

    __slots__ = ("kept", "name", "ptr", "streams")
    ptr: int
    """The event after the call. It goes back to ``streams.idle``, except if it is the event of `mark`."""
    streams: Streams
    kept: tuple[int, Tensors] | None
    """The address of the current stream when the call began, and the tensors of the call."""
    name: str
    mark: Any = None
    limit: timedelta | None = None
    """The time that the host waits in `wait`. `NO_TIMEOUT` is no limit. If it is None, the host does not wait."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, and the call goes on."""
        streams = self.streams
        current = current_stream(streams.gpu)
        streams.marks.wait_event(current, self)
        kept = self.kept
        if kept is not None and kept[0] == current:
            self.kept = None
        limit = timeout or self.limit
        if (
            limit is not None
            and not torch.cuda.is_current_stream_capturing()  # a capture executes nothing
            and not wait_until(self.is_completed, limit.total_seconds() or math.inf)
        ):
            raise timeout_error(self.name, limit)
        if self._error is not None:
            raise self._error
        return True

    def __del__(self) -> None:
        if self.kept is not None:
            for tensor in self.kept[1]:
                tensor.record_stream(self.streams.stream)
        if self.ptr and self.mark is None:
            # A stream that waits for the event waits for the record at that time, whatever comes later. This is no
            # object with a finalizer, because the garbage collector may call the finalizers of both in any order.
            self.streams.idle.append(self.ptr)

    def is_completed(self) -> bool:
        if not self.streams.marks.is_done(self):
            return False
        self.kept = None
        if self._error is None:
            try:
                self.streams.internals.raise_async_error()
            except Exception as error:
                self._error = as_group_error(error, self.name)
        return True

    def _make_future(self) -> torch.futures.Future[Any]:
        devices = self.streams.devices if self._outputs else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        call_on(self.streams.stream, future.set_result, self.value)
        return future


class Streams:
    """Enqueues calls: on PyTorch's current stream, or asynchronous calls on a stream of the group, after its work.

    A group has one such stream, because its calls follow each other on every stream. No method waits for the GPU.
    `enqueue`, `start`, `future` and `allocate` are collective. They wait on the host only if ranks set up memory.
    """

    def __init__(self, comm: Communicator) -> None:
        assert isinstance(comm.device, int)
        self.gpu = comm.device
        self.internals = comm._internals
        self.internals.disable_votes()
        self._plans: PlanCache | None = None  # there is none before the first call
        self._pool = SymmetricPool(comm)
        # The constructor makes the stream, because the first call may be in a capture.
        self.stream = torch.cuda.Stream(comm.device)
        self._address = int(self.stream.cuda_stream)
        # PyTorch never destroys the streams of its pool. Marks order streams by their addresses, because PyTorch's own
        # methods take several times as long.
        self.marks = self.internals.register_stream("init_process_group", self._address)
        self._start_mark = self.marks.mark(self._address)
        """The mark by which an asynchronous call follows earlier work of the caller's stream.

        It pairs with the mark or event at the end of the call, which orders later work of that stream after the call.
        One thread at a time uses it, because it holds the lock of the `CallQueue`."""
        self._events: dict[int, LocalEvent] = {}
        """The events after asynchronous calls, by their addresses."""
        self.idle: list[int] = []
        """The events that no work has."""
        self.devices = [torch.device("cuda", comm.device)]

    def enqueue(self, call: TensorCall, args: Args, event: LocalEvent | None = None, overlap: bool = False) -> bool:
        """Enqueue a call on the group's stream (``overlap``) or the current one.

        Return whether ``event`` is recorded after it.
        """
        plans = self._plans
        if plans is None:
            plans = self._plans = self.internals.plan_cache
        plan = None if plans is None else call.find_plan(plans, args)
        if plan:
            assert plans is not None
            return plans.enqueue_on(plan, self._address if overlap else current_stream(self.gpu), event)
        if overlap:
            call_on(self.stream, call.run, *args)
        else:
            call.run(*args)
        return False

    def start(self, call: TensorCall, args: Args, outputs: Tensors, inputs: Tensors, name: str) -> StreamWork:
        """Enqueue a call on the group's stream. The current stream does not wait for it."""
        current, address = current_stream(self.gpu), self._address
        try:
            event = self._events[self.idle.pop()]
        except IndexError:  # a test beforehand is not enough: a work of another thread may take the last event
            event = self.marks.event()
            self._events[event.ptr] = event
        # This is no ``__init__``, because an ``__init__`` in Python would make a work take half as long again.
        work = StreamWork()
        work.streams, work.name, work.ptr, work.kept, work._outputs = self, name, event.ptr, None, list(outputs)
        try:
            self.marks.wait_stream(address, current, self._start_mark)
            is_recorded = self.enqueue(call, args, event, overlap=True)
            if self._pool.by_address:
                self._record_use((*outputs, *inputs))
            if not is_recorded:
                work.mark = mark = self.marks.mark(address)
                work.ptr = mark.ptr
                self.idle.append(event.ptr)
        except BaseException:
            self.marks.wait_stream(current, address)  # a capture can end only after its streams have joined again
            raise
        work.kept = current, (*outputs, *inputs)
        return work

    def future(
        self, call: TensorCall, args: Args, value: Any, tensors: Tensors, overlap: bool, plan: AnyPlan | None = None
    ) -> torch.futures.Future[Any]:
        """Enqueue a call on the group's stream (``overlap``) or the current one. Return its complete future.

        ``tensors`` are the tensors of the call. ``plan`` is its plan if the caller has found it.
        """
        # Not PyTorch's class in Python, whose constructor takes the host longer than all else here. PyTorch's own works
        # return futures of this class, too.
        future: torch.futures.Future[Any] = torch._C.Future(self.devices)
        # With its result PyTorch records an event on the current stream. A stream that takes the value waits for it.
        if not overlap:
            self.enqueue(call, args)
            future.set_result(value)
            return future
        # There is no work, because its creation and its mark would take the host half as long as the call.
        current, stream = current_stream(self.gpu), self.stream
        try:
            self.marks.wait_stream(self._address, current, self._start_mark)
            if plan is None:
                self.enqueue(call, args, overlap=True)
            else:
                assert self._plans is not None
                self._plans.enqueue_on(plan, self._address, is_user=True)
            for tensor in tensors:
                tensor.record_stream(stream)  # else PyTorch reuses the memory when the caller drops the tensor
            if self._pool.by_address:
                self._record_use(tensors)
            call_on(stream, future.set_result, value)
        except BaseException:
            self.marks.wait_stream(current, self._address)  # as above
            raise
        return future

    def bucket(self, call: TensorCall, tensor: torch.Tensor, op: Any) -> torch.futures.Future[Any] | None:
        """Enqueue an all-reduce on the group's stream, as `future` does. Return None if its form is not known.

        ``call`` is the group's all-reduce. DDP makes such a call for each bucket of a step, and other work fills the
        caches of the processor between two of them. Each call then waits for memory, some ten times as long as in a
        loop. So this function reads little: the memory of a bucket is the key of its plan. It does not count the thread
        among the users of the stream, because the first call of a form has done that.
        """
        plans = self._plans
        if plans is None or not tensor.is_cuda or not tensor.is_contiguous() or tensor.requires_grad or tensor.is_neg():
            return None
        dtype = tensor.dtype
        if dtype.is_complex:  # views of complex memory may be conjugated
            return None
        key = tensor.data_ptr(), tensor.numel(), dtype, hash(op)
        plan = plans.find_by_key(key)
        if plan is None:
            plan = call.find_plan(plans, (tensor, op, "tensor", None))
            if plan is None:
                return None
            plans.add_by_key(key, plan)
        return self.future(call, (), tensor, (tensor,), overlap=True, plan=plan)

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in symmetric memory for the current stream: see `SymmetricPool.allocate`.

        In a capture it is PyTorch's own memory, because that memory belongs to the graph as long as the graph exists.
        """
        if self.capture():
            return torch.empty(size, dtype=dtype, device=self.devices[0])
        return self._pool.allocate(size, dtype, current_stream(self.gpu))

    def capture(self) -> bool:
        """Return whether the current stream captures a graph."""
        with torch.cuda.device(self.gpu):
            return bool(torch.cuda.is_current_stream_capturing())

    def _record_use(self, tensors: Tensors) -> None:
        """Let the pool reuse the memory of ``tensors`` only after the work that the group's stream has now."""
        if not torch.cuda.is_current_stream_capturing():  # both streams capture, or none
            # This is no method of a work, because a work keeps the tensors.
            self._pool.record_use(tensors, partial(self.marks.wait_event, mark=self.marks.mark(self._address)))


@dataclass
class _Block:
    array: SymmetricArray
    user: StorageWeakRef
    """The storage of the last tensor in this block."""
    follow: Callable[[int], object] | None = None
    """Lets a stream wait for the last call that uses the block on another stream; None without such a call."""


class SymmetricPool:
    """Memory for tensors of the same size on all ranks. The pool reuses it when PyTorch frees the tensor.

    As in PyTorch's own allocator, freed memory goes only to a tensor of the same stream, because its work follows the
    work on the old tensor. ``comm.Free`` frees the memory.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        self.by_address: dict[int, _Block] = {}

    def allocate(self, size: int, dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        """Return ``size`` undefined elements for work on ``stream``, an address. On the host ``stream`` is None.

        Collective if no memory of the size is free, else local. All ranks ask for the same sizes and drop their tensors
        at the same places in the program. Otherwise one rank needs new memory, waits for the other ranks in vain, and
        raises `CollectiveTimeoutError`.
        """
        nbytes = max(size, 1) * dtype.itemsize
        blocks = self._blocks.setdefault((nbytes, stream or 0), [])
        block = next((each for each in blocks if each.user.expired()), None)
        array = self._comm.empty(nbytes, "uint8") if block is None else block.array
        # With -1 no stream waits for another stream, because there is no work on the memory of the array yet.
        memory = torch.from_dlpack(array if stream is None else array.__dlpack__(stream=-1))
        user = StorageWeakRef(memory.untyped_storage())
        if block is None:
            block = self.by_address[memory.data_ptr()] = _Block(array, user)
            blocks.append(block)
        block.user = user
        if stream is not None and block.follow is not None:
            block.follow(stream)
            block.follow = None
        return memory[: size * dtype.itemsize].view(dtype)

    def record_use(self, tensors: Tensors, follow: Callable[[int], object]) -> None:
        """Record that a call uses ``tensors`` on another stream than the stream of their memory. Local.

        ``follow`` lets a stream wait for the call, because the program may drop the tensors before its end. PyTorch's
        `record_stream` keeps only PyTorch's own memory.
        """
        for tensor in tensors:
            block = self.by_address.get(tensor.untyped_storage().data_ptr())
            if block is not None:
                block.follow = follow
