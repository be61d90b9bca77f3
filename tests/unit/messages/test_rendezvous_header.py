from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mpicomm.devices.handle import PACKET_NBYTES
from mpicomm.errors import HandleError
from mpicomm.messages import rendezvous_header
from mpicomm.messages.rendezvous_header import (
    HEADER_NBYTES,
    KERNEL_NBYTES,
    KNOWN_NBYTES,
    MOST_EXTENTS,
    START,
    Extent,
    RendezvousHeader,
    counts_of,
    pieces,
    put_nbytes,
)

SECRET = os.urandom(32)
PACKET = os.urandom(PACKET_NBYTES)
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
    for nonsense in (
        replace(DESCRIBED, nbytes=71),
        replace(DESCRIBED, nbytes=LONG + 21),
        replace(DESCRIBED, extents=()),
    ):
        with pytest.raises(HandleError, match="header of a message"):
            RendezvousHeader.unpack(nonsense.pack(SECRET), SECRET)


@pytest.mark.parametrize("nbytes", [1, 1 << 15, (8 << 20) + 1, 100 << 20, 10 << 30])
@pytest.mark.parametrize("spare", [0, 1000])
def test_pieces_are_few_and_make_up_the_message(nbytes: int, spare: int) -> None:
    parts = [nbytes // 3, nbytes - nbytes // 3 + spare] if nbytes > KERNEL_NBYTES else [nbytes + spare]
    places = [(number << 40, part) for number, part in enumerate(parts)]
    found = list(pieces(places, nbytes))
    assert len(found) <= rendezvous_header.MOST_PIECES + MOST_EXTENTS
    assert counts_of(places, nbytes) == len(found)
    wanted = [(number << 40, part) for number, part in enumerate([*parts[:-1], parts[-1] - spare])]
    for begin, part in wanted:
        own = [(address - begin, piece) for address, piece in found if begin <= address < begin + (1 << 40)]
        assert [start for start, _ in own] == [sum(piece for _, piece in own[:index]) for index in range(len(own))]
        assert sum(piece for _, piece in own) == part


def test_a_slot_is_known_by_the_begin_of_its_header() -> None:
    message = DESCRIBED.pack(SECRET)
    known, nbytes = START.unpack_from(message)
    put_nbytes(message, KNOWN_NBYTES, KERNEL_NBYTES + 1)
    assert RendezvousHeader.unpack(bytes(message), SECRET) == replace(DESCRIBED, nbytes=KERNEL_NBYTES + 1)
    assert (nbytes, START.unpack_from(message)) == (DESCRIBED.nbytes, (known, KERNEL_NBYTES + 1))
    other = replace(DESCRIBED, name=RendezvousHeader(1, PACKET, 32, DESCRIBED.extents).name)
    assert START.unpack_from(other.pack(SECRET))[0] != known != START.unpack_from(DESCRIBED.pack(os.urandom(32)))[0]
