"""The header of a long message of a GPU array: MPI carries it in place of the data.

A header says where in the sender's outbox the data lies. The sender sends it with the user's tag on the user's
communicator, so that MPI matches it as it would match the data. A receiver recognizes a header by its length and by a
secret that only the ranks of the communicator know.

Only the bytes of the message differ between two headers of one slot. So the sender packs a header once for each slot,
and writes the bytes of each message into it. The receiver reads the rest once, and knows the slot by its name.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpicomm.cluster.placement import SECRET_NBYTES
from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.errors import HandleError

KERNEL_NBYTES = 16 << 20
"""The longest message that kernels copy, in one extent.

Copy engines take longer to start, and carry more bytes per second.
"""
MOST_EXTENTS = 8
MOST_PIECES = 4
# A piece costs both hosts the enqueuing of its copy and of its count, and costs the link a pause. The copy into the
# outbox is several times as fast as the copy across the link. So only long pieces gain from the overlap of the two
# copies.
LEAST_PIECE_NBYTES = 32 << 20

_NAME_NBYTES = 8
KNOWN_NBYTES = SECRET_NBYTES + _NAME_NBYTES
"""The bytes at the begin of a header that tell its slot from the slots of all ranks: the secret, and the name."""
START = struct.Struct(f"<{KNOWN_NBYTES}sQ")
"""The begin of a header: the known bytes, and the bytes of the message."""
_HEAD = struct.Struct(f"{START.format}QH{PACKET_NBYTES}s")
_EXTENT = struct.Struct(f"<{PACKET_NBYTES}sQQ")
HEADER_NBYTES = -(-(_HEAD.size + MOST_EXTENTS * _EXTENT.size) // 32) * 32
"""The length of every header.

It is a multiple of 32, the size of the largest basic element, because MPICH ends the program if a message is no whole
number of basic elements of the receiver's type. Few other messages have this length, so probes rarely look into data
for a header.
"""
put_nbytes = struct.Struct("<Q").pack_into
"""Writes the bytes of a message into the packed header of its slot, after the known bytes."""

Places = Sequence[tuple[int, int]]
"""The address and the bytes of each extent of a slot."""


def is_for_kernels(nbytes: int) -> bool:
    """Return whether kernels copy a message of ``nbytes`` bytes. Copy engines copy longer messages."""
    return nbytes <= KERNEL_NBYTES


def pieces(places: Places, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a message in a slot into pieces that are copied and counted one by one: the address and bytes of each piece.

    Sender and receiver cut alike. While the receiver copies one piece, the sender copies the next one. A piece lies in
    one extent.
    """
    longest = max(LEAST_PIECE_NBYTES, -(-nbytes // MOST_PIECES))
    for address, room in places:
        filled = min(room, nbytes)
        nbytes -= filled
        for start in range(0, filled, longest):
            yield address + start, min(longest, filled - start)


def counts_of(places: Places, nbytes: int) -> int:
    """Return the number that sender and receiver of a message in a slot add to the words."""
    return 1 if is_for_kernels(nbytes) else sum(1 for _ in pieces(places, nbytes))


@dataclass(frozen=True)
class Extent:
    """``nbytes`` bytes of a slot, ``offset`` bytes into the block of memory with the packed handle ``packet``."""

    packet: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RendezvousHeader:
    """A message of ``nbytes``, which lies in the slot of ``extents`` in the sender's outbox. The slot may be longer.

    The block with the packed handle ``words`` holds a line of `ready` words and a line of `done` words, ``line`` bytes
    into its two parts. The sender adds 1 to the `ready` words when the message is there. Copy engines add 1 for each
    piece. The receiver adds as much to the `done` words when it has copied the message.
    """

    nbytes: int
    words: bytes
    line: int
    extents: tuple[Extent, ...]
    name: bytes = field(default_factory=lambda: os.urandom(_NAME_NBYTES))
    """Tells the slot from all other slots of all ranks."""

    def pack(self, secret: bytes) -> bytearray:
        """Return the header as a message of `HEADER_NBYTES` bytes."""
        head = _HEAD.pack(secret + self.name, self.nbytes, self.line, len(self.extents), self.words)
        extents = b"".join(_EXTENT.pack(extent.packet, extent.offset, extent.nbytes) for extent in self.extents)
        return bytearray((head + extents).ljust(HEADER_NBYTES, b"\0"))

    @classmethod
    def unpack(cls, message: bytes | bytearray, secret: bytes) -> RendezvousHeader | None:
        """Return the header in a message, or None for data. Raises `HandleError` for a damaged header."""
        if len(message) != HEADER_NBYTES or not hmac.compare_digest(message[:SECRET_NBYTES], secret):
            return None
        known, nbytes, line, count, words = _HEAD.unpack_from(message)
        if not 1 <= count <= MOST_EXTENTS:
            raise HandleError(f"the header of a message has {count} extents, not 1 to {MOST_EXTENTS}")
        if is_for_kernels(nbytes) and count != 1:
            raise HandleError(f"the header of a message of {nbytes} bytes has {count} extents, not 1")
        places = range(_HEAD.size, _HEAD.size + count * _EXTENT.size, _EXTENT.size)
        extents = tuple(Extent(*_EXTENT.unpack_from(message, place)) for place in places)
        require_room(nbytes, sum(extent.nbytes for extent in extents))
        return cls(nbytes, words, line, extents, known[SECRET_NBYTES:])


def require_room(nbytes: int, room: int) -> None:
    """Raise `HandleError` for a header of a message that is longer than the slot."""
    if nbytes > room:
        raise HandleError(f"the header of a message of {nbytes} bytes has extents of {room} bytes")
