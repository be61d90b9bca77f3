"""Memory handles, by which other ranks map memory of this rank, and their file descriptors. Sizes of memory by purpose.

The owner of an open file has a `Descriptor`, and closes it. A plain ``int`` is a borrowed descriptor.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from mpicomm.waiting import uninterrupted


class Descriptor(int):
    """A file descriptor that its holder owns, and closes as soon as possible. Local; do not copy it.

    If an error or a Ctrl-C comes between two steps, the last reference closes it. This does not replace `close`: an
    error keeps its frames, and so their references, as long as a caller keeps the error.
    """

    _closed = False

    @classmethod
    def of(cls, make: Callable[..., int], *arguments: object) -> Descriptor:
        """Call ``make``, such as ``os.open``, and own the descriptor that it returns."""
        with uninterrupted():
            return cls(make(*arguments))

    def close(self) -> None:
        """Close the file. A second call does nothing, because another file may have the number then."""
        with uninterrupted():
            if not self._closed:
                self._closed = True
                os.close(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules may be gone, and the process is about to close its files
            self.close()


def limit_hint(code: int | None) -> str:
    """Return the limit on descriptors that an error with this errno has hit, and how to raise it; "" for other errors.

    Root may have any number of descriptors in flight between processes. Another user may have as many as a process may
    open.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if code == errno.EMFILE:
        return f"; this process may have {limit} files open: raise the limit (ulimit -n)"
    if code == errno.ETOOMANYREFS:
        return f"; this user may have {limit} descriptors in flight between processes: raise the limit (ulimit -n)"
    return ""


Kind = Literal["memfd", "ipc", "fd", "fabric", "staged", "pool"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FD_KINDS: frozenset[Kind] = frozenset({"memfd", "fd", "staged", "pool"})  # a file descriptor travels beside the handle
VIRTUAL_KINDS: frozenset[Kind] = frozenset({"fd", "fabric"})  # GPU memory that can be freed and keep its addresses
SEALED_KINDS: frozenset[Kind] = frozenset({"memfd", "staged"})  # the descriptor belongs to host memory, which has seals

KEY_NBYTES = 64
"""The size of ``CUipcMemHandle``, ``CUmemFabricHandle`` and ``CUmemPoolPtrExportData``."""

_PACKET = struct.Struct(f"<B16s{KEY_NBYTES}sQQQ")
PACKET_NBYTES = _PACKET.size


@dataclass(frozen=True)
class MemoryHandle:
    """What a process needs to map ``nbytes`` bytes of another process.

    The bytes lie ``offset`` bytes into an allocation of ``size`` bytes. ``device`` is the UUID of the GPU that owns the
    memory, zeros for host memory. ``key`` is the CUDA IPC or fabric handle of the *allocation*, its export data in a
    pool, or the file of host memory that the peers have mapped already; else it is empty.
    """

    kind: Kind
    device: bytes
    key: bytes
    size: int
    offset: int
    nbytes: int

    @property
    def has_descriptor(self) -> bool:
        """Whether a file descriptor travels beside the handle."""
        return self.kind in FD_KINDS and not (self.kind == "memfd" and self.key)

    def pack(self) -> bytes:
        """Return the handle as `PACKET_NBYTES` bytes, for messages and memory with a fixed layout."""
        return _PACKET.pack(KINDS.index(self.kind), self.device, self.key, self.size, self.offset, self.nbytes)

    @classmethod
    def unpack(cls, packet: bytes) -> MemoryHandle:
        """Return the handle that `pack` has written."""
        kind, device, key, *numbers = _PACKET.unpack(packet)
        return cls(KINDS[kind], device, key if any(key) else b"", *numbers)


Exported = tuple[tuple[MemoryHandle, "Descriptor | None"], ...]
"""The handles of the parts of a segment, in order, each with its descriptor if it has one.

A segment has more than one part if its allocator has mapped several allocations one after the other.
"""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this rank for one purpose, in bytes."""

    purpose: str
    device_nbytes: int = 0
    """On this rank's GPU."""
    host_nbytes: int = 0

    @classmethod
    def of_kind(cls, purpose: str, kind: Kind, nbytes: int) -> MemoryUse:
        """Return the use of memory that peers map by handles of a kind, which is on the host or on the GPU."""
        return cls(purpose, host_nbytes=nbytes) if kind in SEALED_KINDS else cls(purpose, device_nbytes=nbytes)


def sum_by_purpose(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """Return the sum for each purpose that uses memory."""
    sums: dict[str, MemoryUse] = {}
    for use in uses:
        before = sums.get(use.purpose, MemoryUse(use.purpose))
        sums[use.purpose] = MemoryUse(
            use.purpose, before.device_nbytes + use.device_nbytes, before.host_nbytes + use.host_nbytes
        )
    return tuple(use for use in sums.values() if use.device_nbytes or use.host_nbytes)
