"""Streams: the calls of one group on tensors of its GPU, in stream order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch

from mpicomm.api.communicator import Communicator
from mpicomm.torch.collective_calls import Call, Given
from mpicomm.torch.current_stream import CurrentStream, current_stream
from mpicomm.torch.symmetric_pool import SymmetricPool
from mpicomm.torch.works import StreamWork, Tensors, enqueued

T = TypeVar("T")


class Streams:
    """Enqueues asynchronous calls on a stream of the group, after the work of PyTorch's current stream.

    A group has one such stream, because its calls follow each other on every stream. No method waits for the GPU.
    `begin`, `future`, `barrier` and `allocate` are collective. They wait on the host only if ranks set up memory.
    """

    def __init__(self, comm: Communicator) -> None:
        assert isinstance(comm.device, int)
        self.comm = comm
        self.gpu = comm.device
        # Marks order streams by their addresses. PyTorch's own methods take several times as long.
        self.marks = comm._session.gpu("init_process_group").side_streams
        self._pool = SymmetricPool(comm)
        # The constructor makes the stream, because the first call may be in a capture.
        self._side = torch.cuda.Stream(comm.device)
        self._on_side = CurrentStream(self._side)
        self._address = int(self._side.cuda_stream)
        self._end = partial(self.marks.mark, self._address)
        self.devices = [torch.device("cuda", comm.device)]

    def begin(
        self, call: Call, given: Given, outputs: Tensors, inputs: Tensors, name: str, limit: timedelta | None
    ) -> StreamWork:
        """Enqueue a call on the group's stream. The current stream does not wait for it."""
        mark = self._beside(call, given, outputs, inputs, self._end)
        return enqueued(outputs, self, self._side, mark, name, limit)

    def here(self, outputs: Tensors, name: str, limit: timedelta) -> StreamWork:
        """Return a work for the work of the current stream so far. A wait for it waits on the host. Local."""
        stream = torch.cuda.current_stream(self.gpu)
        return enqueued(outputs, self, stream, self.marks.mark(stream.cuda_stream), name, limit)

    def future(
        self, call: Call, given: Given, output: torch.Tensor, inputs: Tensors, *, beside: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Enqueue a call on the group's stream (``beside``) or the current one. Return its complete future."""
        if beside:
            # There is no work, because its creation and its mark would take the host half as long as the call.
            return self._beside(call, given, [output], inputs, partial(self._future, output))
        call(*given)
        return self._future(output)

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

    def _beside(self, call: Call, given: Given, outputs: Tensors, inputs: Tensors, end: Callable[[], T]) -> T:
        """Enqueue a call on the group's stream. Return the result of ``end`` at the end of that stream's work."""
        marks, side, current = self.marks, self._side, current_stream(self.gpu)
        # This orders the call after earlier work of the caller's stream. It pairs with the mark or event that `end`
        # makes, which orders later work of that stream after the call.
        marks.wait_stream(self._address, current)
        try:
            with self._on_side:
                call(*given)
                for tensor in outputs:
                    tensor.record_stream(side)  # else PyTorch reuses the memory when the caller drops the tensor
                for tensor in inputs:
                    tensor.record_stream(side)
                if self._pool.is_in_use and not torch.cuda.is_current_stream_capturing():
                    # This is no method of a work, because a work keeps the tensors.
                    self._pool.used((*outputs, *inputs), partial(marks.follow, mark=self._end()))
                return end()
        except BaseException:
            marks.wait_stream(current, self._address)  # a capture can end only after its streams have joined again
            raise

    def _future(self, output: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=self.devices)
        # PyTorch records an event on the current stream, and a stream that takes the value waits for the event.
        future.set_result(output)
        return future
