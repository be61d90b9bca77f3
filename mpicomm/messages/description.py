"""Description: the small message that MPI carries in place of a large one of a GPU array, and which says where that is.

It goes with the user's tag on the user's communicator, so MPI does all matching. What tells it from the user's data is
its length and a secret that only the ranks of the communicator know.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpicomm.cluster.placement import SECRET_NBYTES
from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.errors import HandleError

THRESHOLD_NBYTES = 32 << 10
"""Messages of device arrays of more than this are described; others are quicker through the host."""
MOST_EXTENTS = 8
# Of a message less than twice as long the copy into the outbox, which takes a sixth of the time on the link, is not
# worth overlapping: each piece costs the host 15 us on either side, and the link a pause of some.
LEAST_PIECE_NBYTES = 32 << 20
_MOST_PIECES = 4

_HEAD = struct.Struct(f"<{SECRET_NBYTES}sQQQQH{PACKET_NBYTES}s")
_EXTENT = struct.Struct(f"<{PACKET_NBYTES}sQQ")
# Rounded up: MPICH ends the program where a message is no whole number of basic elements of the receiver's type, of
# which the largest has 32 bytes. A length that few other messages have saves probes a look into those.
NBYTES = -(-(_HEAD.size + MOST_EXTENTS * _EXTENT.size) // 32) * 32


@dataclass(frozen=True)
class Extent:
    """``nbytes`` bytes of a message: they lie ``offset`` bytes into the block that ``packet`` is the handle of."""

    packet: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Description:
    """Message ``number`` of a sender, in ``extents`` of its outbox.

    ``line`` is the offset of the message's two words, `ready` and `done`, in the block of ``words``. `ready` counts
    pieces; it is ``first`` before the first piece has come. `done` gets what `ready` has in the end.
    """

    nbytes: int
    number: int
    words: bytes
    line: int
    first: int
    extents: tuple[Extent, ...]

    @property
    def last(self) -> int:
        """What `ready` is when all has come."""
        return self.first + sum(1 for _ in self.pieces())

    def pieces(self) -> Iterator[tuple[Extent, int, int]]:
        """Cut the message into what is copied and signalled at a time: extent, offset in it, bytes.

        Sender and receiver cut alike. In pieces the copies of the two overlap; none lies in two extents.
        """
        piece_nbytes = max(LEAST_PIECE_NBYTES, -(-self.nbytes // _MOST_PIECES))
        for extent in self.extents:
            for start in range(0, extent.nbytes, piece_nbytes):
                yield extent, start, min(piece_nbytes, extent.nbytes - start)

    def pack(self, secret: bytes) -> bytes:
        """Return the message, `NBYTES` bytes."""
        head = _HEAD.pack(secret, self.nbytes, self.number, self.line, self.first, len(self.extents), self.words)
        extents = b"".join(_EXTENT.pack(extent.packet, extent.offset, extent.nbytes) for extent in self.extents)
        return (head + extents).ljust(NBYTES, b"\0")

    @classmethod
    def unpack(cls, message: bytes, secret: bytes) -> Description | None:
        """Return what a message describes, None if it is data. Raises `HandleError` for one that makes no sense."""
        if len(message) != NBYTES or not hmac.compare_digest(message[:SECRET_NBYTES], secret):
            return None
        _, nbytes, number, line, first, count, words = _HEAD.unpack_from(message)
        if not 1 <= count <= MOST_EXTENTS:
            raise HandleError(f"the description of message {number} has {count} extents, not 1 to {MOST_EXTENTS}")
        extents = _extents(message, count)
        if sum(extent.nbytes for extent in extents) != nbytes:
            raise HandleError(f"the description of message {number} has other extents than {nbytes} bytes")
        return cls(nbytes, number, words, line, first, extents)


def _extents(message: bytes, count: int) -> tuple[Extent, ...]:
    places: Sequence[int] = range(_HEAD.size, _HEAD.size + count * _EXTENT.size, _EXTENT.size)
    return tuple(Extent(*_EXTENT.unpack_from(message, place)) for place in places)
