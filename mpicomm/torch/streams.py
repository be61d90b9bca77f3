"""Streams: the calls of one group on tensors of its GPU, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from mpicomm.api.communicator import Communicator
from mpicomm.torch.failures import expected
from mpicomm.torch.symmetric_pool import SymmetricPool
from mpicomm.torch.works import StreamWork, Work


class Streams:
    """Enqueues blocking calls on PyTorch's current stream, and asynchronous ones on a stream of the group.

    A group has one such stream, because its calls follow each other on every stream. All methods are local, and none
    waits on the host.
    """

    def __init__(self, comm: Communicator, pool: SymmetricPool) -> None:
        self._comm = comm
        self._pool = pool
        # Not at the first call, because that one may be in a capture.
        self._side = torch.cuda.Stream(comm.device)

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
            return Work(outputs) if limit is None else self._work(outputs, name, limit)
        current = self.current()
        # The event of the work orders later work of the caller's stream; this orders the call after earlier work.
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                call()
                for tensor in given:
                    tensor.record_stream(self._side)  # or PyTorch gives the memory away when the caller drops it
                work = self._work(outputs, name, limit)
                if not torch.cuda.is_current_stream_capturing():
                    self._pool.used(given, work.event)
        except BaseException:
            current.wait_stream(self._side)  # no capture may end before all its streams have come back
            raise
        return work

    def barrier(self, limit: timedelta) -> Work:
        """Enqueue a barrier on the current stream; a wait for its work waits on the host. Collective."""
        stream = self.current()
        expected("barrier", lambda: self._comm.Barrier(stream=stream))()
        return self._work((), "barrier", limit)

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in symmetric memory for the current stream: see `SymmetricPool.allocate`.

        In a capture it is PyTorch's own memory, because that belongs to the graph as long as there is the graph.
        """
        if self.capture():
            return torch.empty(size, dtype=dtype, device=torch.device("cuda", self._side.device_index))
        return self._pool.allocate((size,), dtype, self.current())

    def current(self) -> torch.cuda.Stream:
        """Return PyTorch's current stream of the GPU."""
        return torch.cuda.current_stream(self._side.device)

    def capture(self) -> bool:
        """Return whether the current stream captures a graph."""
        with torch.cuda.device(self._side.device):
            return bool(torch.cuda.is_current_stream_capturing())

    def _work(self, outputs: Sequence[torch.Tensor], name: str, limit: timedelta | None) -> StreamWork:
        check = expected(name, self._comm._check_at_once)
        return StreamWork(outputs, self.current(), name, check, self._comm._prepare_thread, limit)
