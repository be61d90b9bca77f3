"""Launches that pack and unpack derived datatypes, and the tables of regions that they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.devices.base import GpuBackend
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, PackArguments, blocks_for
from mpicomm.mpi.packing import PackJob, table_of


class PackTables:
    """The tables on one device. Each stays until the communicator is freed, because a captured graph may read it.

    Equal tables are one, so that a program which makes the same datatypes again and again needs no more memory.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._pointers: dict[bytes, int] = {}

    def launches(self, jobs: Sequence[PackJob], packed: int, *, unpacks: bool) -> list[Launch]:
        """Return the launch for all of ``jobs``, whose packed memory begins at ``packed``; none for no bytes.

        Local. It blocks while it copies a table to the device for the first time.
        """
        table = table_of(jobs)
        if table.units == 0:
            return []
        arguments = PackArguments(
            regions=self._pointer_of(table.content),
            packed=packed,
            units=table.units,
            num_regions=table.num_regions,
            unpacks=unpacks,
        )
        blocks = blocks_for(table.units, self._backend.multiprocessors)
        return [Launch(PACK_KERNEL, arguments, blocks=blocks, threads=PACK_THREADS)]

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of all tables; local."""
        yield MemoryUse("datatypes", device_nbytes=sum(map(len, self._pointers)))

    def _pointer_of(self, content: bytes) -> int:
        if content not in self._pointers:
            backend = self._backend
            pointer = backend.scratch(len(content)).pointer
            host = np.frombuffer(content, np.uint8)
            # A side stream, because the stream of the call may capture a graph.
            with backend.loading():
                stream = backend.side_streams.take()
                backend.copy(pointer, host.ctypes.data, len(content), stream)
                backend.synchronize(stream)
                backend.side_streams.give_back(stream)
            self._pointers[content] = pointer
        return self._pointers[content]
