from __future__ import annotations

import pytest

from mpicomm.devices.handle import KEY_NBYTES, KINDS, PACKET_NBYTES, Kind, MemoryHandle


@pytest.mark.parametrize("kind", KINDS)
def test_every_handle_survives_the_round_trip(kind: Kind) -> None:
    handle = MemoryHandle(kind, bytes(range(16)), bytes(range(KEY_NBYTES)), 2**64 - 1, 2**63, 4096)
    packet = handle.pack()
    assert len(packet) == PACKET_NBYTES
    assert MemoryHandle.unpack(packet) == handle
