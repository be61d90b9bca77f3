"""Segments of host memory, and second mappings of them as peers make them."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

from mpicomm.devices.base import Segment
from mpicomm.devices.handle import MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import HostSegment

PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def allocated(backend: HostBackend, nbytes: int) -> Iterator[HostSegment]:
    segment = backend.allocate("memfd", nbytes)
    try:
        yield segment
    finally:
        segment.close()


@contextlib.contextmanager
def opened(backend: HostBackend, segment: Segment) -> Iterator[HostSegment]:
    """Map a segment a second time, as a peer does."""
    ((handle, fd),) = backend.export(segment)
    assert fd is not None
    try:
        peer = backend.open(((MemoryHandle.unpack(handle.pack()), fd),))
    finally:
        fd.close()
    try:
        yield peer
    finally:
        peer.close()
