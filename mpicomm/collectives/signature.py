"""Signature: the facts of a collective call in which all ranks must agree, as a text and as a hash."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mpicomm.activity.layout import COUNT_IN_TEXT


@dataclass(frozen=True)
class Signature:
    """The facts of a collective call. ``str`` gives its text.

    ``count`` is None if ranks may pass different counts. Any other field is None if the collective has no such
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
    wire_dtype: str | None = None
    """The quantized type as which elements travel."""

    def __str__(self) -> str:
        return self._text(self.count)

    def _text(self, count: int | str | None) -> str:
        optional = {"count": count, "op": self.op, "root": self.root}
        optional |= {"epilogue": self.epilogue, "wire_dtype": self.wire_dtype, "algorithm": self.algorithm}
        parts = [self.dtype, *(f"{name}={value}" for name, value in optional.items() if value is not None)]
        return f"{self.operation}({', '.join(parts)})"

    @property
    def hash32(self) -> int:
        """A 32-bit hash. It travels with the data, so ranks that call different things notice it."""
        return hash_with_count(self.hash_without_count, self.count)

    @property
    def hash_without_count(self) -> int:
        """A 32-bit hash of all other fields: see `hash_with_count`."""
        words = self._text(None).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=4).digest(), "little")

    def text_without_count(self) -> str:
        """Return the text of the call. `COUNT_IN_TEXT` stands for its count, if the call has one."""
        return self._text(None if self.count is None else COUNT_IN_TEXT)


def hash_with_count(without_count: int, count: int | None) -> int:
    """Return the hash of a call from ``without_count``, the hash of its other facts, and its count."""
    number = -1 if count is None else count
    # The factor is odd, so counts with other lowest 32 bits have other hashes. All bits of the count are in the hash.
    return without_count + number * 0x9E3779B1 + (number >> 32) & 0xFFFFFFFF
