"""The tables of regions on a device, which the kernel of pack.cu reads."""

from __future__ import annotations

import threading

import numpy as np

from mpicomm.devices.base import GpuBackend
from mpicomm.devices.handle import MemoryUse
from mpicomm.kernels.packing import PackTable


class PackTables:
    """The tables on one device. Each table stays until the communicator is freed, because a captured graph may read it.

    Equal tables share memory, so a program that makes the same datatypes again and again needs no more memory.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._pointers: dict[bytes, int] = {}

    def pointer_of(self, table: PackTable) -> int:
        """Return the address of a table on the device. Local; blocking while it copies a new table there."""
        with self._lock:
            pointer = self._pointers.get(table.content)
            if pointer is None:
                pointer = self._pointers[table.content] = self._copied(table.content)
            return pointer

    def memory_use(self) -> MemoryUse:
        """Return the memory of all tables; local."""
        return MemoryUse("datatypes", device_nbytes=sum(map(len, self._pointers)))

    def restore(self, least_nbytes: int) -> None:
        """Write all tables of at least ``least_nbytes`` bytes again, because their memory is new. Local, blocking."""
        with self._lock:
            for content, pointer in self._pointers.items():
                if len(content) >= least_nbytes:
                    self._copy(content, pointer)

    def _copied(self, content: bytes) -> int:
        pointer = self._backend.scratch(len(content)).pointer
        self._copy(content, pointer)
        return pointer

    def _copy(self, content: bytes, pointer: int) -> None:
        backend = self._backend
        host = np.frombuffer(content, np.uint8)
        # A side stream, because the stream of the call may capture a graph.
        with backend.loading():
            stream = backend.side_streams.take()
            backend.copy(pointer, host.ctypes.data, len(content), stream)
            backend.synchronize(stream)
            backend.side_streams.give_back(stream)
