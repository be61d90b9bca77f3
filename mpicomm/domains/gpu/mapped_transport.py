"""MappedTransport: copy engines move network messages between peer domains of one node, in stream order."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import GpuBackend
from mpicomm.devices.cuda.beside_stream import BesideStream
from mpicomm.domains.mapped import MappedChannels
from mpicomm.domains.steps import NetworkStep, TransportName
from mpicomm.errors import MpicommError


class MappedTransport:
    """The `Transport` for ranks of one node, which map each other's memory. Construction is local."""

    name: TransportName = "mapped"
    capturable = True

    def __init__(self, channels: MappedChannels, backend: GpuBackend) -> None:
        self._channels = channels
        self._backend = backend
        with backend.current():
            # Two streams, because a rank must receive while it waits for a slot.
            self._out, self._into = BesideStream(), BesideStream()

    def start(self, network_step: NetworkStep, stream: int, call: Signature) -> Callable[[], object]:
        """See `Transport`; it does not block."""
        side = self._backend.side_streams
        with self._backend.current():
            out, into = self._out.of(stream), self._into.of(stream)
            behind = side.mark(stream)
            side.follow(out, behind)
            side.follow(into, behind)
            self._channels.exchange(network_step, out, into)
        marks = side.mark(out), side.mark(into)

        def finish() -> None:
            for mark in marks:
                side.follow(stream, mark)

        return finish

    def tell(self, error: MpicommError) -> None:
        """Do nothing, because waits for signals have a deadline."""

    def close(self) -> None:
        with self._backend.current():
            self._out.close()
            self._into.close()
