"""The header of a long message of a GPU array: MPI carries it in place of the data.

A header says where in the sender's outbox the data lies. The sender sends it with the user's tag on the user's
communicator, so that MPI matches it as it would match the data. A receiver recognizes a header by its length and by a
secret that only the ranks of the communicator know.

Only the length of the message differs between two headers of one slot. So the sender packs a header once for each slot,
and writes the length of each message into it. The receiver reads the rest once, and then finds the slot by its key.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from mpicomm.cluster.placement import SECRET_NBYTES
from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.errors import HandleError

KERNEL_NBYTES = 16 << 20
"""The longest message that kernels copy.

Copy engines, which copy longer messages, take longer to start, and carry more bytes per second.
"""
MOST_PIECES = 4
# A piece costs both hosts the enqueuing of its copy and of its count, and costs the link a pause. The copy into the
# outbox is several times as fast as the copy across the link. So only long pieces gain from the overlap of the two
# copies.
LEAST_PIECE_NBYTES = 32 << 20

_SLOT_ID_NBYTES = 8
SLOT_KEY_NBYTES = SECRET_NBYTES + _SLOT_ID_NBYTES
"""The begin of a header, which tells its slot from the slots of all ranks: the secret, and the slot's number."""
PREFIX = struct.Struct(f"<{SLOT_KEY_NBYTES}sQ")
"""The begin of a header: the key of its slot, and the bytes of the message."""
_PACKED = struct.Struct(f"{PREFIX.format}Q{PACKET_NBYTES}s{PACKET_NBYTES}sQQ")
HEADER_NBYTES = 11 * 32
"""The length of every header.

It is a multiple of 32, the size of the largest basic element, because MPICH ends the program if a message is no whole
number of basic elements of the receiver's type. Few other messages have this length, so probes rarely look into data
for a header.
"""
put_nbytes = struct.Struct("<Q").pack_into
"""Writes the bytes of a message into the packed header of its slot, after the key."""


def pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a message in a slot into pieces that are copied and counted one by one: the address and bytes of each piece.

    Sender and receiver cut in the same way. While the receiver copies one piece, the sender copies the next one.
    """
    longest = max(LEAST_PIECE_NBYTES, -(-nbytes // MOST_PIECES))
    for start in range(0, nbytes, longest):
        yield address + start, min(longest, nbytes - start)


def piece_count(nbytes: int) -> int:
    """Return the number of pieces, which sender and receiver of a message add to its words."""
    return 1 if nbytes <= KERNEL_NBYTES else sum(1 for _ in pieces(0, nbytes))


@dataclass(frozen=True)
class RendezvousHeader:
    """A message of ``nbytes`` in a slot of ``capacity`` bytes, ``offset`` bytes into a block of the sender's outbox.

    ``block`` is the packed handle of the block, and ``words`` that of the block that holds a line of `ready` words and
    a line of `done` words, ``line`` bytes into its two parts. The sender adds 1 to the `ready` words when the message
    is there. Copy engines add 1 for each piece. The receiver adds as much to the `done` words when it has copied the
    message.
    """

    nbytes: int
    words: bytes
    line: int
    block: bytes
    offset: int
    capacity: int
    slot_id: bytes = field(default_factory=lambda: os.urandom(_SLOT_ID_NBYTES))
    """Random bytes, which differ for all slots of all ranks."""

    def pack(self, secret: bytes) -> bytearray:
        """Return the header as a message of `HEADER_NBYTES` bytes."""
        key = secret + self.slot_id
        packed = _PACKED.pack(key, self.nbytes, self.line, self.words, self.block, self.offset, self.capacity)
        return bytearray(packed.ljust(HEADER_NBYTES, b"\0"))

    @classmethod
    def unpack(cls, message: bytes | bytearray, secret: bytes) -> RendezvousHeader | None:
        """Return the header in a message, or None for data. Raises `HandleError` for a damaged header."""
        if len(message) != HEADER_NBYTES or not hmac.compare_digest(message[:SECRET_NBYTES], secret):
            return None
        key, nbytes, line, words, block, offset, capacity = _PACKED.unpack_from(message)
        require_fits(nbytes, capacity)
        return cls(nbytes, words, line, block, offset, capacity, key[SECRET_NBYTES:])


def require_fits(nbytes: int, capacity: int) -> None:
    """Raise `HandleError` for a header of a message that is longer than the slot."""
    if nbytes > capacity:
        raise HandleError(f"the header of a message of {nbytes} bytes has a slot of {capacity} bytes")
