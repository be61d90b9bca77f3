"""Transports that give device memory to MPI: through pinned host memory, or directly to a CUDA-aware MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.checks import Signature
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.domains.mpi_transfers import Direct, MessageInFlight, Transfers
from mpicomm.domains.steps import NetworkMessage, NetworkStep, Transport, TransportName
from mpicomm.errors import MpicommError

CHUNK_NBYTES = 2 << 20
"""The bytes of one message: while MPI carries a chunk, the copy engines copy the next chunk."""


class CudaAwareTransport(Transport):
    """The `Transport` that gives device memory to an MPI that takes device pointers. It blocks the host."""

    name: TransportName = "mpi"
    capturable = False

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        self.transfers, self.backend = transfers, backend

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it blocks until the work of the stream is done, because MPI knows no streams."""
        self.backend.synchronize(stream)
        self.backend.check()
        comm = self.transfers.comm
        return self.transfers.begin(lambda tag: Direct(comm, network_step, tag), call)

    def tell(self, error: MpicommError) -> None:
        self.transfers.tell(error)


class PinnedTransport(CudaAwareTransport):
    """The `Transport` that copies to pinned host memory, from which MPI sends chunk by chunk. It blocks the host."""

    name: TransportName = "pinned"

    def __init__(self, transfers: Transfers, backend: GpuBackend) -> None:
        super().__init__(transfers, backend)
        self.out, self.into = backend.side_streams.take(), backend.side_streams.take()
        self.outgoing: deque[tuple[MessageInFlight, int]] = deque()
        """Chunks that MPI does not have yet, and their tags. MPI gets them in this order, because the messages of a
        call have one tag."""
        self.landing: deque[tuple[Any, Any]] = deque()
        """Marks after copies, and the pinned memory that the device may read before: the pool must not reuse it."""

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; the function that it returns blocks until the network messages have arrived."""
        side = self.backend.side_streams
        behind = side.mark(stream)
        side.follow(self.out, behind)  # this stream reads memory that earlier work writes
        side.follow(self.into, behind)  # this stream overwrites memory that earlier work may read
        wait = self.transfers.begin(lambda tag: _Pinned(self, network_step, tag), call)

        def finish() -> None:
            side.wait(behind)
            self.backend.check()
            wait()
            side.wait_stream(stream, self.into)  # later work reads the data that the copies bring

        return finish

    def close(self) -> None:
        self.landing.clear()
        for stream in (self.out, self.into):
            self.backend.side_streams.give_back(stream)


class _Pinned(Direct):
    """`Direct` messages of pinned memory, in chunks. Copies bring them from the device, and to the device."""

    def __init__(self, transport: PinnedTransport, network_step: NetworkStep, tag: int) -> None:
        super().__init__(transport.transfers.comm, NetworkStep(), tag)
        self._transport, self._backend = transport, transport.backend
        for chunk in _chunks_of(network_step.sends):
            host = self._backend.pinned(chunk.nbytes)
            self._backend.copy(host.ctypes.data, chunk.pointer, chunk.nbytes, transport.out)
            copied = self._backend.side_streams.mark(transport.out)
            self._sends.append(MessageInFlight(chunk, host=host, copied=copied))
        transport.outgoing.extend((message, tag) for message in self._sends)
        try:
            for chunk in _chunks_of(network_step.receives):
                host = self._backend.pinned(chunk.nbytes)
                request = self._comm.Irecv([host, MPI.BYTE], chunk.rank, tag)
                self._receives.append(MessageInFlight(chunk, request, host))
        except MPI.Exception:
            self.give_up()  # the messages before the message that MPI refuses
            raise

    def advance(self) -> bool:
        """Send the chunks that are in pinned memory, and copy the chunks that have arrived; see `Direct`."""
        passed = self._backend.side_streams.passed
        outgoing, landing = self._transport.outgoing, self._transport.landing
        while landing and passed(landing[0][0]):
            landing.popleft()
        while outgoing and passed(outgoing[0][0].copied):
            message, tag = outgoing.popleft()
            message.request = self._comm.Isend([message.host, MPI.BYTE], message.of.rank, tag)
        return super().advance()

    def _arrived(self, message: MessageInFlight) -> bool:
        if not super()._arrived(message):
            return False
        into = self._transport.into
        self._backend.copy(message.of.pointer, message.host.ctypes.data, message.of.nbytes, into)
        self._transport.landing.append((self._backend.side_streams.mark(into), message.host))
        return True

    def give_up(self) -> None:
        super().give_up()
        self._transport.outgoing.clear()


def _chunks_of(messages: tuple[NetworkMessage, ...]) -> Iterator[NetworkMessage]:
    for message in messages:
        for start in range(0, message.nbytes, CHUNK_NBYTES):
            yield NetworkMessage(message.rank, message.pointer + start, min(CHUNK_NBYTES, message.nbytes - start))
