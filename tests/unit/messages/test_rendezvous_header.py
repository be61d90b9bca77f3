from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, KERNEL_NBYTES, MOST_EXTENTS, Extent, RendezvousHeader

SECRET = os.urandom(32)
PACKET = os.urandom(132)
LONG = 2 * KERNEL_NBYTES
DESCRIBED = RendezvousHeader(LONG + 20, PACKET, 32, (Extent(PACKET, 2**33, LONG), Extent(PACKET[::-1], 0, 20)))


def test_a_description_comes_back() -> None:
    message = DESCRIBED.pack(SECRET)
    assert len(message) == HEADER_NBYTES
    assert RendezvousHeader.unpack(message, SECRET) == DESCRIBED


def test_data_is_none() -> None:
    message = DESCRIBED.pack(SECRET)
    for data in (
        b"",
        message[:-1],
        message + b"\0",
        os.urandom(HEADER_NBYTES),
        bytes([message[0] ^ 1]) + message[1:],
    ):
        assert RendezvousHeader.unpack(data, SECRET) is None
    assert RendezvousHeader.unpack(message, os.urandom(32)) is None


def test_nonsense_is_refused() -> None:
    for nonsense in (replace(DESCRIBED, nbytes=71), replace(DESCRIBED, extents=())):
        with pytest.raises(HandleError, match="header of a message"):
            RendezvousHeader.unpack(nonsense.pack(SECRET), SECRET)


@pytest.mark.parametrize("nbytes", [1, 1 << 15, (8 << 20) + 1, 100 << 20, 10 << 30])
def test_pieces_are_few_and_make_up_the_message(nbytes: int) -> None:
    parts = [nbytes // 3, nbytes - nbytes // 3] if nbytes > KERNEL_NBYTES else [nbytes]
    header = RendezvousHeader(nbytes, PACKET, 0, tuple(Extent(PACKET, 0, part) for part in parts))
    pieces = list(header.pieces())
    assert len(pieces) <= rendezvous_header.MOST_PIECES + MOST_EXTENTS
    assert header.counts == len(pieces)
    for extent in header.extents:
        own = [(start, piece) for each, start, piece in pieces if each is extent]
        assert [start for start, _ in own] == [sum(piece for _, piece in own[:index]) for index in range(len(own))]
        assert sum(piece for _, piece in own) == extent.nbytes
