from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpicomm.devices.handle import (
    _BODY,
    _MAGIC,
    _VERSION,
    KEY_NBYTES,
    KEYED_KINDS,
    KINDS,
    PACKET_NBYTES,
    Kind,
    MemoryHandle,
    _digest,
)
from mpicomm.errors import HandleError

BODY = {"magic": _MAGIC, "version": _VERSION, "kind": 0, "device": bytes(16), "key": bytes(KEY_NBYTES)}
RANGE = {"size": 4096, "offset": 0, "nbytes": 4096}
HANDLE = MemoryHandle("ipc", bytes(range(16)), bytes(range(KEY_NBYTES)), 1 << 21, 512, 4096)

u64 = st.integers(0, 2**64 - 1)


def sealed(**fields: object) -> bytes:
    """A packet with these fields and the digest that belongs to them."""
    body = _BODY.pack(*(BODY | RANGE | fields).values())
    return body + _digest(body)


@st.composite
def handles(draw: st.DrawFn, kind: Kind) -> MemoryHandle:
    key = draw(st.binary(min_size=KEY_NBYTES, max_size=KEY_NBYTES)) if kind in KEYED_KINDS else b""
    size = draw(u64)
    offset = draw(st.integers(0, size))
    nbytes = draw(st.integers(0, size - offset))
    return MemoryHandle(kind, draw(st.binary(min_size=16, max_size=16)), key, size, offset, nbytes)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_every_handle_survives_the_round_trip(kind: Kind, data: st.DataObject) -> None:
    handle = data.draw(handles(kind))
    packet = handle.pack()
    assert len(packet) == PACKET_NBYTES
    assert MemoryHandle.unpack(packet) == handle


def test_the_crafted_packets_are_good_until_a_test_changes_them() -> None:
    assert MemoryHandle.unpack(sealed()) == MemoryHandle("memfd", bytes(16), b"", 4096, 0, 4096)


def test_truncated_packets_are_refused_at_every_length() -> None:
    packet = HANDLE.pack()
    for nbytes in range(PACKET_NBYTES):
        with pytest.raises(HandleError, match=f"{nbytes} bytes instead of {PACKET_NBYTES}"):
            MemoryHandle.unpack(packet[:nbytes])


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=2 * PACKET_NBYTES))
def test_appended_bytes_are_refused(more: bytes) -> None:
    with pytest.raises(HandleError, match=f"instead of {PACKET_NBYTES}"):
        MemoryHandle.unpack(HANDLE.pack() + more)


def test_every_alteration_of_one_byte_is_refused() -> None:
    packet = HANDLE.pack()
    for position in range(PACKET_NBYTES):
        altered = bytearray(packet)
        for byte in set(range(256)) - {packet[position]}:
            altered[position] = byte
            with pytest.raises(HandleError):
                MemoryHandle.unpack(bytes(altered))


@settings(deadline=None)
@given(st.binary(max_size=2 * PACKET_NBYTES) | st.binary(min_size=PACKET_NBYTES, max_size=PACKET_NBYTES))
def test_random_bytes_are_refused(packet: bytes) -> None:
    with pytest.raises(HandleError):
        MemoryHandle.unpack(packet)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"magic": b"mpicommF"}, "mpicomm has not made it"),
        ({"version": _VERSION + 1}, "run one mpicomm on all ranks"),
        ({"version": 0}, "run one mpicomm on all ranks"),
        *(({"kind": kind}, f"unknown kind {kind}") for kind in (len(KINDS), 255)),
        ({"nbytes": 4097}, r"bytes 0\.\.4097 of an allocation of 4096"),
        ({"offset": 4097, "nbytes": 0}, r"bytes 4097\.\.4097 of an allocation of 4096"),
        ({"size": 0}, r"bytes 0\.\.4096 of an allocation of 0"),
    ],
)
def test_wrong_fields_are_refused_although_the_digest_is_right(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(HandleError, match=reason):
        MemoryHandle.unpack(sealed(**fields))


@settings(deadline=None)
@given(kind=st.integers(0, 255), size=u64, offset=u64, nbytes=u64)
@example(kind=0, size=4096, offset=2**64 - 1, nbytes=2)  # 1 in the arithmetic of 64 bits
@example(kind=0, size=2**64 - 1, offset=2**63, nbytes=2**63)
@example(kind=0, size=4096, offset=4095, nbytes=1)
def test_what_is_accepted_lies_within_its_allocation(kind: int, size: int, offset: int, nbytes: int) -> None:
    packet = sealed(kind=kind, size=size, offset=offset, nbytes=nbytes)
    if kind < len(KINDS) and offset + nbytes <= size:
        assert MemoryHandle.unpack(packet) == MemoryHandle(
            KINDS[kind], bytes(16), bytes(KEY_NBYTES) if KINDS[kind] in KEYED_KINDS else b"", size, offset, nbytes
        )
    else:
        with pytest.raises(HandleError):
            MemoryHandle.unpack(packet)
