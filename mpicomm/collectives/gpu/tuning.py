"""Tuning: the table that says which algorithm ``algorithm="auto"`` takes for a collective on GPU arrays.

tuning_file.py reads and writes such a table, built_in.py holds the table of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.operations import OPERATIONS

KIB, MIB = 1 << 10, 1 << 20


def algorithms_of(operation: str) -> tuple[str, ...]:
    """Return the algorithms that a table may choose for a collective. They reduce in the order of ranks."""
    return names_for(OPERATIONS[operation], in_rank_order=True)


TUNED = tuple(name for name in OPERATIONS if len(algorithms_of(name)) > 1)
"""The collectives for which a table chooses an algorithm."""


class Kind(NamedTuple):
    """The calls of a row, except for the number of ranks. `kind_of` makes it."""

    operation: str
    registered: bool
    """Whether the output of all ranks is symmetric memory."""
    coded: bool = False
    """Whether elements travel as codes of 8 bits. Then all bytes are bytes of codes."""


def kind_of(operation: str, *, registered: bool, coded: bool = False) -> Kind:
    """Return the kind of a call. ``registered`` counts only if peers may store into the collective's output."""
    return Kind(operation, registered and OPERATIONS[operation].into_all and not coded, coded)


@dataclass(frozen=True)
class Measured:
    """The measurement from which a row was chosen."""

    date: str
    version: str
    """The version of mpicomm."""
    datatype: str
    times_us: Mapping[int, Mapping[str, float]]
    """Microseconds by bytes of the call and algorithm."""


@dataclass(frozen=True)
class Row:
    """The algorithms for calls of a kind between ``size`` ranks."""

    kind: Kind
    size: int
    choices: tuple[tuple[int, str], ...]
    """Pairs of the fewest bytes and the algorithm from there on, in ascending order; the first pair begins at 0."""
    measured: Measured | None = None

    def algorithm(self, nbytes: int, size: int) -> str:
        """Return the last choice that ``nbytes`` reach between ``size`` ranks, at least as many as the row has."""
        return next(name for begin, name in reversed(self.choices) if nbytes >= self._begin(begin, name, size))

    def choices_above(self, nbytes: int, size: int) -> list[tuple[int, str]]:
        """Return the answers of `algorithm` above ``nbytes``, as the ``choices`` of a row for ``size`` ranks."""
        found: list[tuple[int, str]] = []
        for begin, name in reversed(self.choices):
            begin = max(nbytes + 1, self._begin(begin, name, size))
            if not found or begin < found[-1][0]:  # else a later choice covers this one
                found.append((begin, name))
        return found[::-1]

    def _begin(self, begin: int, name: str, size: int) -> int:
        # Between more ranks one hop sends more bytes, so two hops pay sooner. And a copy is a smaller part of the call.
        # The scaling applies to the last size below the bound, because a bound comes directly after a measured size.
        theirs, ours = (size - 1, self.size - 1) if name in ("one_shot", "two_shot") else (self.size, size)
        return (begin - 1) * ours // theirs + 1

    def _described(self) -> tuple[str, str]:
        """Return the kind and the choices as text."""
        first, *rest = self.choices
        operation, registered, coded = self.kind
        calls = operation + ", symmetric output" * registered + ", codes of 8 bits" * coded
        return calls, ", ".join([first[1], *(f"{name} from {_size(begin)}" for begin, name in rest)])


