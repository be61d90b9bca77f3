"""Content: the part of a shared memory that a suspension keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """The bytes of this rank's memory that have to come back, and the fill of the other bytes.

    At a suspension no call is in flight. So slots are empty then, and a fill makes them so again.
    """

    kept: tuple[tuple[int, int], ...] = ()
    """The ranges that go to the host and come back: begin and end in bytes."""
    fill: Callable[[int], None] | None = None
    """Fills new memory at an address, before the kept bytes return."""
    of_user: bool = False
    """Whether the bytes belong to the program, which may do without them."""


def whole(nbytes: int, *, of_user: bool = False) -> Content:
    """Return the content of memory whose bytes all come back."""
    return Content(((0, nbytes),), of_user=of_user)
