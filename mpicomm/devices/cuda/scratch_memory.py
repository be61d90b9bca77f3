"""ScratchMemory: private memory of a device, straight from the driver."""

from __future__ import annotations

from cuda.bindings import driver

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.memory import BLOCK_NBYTES
from mpicomm.devices.cuda.virtual_memory import VirtualSegment
from mpicomm.devices.handle import VIRTUAL_KINDS, Kind
from mpicomm.interrupts import uninterrupted

LEAST_SUSPENDED_NBYTES = BLOCK_NBYTES
"""Smaller memory stays in a suspension, because virtual memory has whole blocks."""


class ScratchMemory:
    """All scratch memory of one backend. It stays until `close`, because a captured graph may use it.

    A pool could give memory to other users meanwhile. All methods are local. The device's context must be current.
    """

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._small: list[int] = []
        self._large: list[VirtualSegment] = []

    def allocate(self, nbytes: int, kind: Kind | None) -> int:
        """Return the address of new memory. ``kind`` is the handle kind of the communicator.

        Memory of `LEAST_SUSPENDED_NBYTES` or more can be suspended if the communicator's memory can.
        """
        with uninterrupted():
            if kind is not None and kind in VIRTUAL_KINDS and nbytes >= LEAST_SUSPENDED_NBYTES:
                self._large.append(VirtualSegment.allocate(self._context, kind, nbytes))
                return self._large[-1].pointer
            self._small.append(int(call(driver.cuMemAlloc, max(nbytes, 1))))
            return self._small[-1]

    def suspend(self) -> None:
        """Give large memory back, and keep its addresses."""
        for segment in self._large:
            segment.suspend()

    def resume(self) -> None:
        """Take large memory again, with undefined contents."""
        for segment in self._large:
            segment.resume()

    def close(self) -> None:
        """Free all memory. A second call does nothing."""
        while self._large:
            self._large.pop().close()
        while self._small:
            call(driver.cuMemFree, self._small.pop())
