"""Signature: the facts of a collective call in which all ranks must agree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Signature:
    """A collective call in words.

    ``count`` is None where ranks may pass different counts. Other fields are None where the collective has no such
    argument.
    """

    operation: str
    dtype: str
    count: int | None = None
    op: str | None = None
    root: int | None = None
    algorithm: str | None = None
    """The algorithm that the caller named."""
    epilogue: str | None = None

    def __str__(self) -> str:
        optional = {"count": self.count, "op": self.op, "root": self.root}
        optional |= {"epilogue": self.epilogue, "algorithm": self.algorithm}
        parts = [self.dtype, *(f"{name}={value}" for name, value in optional.items() if value is not None)]
        return f"{self.operation}({', '.join(parts)})"

    @property
    def hash32(self) -> int:
        """A 32-bit hash. It travels with the data, so that ranks which call different things notice."""
        return int.from_bytes(hashlib.blake2b(str(self).encode(), digest_size=4).digest(), "little")
