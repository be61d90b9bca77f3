"""Streams: the calls of one group on tensors of its GPU, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from mpicomm.api.communicator import Communicator
from mpicomm.torch.current_stream import CurrentStream, current_stream
from mpicomm.torch.symmetric_pool import SymmetricPool
from mpicomm.torch.works import StreamWork, Work

T = TypeVar("T")


class Streams:
    """Enqueues blocking calls on PyTorch's current stream, and asynchronous ones on a stream of the group.

    A group has one such stream, because its calls follow each other on every stream. No method waits for the GPU.
    `run`, `barrier` and `allocate` are collective, and wait on the host where ranks set up memory.
    """

    def __init__(self, comm: Communicator) -> None:
        assert isinstance(comm.device, int)
        self._comm = comm
        self._gpu = comm.device
        # Marks order streams by their addresses. PyTorch's own methods take several times as long.
        self._marks = comm._session.gpu("init_process_group").side_streams
        self._pool = SymmetricPool(comm)
        # Not at the first call, because that one may be in a capture.
        self._side = torch.cuda.Stream(comm.device)
        self._side_address = int(self._side.cuda_stream)
        self._on_side = CurrentStream(self._side)

    def run(
        self,
        name: str,
        call: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        begin: bool,
        limit: timedelta | None,
    ) -> Work:
        """Enqueue a call on the tensors ``given``; with ``begin`` the current stream does not wait for it.

        A wait for the work waits on the host where there is a ``limit``: see `StreamWork`.
        """
        if not begin:
            call()
            if limit is None:
                return Work(outputs)
            stream = torch.cuda.current_stream(self._gpu)
            return self._work(outputs, stream, self._marks.mark(stream.cuda_stream), name, limit)
        side, address = self._side, self._side_address
        return self._beside(call, given, lambda: self._work(outputs, side, self._marks.mark_here(address), name, limit))

    def future(
        self, call: Callable[[], None], output: torch.Tensor, inputs: Sequence[torch.Tensor], *, beside: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Enqueue a call, ``beside`` the current stream or on it, and return the complete future of its output."""
        if beside:
            # There is no work, because to make it and its mark would take the host half as long as the call.
            return self._beside(call, [output, *inputs], lambda: self._future(output))
        call()
        return self._future(output)

    def barrier(self, limit: timedelta) -> Work:
        """Enqueue a barrier on the current stream; a wait for its work waits on the host. Collective."""
        stream = torch.cuda.current_stream(self._gpu)
        self._comm.Barrier(stream=stream)
        return self._work((), stream, self._marks.mark(stream.cuda_stream), "barrier", limit)

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in symmetric memory for the current stream: see `SymmetricPool.allocate`.

        In a capture it is PyTorch's own memory, because that belongs to the graph as long as there is the graph.
        """
        if self.capture():
            return torch.empty(size, dtype=dtype, device=torch.device("cuda", self._gpu))
        return self._pool.allocate((size,), dtype, current_stream(self._gpu))

    def capture(self) -> bool:
        """Return whether the current stream captures a graph."""
        with torch.cuda.device(self._gpu):
            return bool(torch.cuda.is_current_stream_capturing())

    def _beside(self, call: Callable[[], None], given: Sequence[torch.Tensor], end: Callable[[], T]) -> T:
        """Enqueue a call beside the current stream, and return what ``end`` makes of the end of the group's stream."""
        marks, side, current = self._marks, self._side_address, current_stream(self._gpu)
        # This orders the call behind earlier work of the caller's stream. It pairs with the mark or event that `end`
        # makes, which orders later work of that stream behind the call.
        marks.wait_stream(side, current)
        try:
            with self._on_side:
                call()
                for tensor in given:
                    tensor.record_stream(self._side)  # or PyTorch gives the memory away when the caller drops it
                if self._pool.is_in_use and not torch.cuda.is_current_stream_capturing():
                    # Not a method of a work, which keeps the tensors.
                    self._pool.used(given, partial(marks.follow, mark=marks.mark_here(side)))
                return end()
        except BaseException:
            marks.wait_stream(current, side)  # no capture may end before all its streams have come back
            raise

    def _future(self, output: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[output.device])
        # PyTorch records an event on the current stream, and the streams of those who take the value wait for it.
        future.set_result(output)
        return future

    def _work(
        self, outputs: Sequence[torch.Tensor], stream: torch.cuda.Stream, mark: Any, name: str, limit: timedelta | None
    ) -> StreamWork:
        return StreamWork(outputs, stream, self._marks, mark, name, self._comm, limit)
