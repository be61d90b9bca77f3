from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.rendezvous_header import DESCRIPTION_NBYTES, KERNEL_NBYTES, MOST_EXTENTS, Description, Extent

SECRET = os.urandom(32)
PACKET = os.urandom(132)
LONG = 2 * KERNEL_NBYTES
DESCRIBED = Description(LONG + 20, PACKET, 32, (Extent(PACKET, 2**33, LONG), Extent(PACKET[::-1], 0, 20)))


def test_a_description_comes_back() -> None:
    message = DESCRIBED.pack(SECRET)
    assert len(message) == DESCRIPTION_NBYTES
    assert Description.unpack(message, SECRET) == DESCRIBED


def test_data_is_none() -> None:
    message = DESCRIBED.pack(SECRET)
    for data in (
        b"",
        message[:-1],
        message + b"\0",
        os.urandom(DESCRIPTION_NBYTES),
        bytes([message[0] ^ 1]) + message[1:],
    ):
        assert Description.unpack(data, SECRET) is None
    assert Description.unpack(message, os.urandom(32)) is None


def test_nonsense_is_refused() -> None:
    for nonsense in (replace(DESCRIBED, nbytes=71), replace(DESCRIBED, extents=())):
        with pytest.raises(HandleError, match="description of a message"):
            Description.unpack(nonsense.pack(SECRET), SECRET)


@pytest.mark.parametrize("nbytes", [1, 1 << 15, (8 << 20) + 1, 100 << 20, 10 << 30])
def test_pieces_are_few_and_make_up_the_message(nbytes: int) -> None:
    parts = [nbytes // 3, nbytes - nbytes // 3] if nbytes > KERNEL_NBYTES else [nbytes]
    described = Description(nbytes, PACKET, 0, tuple(Extent(PACKET, 0, part) for part in parts))
    pieces = list(described.pieces())
    assert len(pieces) <= rendezvous_header.MOST_PIECES + MOST_EXTENTS
    assert described.counts == len(pieces)
    for extent in described.extents:
        own = [(start, piece) for each, start, piece in pieces if each is extent]
        assert [start for start, _ in own] == [sum(piece for _, piece in own[:index]) for index in range(len(own))]
        assert sum(piece for _, piece in own) == extent.nbytes
