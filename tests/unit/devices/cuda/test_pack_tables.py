"""Tables of regions go to the device once, through a lock that the backend's own calls take, too."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, cast

from mpicomm.devices.base import GpuBackend, Scratch
from mpicomm.devices.cuda.pack_tables import PackTables
from mpicomm.kernels.packing import PackTable


class Recorder:
    """As much of a backend as tables need; it notices a thread that would wait for itself."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self.copies: list[tuple[int, int]] = []
        self.scratched: list[int] = []
        self.side_streams = self

    def loading(self) -> AbstractContextManager[Any]:
        assert not self._loading.locked(), "the thread would wait for itself"
        return self._loading

    def scratch(self, nbytes: int) -> Scratch:
        with self.loading():
            self.scratched.append(nbytes)
        return Scratch(1000 * len(self.scratched), nbytes, None)

    def take(self) -> int:
        return 5

    def give_back(self, stream: int) -> None:
        assert stream == 5

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies.append((target, nbytes))

    def synchronize(self, stream: int) -> None:
        assert stream == 5


def test_equal_tables_are_copied_once() -> None:
    backend = Recorder()
    tables = PackTables(cast(GpuBackend, backend))
    first, second = PackTable(b"a" * 80, 1, 3, 1), PackTable(b"b" * 160, 2, 4, 2)
    assert tables.pointer_of(first) == tables.pointer_of(PackTable(b"a" * 80, 1, 3, 1)) == 1000
    assert tables.pointer_of(second) == 2000
    assert backend.copies == [(1000, 80), (2000, 160)]
    assert tables.memory_use().device_nbytes == 240


def test_tables_in_new_memory_are_copied_again() -> None:
    backend = Recorder()
    tables = PackTables(cast(GpuBackend, backend))
    for content in (b"a" * 80, b"b" * 160):
        tables.pointer_of(PackTable(content, 1, 3, 1))
    backend.copies.clear()
    tables.restore(160)
    assert backend.copies == [(2000, 160)]
    assert backend.scratched == [80, 160]
