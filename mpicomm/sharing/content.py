"""Content: the bytes of a shared memory after a suspension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SuspendedContent:
    """The content of this rank's memory after a suspension: the bytes of before, or a fill, or undefined bytes."""

    kept_nbytes: int = 0
    """The number of the first bytes, which go to the host and come back."""
    of_user: bool = False
    """Whether these bytes belong to the program, which may do without them."""
    fill: Callable[[int], None] | None = None
    """Fills the memory at an address."""
