"""Mappings: where memory that is open to all ranks of a node lies on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mapped:
    """A part of a symmetric array: ``pointers`` are where it lies on every rank of the node, as mapped here.

    ``array`` and ``offset`` (bytes) say which part it is, by numbers that are the same on all ranks.
    """

    array: int
    offset: int
    pointers: tuple[int, ...]

    def __str__(self) -> str:
        return f"byte {self.offset} of symmetric array {self.array}"


@dataclass(frozen=True)
class _Array:
    begin: int
    end: int
    pointers: tuple[int, ...]


class Mappings:
    """The symmetric arrays of a communicator that are open. All methods are local."""

    def __init__(self) -> None:
        self._arrays: dict[int, _Array] = {}
        self._made = 0
        self.version = 0
        """Changes with every array that is made or closed, at the same point of the program on all ranks."""

    def add(self, pointers: Sequence[int], own: int, nbytes: int) -> int:
        """Add an array of ``nbytes`` on each rank, ``pointers[own]`` being this rank's part; return its number."""
        self._made += 1
        self.version += 1
        self._arrays[self._made] = _Array(pointers[own], pointers[own] + nbytes, tuple(pointers))
        return self._made

    def remove(self, number: int) -> None:
        """Forget an array that is about to be closed."""
        self.version += 1
        self._arrays.pop(number, None)

    def find(self, pointer: int, nbytes: int) -> Mapped | None:
        """Return where this rank's memory at ``pointer`` lies on all ranks; None if it is not all in one array."""
        for number, array in self._arrays.items():
            if nbytes > 0 and array.begin <= pointer and pointer + nbytes <= array.end:
                offset = pointer - array.begin
                return Mapped(number, offset, tuple(begin + offset for begin in array.pointers))
        return None
