"""Streams: the calls of one group on tensors of its GPU, in stream order."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpicomm.api.communicator import Communicator
from mpicomm.collectives.gpu.plan_cache import KnownCall
from mpicomm.torch.current_stream import call_on, current_stream
from mpicomm.torch.known_calls import Given, TensorCall
from mpicomm.torch.symmetric_pool import SymmetricPool
from mpicomm.torch.works import StreamWork, Tensors

if TYPE_CHECKING:
    from mpicomm.devices.cuda.events import LocalEvent

_MOST_BUCKETS = 256


class Streams:
    """Enqueues calls: on PyTorch's current stream, or asynchronous calls on a stream of the group, after its work.

    A group has one such stream, because its calls follow each other on every stream. No method waits for the GPU.
    `enqueue`, `begin`, `future`, `barrier` and `allocate` are collective. They wait on the host only if ranks set up
    memory.
    """

    def __init__(self, comm: Communicator) -> None:
        assert isinstance(comm.device, int)
        self.comm = comm
        self.gpu = comm.device
        # Marks order streams by their addresses. PyTorch's own methods take several times as long.
        backend = comm._session.gpu("init_process_group")
        self.marks = backend.side_streams
        self._session: Any = comm._session
        self._engines: Any = comm._collectives.engines
        comm._collectives.expect_alike()  # PyTorch requires it, and `enqueue` calls the engine without a vote
        self._mappings = comm._session.mappings
        self._version = self._mappings.version
        self._buckets: dict[tuple[int, int, torch.dtype, int], KnownCall] = {}
        """The calls of `bucket` that have a graph, by their memory and operation."""
        self._pool = SymmetricPool(comm)
        # The constructor makes the stream, because the first call may be in a capture.
        self.stream = torch.cuda.Stream(comm.device)
        self._address = int(self.stream.cuda_stream)
        backend.lasting_streams.add(self._address)  # PyTorch never destroys the streams of its pool
        self._begin = self.marks.mark(self._address)
        """The mark by which an asynchronous call follows earlier work of the caller's stream.

        It pairs with the mark or event at the end of the call, which orders later work of that stream after the call.
        One thread at a time uses it, because it has the turn."""
        self._events: dict[int, LocalEvent] = {}
        """The events after asynchronous calls, by their addresses."""
        self.idle: list[int] = []
        """The events that no work has."""
        self.devices = [torch.device("cuda", comm.device)]

    def enqueue(self, call: TensorCall, given: Given, event: LocalEvent | None = None, beside: bool = False) -> bool:
        """Enqueue a call on the group's stream (``beside``) or the current one.

        Return whether ``event`` is recorded after it.
        """
        gpu = self._engines.gpu
        known = gpu and call.find(gpu, given)
        if known:
            session, plan = self._session, known.plan
            address = self._address if beside else current_stream(self.gpu)
            session.require_usable(plan)
            session.backend.note(address)
            is_recorded: bool = gpu.engine.enqueue(plan, address, event)
            return is_recorded
        if beside:
            call_on(self.stream, call.carry_out, *given)
        else:
            call.carry_out(*given)
        return False

    def begin(
        self, call: TensorCall, given: Given, outputs: Tensors, inputs: Tensors, name: str, limit: timedelta | None
    ) -> StreamWork:
        """Enqueue a call on the group's stream. The current stream does not wait for it."""
        current, address = current_stream(self.gpu), self._address
        try:
            event = self._events[self.idle.pop()]
        except IndexError:  # a test beforehand is not enough: a work of another thread may take the last event
            event = self._new_event()
        # This is no ``__init__``, because an ``__init__`` in Python would make a work take half as long again.
        work = StreamWork()
        work.side, work.name, work.ptr, work.kept, work._outputs = self, name, event.ptr, None, list(outputs)
        try:
            self.marks.wait_stream_again(self._begin, address, current)
            is_recorded = self.enqueue(call, given, event, beside=True)
            if self._pool.is_in_use:
                self._note_use((*outputs, *inputs))
            if not is_recorded:
                self._mark(work, address)
                self.idle.append(event.ptr)
        except BaseException:
            self.marks.wait_stream(current, address)  # a capture can end only after its streams have joined again
            raise
        work.kept = current, (*outputs, *inputs)
        if limit is not None:
            work.limit = limit
        return work

    def here(self, outputs: Tensors, name: str, limit: timedelta) -> StreamWork:
        """Return a work for the work of the current stream so far. A wait for it waits on the host. Local."""
        stream, work = torch.cuda.current_stream(self.gpu), StreamWork()
        work.side, work.name, work.ptr, work.kept, work._outputs = self, name, 0, None, list(outputs)
        self._mark(work, stream.cuda_stream)
        work.stream, work.limit = stream, limit
        return work

    def future(
        self,
        call: TensorCall,
        given: Given,
        value: torch.Tensor | Tensors,
        tensors: Tensors,
        beside: bool,
        known: KnownCall | None = None,
    ) -> torch.futures.Future[Any]:
        """Enqueue a call on the group's stream (``beside``) or the current one. Return its complete future.

        ``tensors`` are the tensors of the call. ``known`` is the call if the caller has found it.
        """
        # Not PyTorch's class in Python, whose constructor takes the host longer than all else here. PyTorch's own works
        # return futures of this class, too.
        future: torch.futures.Future[Any] = torch._C.Future(self.devices)
        # With its result PyTorch records an event on the current stream. A stream that takes the value waits for it.
        if not beside:
            self.enqueue(call, given)
            future.set_result(value)
            return future
        # There is no work, because its creation and its mark would take the host half as long as the call.
        current, side = current_stream(self.gpu), self.stream
        try:
            self.marks.wait_stream_again(self._begin, self._address, current)
            if known is None:
                self.enqueue(call, given, beside=True)
            else:
                self._session.require_usable(known.plan)
                self._engines.gpu.engine.enqueue(known.plan, self._address)
            for tensor in tensors:
                tensor.record_stream(side)  # else PyTorch reuses the memory when the caller drops the tensor
            if self._pool.is_in_use:
                self._note_use(tensors)
            call_on(side, future.set_result, value)
        except BaseException:
            self.marks.wait_stream(current, self._address)  # as above
            raise
        return future

    def bucket(self, call: TensorCall, tensor: torch.Tensor, op: Any) -> torch.futures.Future[Any] | None:
        """Enqueue an all-reduce beside the current stream, as `future` does. Return None if its form is not known.

        ``call`` is the group's all-reduce. DDP makes such a call for each bucket of a step. Other work fills the caches
        of the processor between two calls. A call then takes ten times as long as in a loop, because the processor
        waits for memory. So this function reads little. It does not count the thread among the users of the stream,
        because the first call of a form has done that.
        """
        gpu = self._engines.gpu
        if gpu is None or not tensor.is_cuda or not tensor.is_contiguous() or tensor.requires_grad or tensor.is_neg():
            return None
        memory = tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(op)
        known = self._buckets.get(memory)
        if known is None or known.plan.is_old or self._mappings.version != self._version:
            known = call.find(gpu, (tensor, op, "tensor", None))
            if known is None:
                return None
            self._keep(memory, known)
        return self.future(call, (), tensor, (tensor,), beside=True, known=known)

    def _keep(self, memory: tuple[int, int, torch.dtype, int], known: KnownCall) -> None:
        """Let `bucket` repeat a call. Views of complex memory may be conjugated, and templates have other calls."""
        from mpicomm.collectives.gpu.call_templates import CallTemplate  # it imports CUDA, which a host may lack

        if self._mappings.version != self._version or len(self._buckets) >= _MOST_BUCKETS:
            self._version = self._mappings.version
            self._buckets.clear()
        if not (memory[2].is_complex or isinstance(known.plan, CallTemplate)):
            self._buckets[memory] = known

    def barrier(self, limit: timedelta) -> StreamWork:
        """Enqueue a barrier on the current stream. A wait for its work waits on the host. Collective."""
        self.comm.Barrier(stream=torch.cuda.current_stream(self.gpu))
        return self.here((), "barrier", limit)

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in symmetric memory for the current stream: see `SymmetricPool.allocate`.

        In a capture it is PyTorch's own memory, because that memory belongs to the graph as long as the graph exists.
        """
        if self.capture():
            return torch.empty(size, dtype=dtype, device=self.devices[0])
        return self._pool.allocate((size,), dtype, current_stream(self.gpu))

    def capture(self) -> bool:
        """Return whether the current stream captures a graph."""
        with torch.cuda.device(self.gpu):
            return bool(torch.cuda.is_current_stream_capturing())

    def _new_event(self) -> LocalEvent:
        event: LocalEvent = self.marks.event()
        self._events[event.ptr] = event
        return event

    def _mark(self, work: StreamWork, address: int) -> None:
        """Let ``work`` end at the work that the stream with this address has so far."""
        work.mark = mark = self.marks.mark(address)
        work.ptr = mark.ptr

    def _note_use(self, tensors: Tensors) -> None:
        """Let the pool reuse the memory of ``tensors`` only after the work that the group's stream has now."""
        if not torch.cuda.is_current_stream_capturing():  # both streams capture, or none
            # This is no method of a work, because a work keeps the tensors.
            self._pool.used(tensors, partial(self.marks.follow, mark=self.marks.mark(self._address)))
