"""MemoryHandle: how another rank opens memory of this rank."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, get_args

from mpicomm.devices.descriptor import Descriptor

Kind = Literal["memfd", "ipc", "fd", "fabric", "staged", "pool"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FD_KINDS: frozenset[Kind] = frozenset({"memfd", "fd", "staged", "pool"})  # a file descriptor travels beside the handle
VIRTUAL_KINDS: frozenset[Kind] = frozenset({"fd", "fabric"})  # memory of a GPU that can go and come back at its address
SEALED_KINDS: frozenset[Kind] = frozenset({"memfd", "staged"})  # the descriptor belongs to host memory, which has seals

KEY_NBYTES = 64
"""The size of ``CUipcMemHandle``, ``CUmemFabricHandle`` and ``CUmemPoolPtrExportData``."""

_PACKET = struct.Struct(f"<B16s{KEY_NBYTES}sQQQ")
PACKET_NBYTES = _PACKET.size


@dataclass(frozen=True)
class MemoryHandle:
    """The facts that a process needs to open ``nbytes`` bytes of another process.

    The bytes lie ``offset`` bytes into an allocation of ``size`` bytes. ``device`` is the UUID of the GPU that owns the
    memory, zeros for host memory. ``key`` is the CUDA IPC or fabric handle of the *allocation*, its name in a pool, or
    the file of host memory that the peers have mapped already; else it is empty.
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
        """Return the handle as `PACKET_NBYTES` bytes, for messages and memory of a fixed layout."""
        return _PACKET.pack(KINDS.index(self.kind), self.device, self.key, self.size, self.offset, self.nbytes)

    @classmethod
    def unpack(cls, packet: bytes) -> MemoryHandle:
        """Return the handle that `pack` has written. An empty key is `KEY_NBYTES` zeros afterwards."""
        kind, *fields = _PACKET.unpack(packet)
        return cls(KINDS[kind], *fields)


Exported = tuple[tuple[MemoryHandle, "Descriptor | None"], ...]
"""The handles of the parts of a segment, in order, each with its descriptor if it has one.

A segment has more than one part if its allocator has mapped several allocations one after the other.
"""
