"""Signature: what a rank calls, as all ranks of a collective must call it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A collective call in words; ``count`` is None where ranks may know different ones, others where unused."""

    operation: str
    dtype: str
    count: int | None = None
    op: str | None = None
    root: int | None = None
    algorithm: str | None = None
    """The one that was asked for by name."""

    def __str__(self) -> str:
        parts = [self.dtype, *(f"{name}={value}" for name, value in self._optional() if value is not None)]
        return f"{self.operation}({', '.join(parts)})"

    def _optional(self) -> list[tuple[str, int | str | None]]:
        return [("count", self.count), ("op", self.op), ("root", self.root), ("algorithm", self.algorithm)]

    @property
    def hash32(self) -> int:
        """A 32-bit hash that travels with the data, so that ranks which call different things notice."""
        return int.from_bytes(hashlib.blake2b(str(self).encode(), digest_size=4).digest(), "little")
