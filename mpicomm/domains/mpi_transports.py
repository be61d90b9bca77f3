"""Transports that give device memory to MPI: through pinned host memory, or directly to a CUDA-aware MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.cluster.roll_call import abandoned
from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import GpuBackend
from mpicomm.domains.mpi_transfers import Direct, Transfers, arrived
from mpicomm.domains.steps import NetworkMessage, NetworkStep
from mpicomm.domains.transport import Name
from mpicomm.errors import MpicommError

CHUNK_NBYTES = 2 << 20
"""The bytes of one message: while MPI carries a chunk, the copy engines copy the next chunk."""

Host = npt.NDArray[np.uint8]


class PinnedTransport:
    """The `Transport` that copies to pinned host memory, from which MPI sends chunk by chunk. It blocks the host."""

    name: Name = "pinned"
    capturable = False

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        self._transfers = transfers
        self._backend = backend
        self._out = backend.side_streams.take()
        self._into = backend.side_streams.take()
        self._chunks = _Chunks(deque(), deque())

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; the function that it returns blocks until the network messages have arrived."""
        side = self._backend.side_streams
        behind = side.mark(stream)
        side.follow(self._out, behind)  # this stream reads memory that earlier work writes
        side.follow(self._into, behind)  # this stream overwrites memory that earlier work may read
        comm, streams = self._transfers.comm, (self._out, self._into)
        wait = self._transfers.begin(
            lambda tag: _PinnedTransfer(comm, network_step, tag, self._backend, *streams, self._chunks), call
        )

        def finish() -> None:
            side.wait(behind)
            self._backend.check()
            wait()
            side.wait_stream(stream, self._into)  # later work reads the data that the copies bring

        return finish

    def tell(self, error: MpicommError) -> None:
        self._transfers.tell(error)

    def close(self) -> None:
        self._chunks.landing.clear()
        for stream in (self._out, self._into):
            self._backend.side_streams.give_back(stream)


@dataclass
class _Incoming:
    rank: int
    pointer: int
    host: Host
    request: MPI.Request


@dataclass
class _Outgoing:
    rank: int
    host: Host
    tag: int
    copied: Any
    """A mark of the stream after the copy to the host."""
    request: MPI.Request | None = None


@dataclass(frozen=True)
class _Chunks:
    """The chunks of all transfers of one transport that have to keep an order."""

    outgoing: deque[_Outgoing]
    """Chunks that MPI does not have yet. It gets them in this order, because the messages of a call have one tag."""
    landing: deque[tuple[Any, Host]]
    """Pinned memory that the device may still read, with marks after the copies: the pool must not reuse it before."""


class _PinnedTransfer:
    """A `MpiTransfer` through pinned memory."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        network_step: NetworkStep,
        tag: int,
        backend: GpuBackend,
        out: int,
        into: int,
        chunks: _Chunks,
    ) -> None:
        self._comm, self._backend, self._into, self._chunks = comm, backend, into, chunks
        self._sends: list[_Outgoing] = []
        for chunk in _chunks_of(network_step.sends):
            host = backend.pinned(chunk.nbytes)
            backend.copy(host.ctypes.data, chunk.pointer, chunk.nbytes, out)
            self._sends.append(_Outgoing(chunk.rank, host, tag, backend.side_streams.mark(out)))
        chunks.outgoing.extend(self._sends)
        self._receives: deque[_Incoming] = deque()
        try:
            for chunk in _chunks_of(network_step.receives):
                host = backend.pinned(chunk.nbytes)
                request = comm.Irecv([host, MPI.BYTE], chunk.rank, tag)
                self._receives.append(_Incoming(chunk.rank, chunk.pointer, host, request))
        except MPI.Exception:
            self.give_up()  # the messages before the message that MPI refuses
            raise

    def advance(self) -> bool:
        """Send the chunks that are in pinned memory, and copy the chunks that have arrived; see `MpiTransfer`."""
        side, (outgoing, landing) = self._backend.side_streams, (self._chunks.outgoing, self._chunks.landing)
        while landing and side.passed(landing[0][0]):
            landing.popleft()
        while outgoing and side.passed(outgoing[0].copied):
            chunk = outgoing.popleft()
            chunk.request = self._comm.Isend([chunk.host, MPI.BYTE], chunk.rank, chunk.tag)
        for _ in range(len(self._receives)):
            incoming = self._receives.popleft()
            if arrived(incoming.request, incoming.rank, incoming.host.nbytes):
                self._backend.copy(incoming.pointer, incoming.host.ctypes.data, incoming.host.nbytes, self._into)
                landing.append((side.mark(self._into), incoming.host))
            else:
                self._receives.append(incoming)
        self._sends = [chunk for chunk in self._sends if chunk.request is None or not chunk.request.Test()]
        return not (self._receives or self._sends)

    def receiving(self) -> set[int]:
        return {incoming.rank for incoming in self._receives}

    def sending(self) -> set[int]:
        return {chunk.rank for chunk in self._sends}

    def give_up(self) -> None:
        """Keep the requests, because MPI may still write to their memory; see `MpiTransfer`."""
        abandoned.extend(incoming.request for incoming in self._receives)
        abandoned.extend(chunk.request for chunk in self._sends if chunk.request is not None)
        self._chunks.outgoing.clear()


def _chunks_of(messages: tuple[NetworkMessage, ...]) -> Iterator[NetworkMessage]:
    for message in messages:
        for start in range(0, message.nbytes, CHUNK_NBYTES):
            yield NetworkMessage(message.rank, message.pointer + start, min(CHUNK_NBYTES, message.nbytes - start))


class CudaAwareTransport:
    """The `Transport` that gives device memory to an MPI that takes device pointers. It blocks the host."""

    name: Name = "mpi"
    capturable = False

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        self._transfers = transfers
        self._backend = backend

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it blocks until the work of the stream is done, because MPI knows no streams."""
        self._backend.synchronize(stream)
        self._backend.check()
        comm = self._transfers.comm
        return self._transfers.begin(lambda tag: Direct(comm, network_step, tag), call)

    def tell(self, error: MpicommError) -> None:
        self._transfers.tell(error)

    def close(self) -> None:
        """Do nothing, because the transport holds no resources."""
