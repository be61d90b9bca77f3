"""MemoryHandle: the packet with which one rank tells another rank how to open its memory.

Packets come from peers, so `MemoryHandle.unpack` trusts no packet. It checks length, magic, version, kind, digest and
ranges, and every failure is a `HandleError`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Literal, get_args

from mpicomm.devices.descriptor import Descriptor
from mpicomm.errors import HandleError

Kind = Literal["memfd", "ipc", "fd", "fabric", "staged", "pool"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FD_KINDS: frozenset[Kind] = frozenset({"memfd", "fd", "staged", "pool"})  # a file descriptor travels beside the packet
VIRTUAL_KINDS: frozenset[Kind] = frozenset({"fd", "fabric"})  # memory of a GPU that can go and come back at its address
SEALED_KINDS: frozenset[Kind] = frozenset({"memfd", "staged"})  # the descriptor belongs to host memory, which has seals

KEYED_KINDS: frozenset[Kind] = frozenset({"ipc", "fabric", "pool"})  # the packet has a key

KEY_NBYTES = 64
"""The size of ``CUipcMemHandle``, ``CUmemFabricHandle`` and ``CUmemPoolPtrExportData``."""

_MAGIC = b"mpicommH"
_VERSION = 1
_BODY = struct.Struct(f"<8sBB2x16s{KEY_NBYTES}sQQQ")
_DIGEST_NBYTES = 16
PACKET_NBYTES = _BODY.size + _DIGEST_NBYTES


@dataclass(frozen=True)
class MemoryHandle:
    """The facts that a process needs to open ``nbytes`` bytes of another process.

    The bytes lie ``offset`` bytes into an allocation of ``size`` bytes. ``device`` is the UUID of the GPU that owns the
    memory, zeros for host memory. ``key`` is the CUDA IPC or fabric handle of the *allocation*, or its name in a pool;
    it is empty for kinds that are not in `KEYED_KINDS`. For the kinds in `FD_KINDS` a file descriptor travels beside
    the packet.
    """

    kind: Kind
    device: bytes
    key: bytes
    size: int
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        """Return the packet, `PACKET_NBYTES` bytes."""
        body = _BODY.pack(
            _MAGIC,
            _VERSION,
            KINDS.index(self.kind),
            self.device,
            self.key.ljust(KEY_NBYTES, b"\0"),
            self.size,
            self.offset,
            self.nbytes,
        )
        return body + _digest(body)

    @classmethod
    def unpack(cls, packet: bytes) -> MemoryHandle:
        """Read a packet. Raises `HandleError` for anything that `pack` cannot have written."""
        if len(packet) != PACKET_NBYTES:
            raise HandleError(
                f"handle packet has {len(packet)} bytes instead of {PACKET_NBYTES}: damaged on the way, or another "
                "mpicomm wrote it: run one mpicomm on all ranks"
            )
        body, digest = packet[: _BODY.size], packet[_BODY.size :]
        magic, version, kind, device, key, size, offset, nbytes = _BODY.unpack(body)
        if magic != _MAGIC:
            raise HandleError(f"handle packet begins with {magic!r} instead of {_MAGIC!r}: mpicomm has not made it")
        if version != _VERSION:
            raise HandleError(
                f"handle packet has version {version}, this mpicomm reads {_VERSION}: run one mpicomm on all ranks"
            )
        if digest != _digest(body):
            raise HandleError("handle packet does not match its digest: it was altered on the way")
        if kind >= len(KINDS):
            raise HandleError(f"handle packet has the unknown kind {kind}")
        if offset + nbytes > size:
            raise HandleError(f"handle packet names bytes {offset}..{offset + nbytes} of an allocation of {size}")
        name = KINDS[kind]
        return cls(name, device, key if name in KEYED_KINDS else b"", size, offset, nbytes)


Exported = tuple[tuple[MemoryHandle, "Descriptor | None"], ...]
"""The handles of the parts of a segment, in order, each with its descriptor if it is of `FD_KINDS`.

A segment has more than one part if its allocator has mapped several allocations one after the other.
"""


def _digest(body: bytes) -> bytes:
    # The digest finds damage, not malice: mpicomm trusts a peer that can send a packet, in the memory that it offers.
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES, person=b"mpicomm-handle").digest()
