"""The header of a long message of a GPU array: MPI carries it in place of the data.

A header says where in the sender's outbox the data lies. The sender sends it with the user's tag on the user's
communicator, so that MPI matches it as it would match the data. A receiver recognizes a header by its length and by a
secret that only the ranks of the communicator know.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpicomm.cluster.placement import SECRET_NBYTES
from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.errors import HandleError
from mpicomm.kernels.message import blocks_of_message

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

_HEAD = struct.Struct(f"<{SECRET_NBYTES}sQQH{PACKET_NBYTES}s")
_EXTENT = struct.Struct(f"<{PACKET_NBYTES}sQQ")
HEADER_NBYTES = -(-(_HEAD.size + MOST_EXTENTS * _EXTENT.size) // 32) * 32
"""The length of every header.

It is a multiple of 32, the size of the largest basic element, because MPICH ends the program if a message is no whole
number of basic elements of the receiver's type. Few other messages have this length, so probes rarely look into data
for a header.
"""

_ONE = struct.Struct(f"{_HEAD.format}{_EXTENT.format[1:]}{HEADER_NBYTES - _HEAD.size - _EXTENT.size}x")
"""A header with one extent. Nearly all headers are so, and one call packs or unpacks them."""


def pack_one(secret: bytes, nbytes: int, line: int, words: bytes, packet: bytes, offset: int) -> bytes:
    """Return the packed header of a message in one extent; see `RendezvousHeader.pack`."""
    return _ONE.pack(secret, nbytes, line, 1, words, packet, offset, nbytes)


def is_for_kernels(nbytes: int) -> bool:
    """Return whether kernels copy a message of ``nbytes`` bytes. Copy engines copy longer messages."""
    return nbytes <= KERNEL_NBYTES


def is_cut(nbytes: int) -> bool:
    """Return whether a message of ``nbytes`` bytes goes in several pieces.

    Such a message takes long enough to be worth a side stream, on which it does not hold up the user's stream.
    """
    return nbytes > LEAST_PIECE_NBYTES


# The two classes are not frozen, because each message makes some, and frozen objects take twice as long to make.
@dataclass(slots=True)
class Extent:
    """``nbytes`` bytes of a message, ``offset`` bytes into the block of memory with the packed handle ``packet``."""

    packet: bytes
    offset: int
    nbytes: int


@dataclass(slots=True)
class RendezvousHeader:
    """A message, which lies in ``extents`` of the sender's outbox.

    The block with the packed handle ``words`` holds a line of `ready` words and a line of `done` words, ``line`` bytes
    into its two parts. The sender adds 1 to the `ready` words when the message is there. Copy engines add 1 for each
    piece. The receiver adds as much to the `done` words when it has copied the message.
    """

    nbytes: int
    words: bytes
    line: int
    extents: tuple[Extent, ...]

    @property
    def counts(self) -> int:
        """The number that sender and receiver add to the words."""
        return 1 if is_for_kernels(self.nbytes) else sum(1 for _ in self.pieces())

    @property
    def blocks(self) -> int:
        """The blocks of the kernel that copies the message into the outbox."""
        return blocks_of_message(self.nbytes) if is_for_kernels(self.nbytes) else 1

    def pieces(self) -> Iterator[tuple[Extent, int, int]]:
        """Cut the message into pieces that are copied and counted one by one: extent, offset in the extent, bytes.

        Sender and receiver cut alike. While the receiver copies one piece, the sender copies the next one. A piece lies
        in one extent.
        """
        piece_nbytes = max(LEAST_PIECE_NBYTES, -(-self.nbytes // MOST_PIECES))
        for extent in self.extents:
            for start in range(0, extent.nbytes, piece_nbytes):
                yield extent, start, min(piece_nbytes, extent.nbytes - start)

    def pack(self, secret: bytes) -> bytes:
        """Return the header as a message of `HEADER_NBYTES` bytes."""
        head = _HEAD.pack(secret, self.nbytes, self.line, len(self.extents), self.words)
        extents = b"".join(_EXTENT.pack(extent.packet, extent.offset, extent.nbytes) for extent in self.extents)
        return (head + extents).ljust(HEADER_NBYTES, b"\0")

    @classmethod
    def unpack(cls, message: bytes, secret: bytes) -> RendezvousHeader | None:
        """Return the header in a message, or None for data. Raises `HandleError` for a damaged header."""
        if len(message) != HEADER_NBYTES or not hmac.compare_digest(message[:SECRET_NBYTES], secret):
            return None
        _, nbytes, line, count, words, packet, offset, whole = _ONE.unpack(message)
        if count == 1 and whole == nbytes:
            return cls(nbytes, words, line, (Extent(packet, offset, nbytes),))
        if not 1 <= count <= MOST_EXTENTS:
            raise HandleError(f"the header of a message has {count} extents, not 1 to {MOST_EXTENTS}")
        if is_for_kernels(nbytes) and count != 1:
            raise HandleError(f"the header of a message of {nbytes} bytes has {count} extents, not 1")
        extents = _extents(message, count)
        total = sum(extent.nbytes for extent in extents)
        if total != nbytes:
            raise HandleError(f"the header of a message of {nbytes} bytes has extents of {total} bytes")
        return cls(nbytes, words, line, extents)


def _extents(message: bytes, count: int) -> tuple[Extent, ...]:
    places: Sequence[int] = range(_HEAD.size, _HEAD.size + count * _EXTENT.size, _EXTENT.size)
    return tuple(Extent(*_EXTENT.unpack_from(message, place)) for place in places)
