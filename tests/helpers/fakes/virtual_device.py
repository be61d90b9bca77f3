"""A double of a GPU whose memory is virtual memory: it can go and come back at its addresses."""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.handle import Exported, Kind, MemoryUse
from mpicomm.devices.host import array_at
from tests.helpers.fakes.virtual_memory import VirtualCuda
from tests.helpers.fakes.window_devices import WindowDevice

_WORD = np.dtype(np.uint64)
_UUID = bytes(15) + b"\1"


class VirtualDevice(WindowDevice):
    """A `WindowDevice` with memory of ``cuda``. Create it inside of ``imported_over(cuda)``."""

    kinds: tuple[Kind, ...] = ("fd",)

    def __init__(self, cuda: VirtualCuda, rank: int, timeout_s: float) -> None:
        super().__init__(rank, timeout_s)
        self.cuda = cuda
        self._virtual: Any = importlib.import_module("mpicomm.devices.cuda.virtual_memory").VirtualSegment
        context: Any = importlib.import_module("mpicomm.devices.cuda.context").PrimaryContext
        self._context = context(SimpleNamespace(ordinal=0, uuid=_UUID))

    def owns(self, pointer: int) -> bool:
        mapped = any(at <= pointer < at + size for at, (size, _) in self.cuda.mapped.items())
        return mapped or super().owns(pointer)

    def allocate(self, kind: Kind, nbytes: int) -> Any:
        return super().allocate(kind, nbytes) if kind == "ipc" else self._virtual.allocate(self._context, kind, nbytes)

    def export(self, segment: Any) -> Exported:
        exported: Exported = segment.export() if isinstance(segment, self._virtual) else super().export(segment)
        return exported

    def open(self, parts: Exported) -> Any:
        return self._virtual.open(self._context, parts) if parts[0][0].kind == "fd" else super().open(parts)

    def view(self, segment: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        count = int(np.prod(shape, dtype=object))
        return array_at(segment.pointer, count, dtype).reshape(shape)

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        def step() -> None:
            count = array_at(sent, 1, _WORD)
            count += np.uint64(1)
            array_at(inbox, 1, _WORD)[:] = count

        self.enqueue(stream, step)

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        def step() -> None:
            count = array_at(expected, 1, _WORD)
            count += np.uint64(1)
            until = time.monotonic() + self.timeout_s
            while array_at(inbox, 1, _WORD)[0] < count[0]:
                assert time.monotonic() < until, "no signal"
                time.sleep(1e-4)

        self.enqueue(stream, step)

    def suspend(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def memory_use(self) -> tuple[MemoryUse, ...]:
        return ()
