"""Mappings: the addresses of a communicator's symmetric arrays on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Mapped(NamedTuple):
    """A piece of a symmetric array. ``pointers`` are the addresses, on this rank, of the piece of every rank.

    ``array``, the number of the array, and ``offset``, in bytes, name the piece. They are the same on all ranks.
    """

    array: int
    offset: int
    pointers: tuple[int, ...]

    def __str__(self) -> str:
        return self.text_at(self.offset)

    def text_at(self, offset: int | str) -> str:
        """Return the text of another piece of the array."""
        return f"byte {offset} of symmetric array {self.array}"


class Mappings:
    """The open symmetric arrays of a communicator. All methods are local."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # by number: its ends on this rank, pointers
        self._made = 0
        self.version = 0
        """It changes with every array that a rank creates or closes: on all ranks at the same point of the program."""

    def add(self, pointers: Sequence[int], own: int, nbytes: int) -> int:
        """Add an array with ``nbytes`` on each rank, and ``pointers[own]`` on this rank; return its number."""
        self._made += 1
        self.version += 1
        self._arrays[self._made] = pointers[own], pointers[own] + nbytes, tuple(pointers)
        return self._made

    def remove(self, number: int) -> None:
        """Remove an array that is about to close."""
        self.version += 1
        self._arrays.pop(number, None)

    def find(self, pointer: int, nbytes: int) -> Mapped | None:
        """Return the piece at ``pointer`` in this rank's memory; None if it is not inside one array."""
        for number, (begin, end, pointers) in self._arrays.items():
            if nbytes > 0 and begin <= pointer and pointer + nbytes <= end:
                offset = pointer - begin
                return Mapped(number, offset, tuple([each + offset for each in pointers]))
        return None