@dataclass(frozen=True)
class Tuning:
    """A table of algorithms. All ranks of a communicator use the same table; else they would wait for each other."""

    source: str
    """Where the table comes from, as text."""
    rows: tuple[Row, ...]
    device: str
    """Name of the GPUs on which it was measured."""
    link_speed: float = 1.0
    """The speed of the slowest link between the ranks, relative to the links on which built_in.py was measured."""

    def algorithm(self, operation: str, nbytes: int, size: int, *, registered: bool, coded: int = 0) -> str:
        """Return the algorithm for a call of ``nbytes`` in all, as `Call.nbytes` counts, between ``size`` ranks. Local.

        ``registered`` is whether the output lies in a SymmetricArray on all ranks. If the table has no row for that,
        the row for any output decides. ``coded`` is the size of an element if elements travel as codes, else 0.

        If a number of ranks has no row, the row of the next smaller number decides, with scaled bounds. The bounds of
        "one_shot" and "two_shot" keep the bytes that one rank sends in one hop, nbytes * (size - 1). The bounds of the
        other algorithms keep the bytes of one copy, nbytes / size. Rows of 2 ranks are only for 2 ranks, because a
        second hop saves nothing between them. Without any row the algorithm is "one_shot".
        """
        row = self._find(kind_of(operation, registered=registered, coded=coded > 0), size)
        return row.algorithm(nbytes // (coded or 1), size) if row else "one_shot"

    def choices(self, operation: str, size: int, *, registered: bool, coded: int = 0) -> list[tuple[int, str]]:
        """Return all answers of `algorithm` as pairs of the fewest bytes and the algorithm from there on, ascending."""
        row = self._find(kind_of(operation, registered=registered, coded=coded > 0), size)
        found = row.choices_above(-1, size) if row else [(0, "one_shot")]
        return [(begin * (coded or 1), name) for begin, name in found]

    def updated(self, rows: Iterable[Row]) -> Tuning:
        """Return the table with ``rows`` in place of its rows for the same calls."""
        found = {(row.kind, row.size): row for row in (*self.rows, *rows)}
        return replace(self, rows=tuple(found[key] for key in sorted(found)))

    def continued(self, row: Row) -> Row:
        """Return a measured row, continued with the choices of this table above the largest measured size.

        The row may end with an algorithm that this table also has for larger sizes. Then the row keeps that algorithm
        up to the table's next choice.
        """
        assert row.measured is not None
        largest = max(row.measured.times_us)
        found = self._find(row.kind, row.size)
        above = found.choices_above(largest, row.size) if found else []
        last, names = row.choices[-1][1], [name for _, name in above]
        kept = above[names.index(last) + 1 :] if last in names else above
        return replace(row, choices=(*row.choices, *kept))

    def completed(self, other: Tuning) -> Tuning:
        """Return the table with the rows of another table for calls that have no row in this table."""
        missing = [row for row in other.rows if self._find(row.kind, row.size) is None]
        if not missing:
            return self
        return replace(self.updated(missing), source=f"{self.source}; for the rest {other.source}")

    def without(self, algorithm: str) -> Tuning:
        """Return the table as it would be if this algorithm, any but "one_shot", did not exist."""
        rows = []
        for row in self.rows:
            begins = {0: "one_shot", **{begin: name for begin, name in row.choices if name != algorithm}}
            rows.append(replace(row, choices=tuple(begins.items())))
        return replace(self, rows=tuple(rows))

    def describe(self) -> list[str]:
        """Return the table as lines of text; numbers of ranks with the same choices share a line."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            sizes.setdefault(row._described(), []).append(row.size)
        ranks = {key: ", ".join(map(str, sorted(found))) for key, found in sizes.items()}
        return [self.source, *(f"{what}, {ranks[what, says]} ranks: {says}" for what, says in sizes)]

    @cached_property
    def _rows_by_kind(self) -> dict[Kind, dict[int, Row]]:
        found: dict[Kind, dict[int, Row]] = {}
        for row in self.rows:
            found.setdefault(row.kind, {})[row.size] = row
        return found

    def _find(self, kind: Kind, size: int) -> Row | None:
        for candidate in (kind, kind._replace(registered=False)):
            rows = self._rows_by_kind.get(candidate, {})
            fitting = [ranks for ranks in rows if ranks == size or 2 < ranks < size]
            if fitting:
                return rows[max(fitting)]
        return None


def _size(nbytes: int) -> str:
    unit, name = (MIB, "MiB") if nbytes >= MIB else (KIB, "KiB")
    return f"{nbytes / unit:.4g} {name}"
