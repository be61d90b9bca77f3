"""MemoryUse: the memory that the library has set up on this rank, by purpose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpicomm.devices.handle import SEALED_KINDS, Kind


@dataclass(frozen=True)
class MemoryUse:
    """Memory of this rank for one purpose, in bytes."""

    purpose: str
    device_nbytes: int = 0
    """On this rank's GPU."""
    host_nbytes: int = 0

    @classmethod
    def of_kind(cls, purpose: str, kind: Kind, nbytes: int) -> MemoryUse:
        """Return the use of memory that peers open by handles of a kind: it lies on the host or on the GPU."""
        return cls(purpose, host_nbytes=nbytes) if kind in SEALED_KINDS else cls(purpose, device_nbytes=nbytes)


def summed(uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
    """Return one use for each purpose, without uses that have no memory."""
    sums: dict[str, MemoryUse] = {}
    for use in uses:
        before = sums.get(use.purpose, MemoryUse(use.purpose))
        sums[use.purpose] = MemoryUse(
            use.purpose, before.device_nbytes + use.device_nbytes, before.host_nbytes + use.host_nbytes
        )
    return tuple(use for use in sums.values() if use.device_nbytes or use.host_nbytes)
