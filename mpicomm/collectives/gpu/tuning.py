"""Tuning: the table that says which algorithm ``algorithm="auto"`` takes for a collective on GPU arrays.

The package has a table that was measured on H200s, in tuning-nvidia-h200.json. ``python -m mpicomm.tune`` writes
another one to a file of the same format.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpicomm import environment
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import InvalidUsageError

_KIB, _MIB = 1 << 10, 1 << 20
_FORMAT = 2
_LINK_GB_S = 478.0
"""The speed of an H200's links each way: 18 NVLinks of 26.6 GB/s."""


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
    quantized: bool = False
    """Whether elements travel quantized. Then all bytes are bytes of quantized elements."""


def kind_of(operation: str, *, registered: bool, quantized: bool = False) -> Kind:
    """Return the kind of a call. ``registered`` counts only if peers may store into the collective's output."""
    return Kind(operation, registered and OPERATIONS[operation].into_all and not quantized, quantized)


@dataclass(frozen=True)
class Row:
    """The algorithms for calls of a kind between ``size`` ranks."""

    kind: Kind
    size: int
    choices: tuple[tuple[int, str], ...]
    """Pairs of the fewest bytes and the algorithm from there on, in ascending order; the first pair begins at 0."""
    measured: Mapping[str, Any] | None = None
    """The measurement from which the row was chosen, as in the file: ``times`` has microseconds by algorithm."""

    def choices_above(self, nbytes: int, size: int) -> list[tuple[int, str]]:
        """Return the choices above ``nbytes`` between ``size`` ranks, at least as many as the row has."""
        found: list[tuple[int, str]] = []
        for begin, name in reversed(self.choices):
            # Between more ranks one hop sends more bytes, so two hops pay sooner. And a copy is a smaller part of the
            # call. The scaling applies to the last size below the bound, because a bound comes directly after a
            # measured size.
            hops = name in ("one_shot", "two_shot")
            theirs, ours = (size - 1, self.size - 1) if hops else (self.size, size)
            begin = max(nbytes + 1, (begin - 1) * ours // theirs + 1)
            if not found or begin < found[-1][0]:  # else a later choice covers this one
                found.append((begin, name))
        return found[::-1]


@dataclass(frozen=True)
class Tuning:
    """A table of algorithms. All ranks of a communicator use the same table; else they would wait for each other."""

    source: str
    rows: tuple[Row, ...]
    device: str
    link_speed: float = 1.0
    """The speed of the slowest link between the ranks, relative to the links on which `BUILT_IN` was measured."""

    def choices(
        self, operation: str, size: int, *, registered: bool, quantized_itemsize: int = 0, without: Collection[str] = ()
    ) -> list[tuple[int, str]]:
        """Return pairs of the fewest bytes of a call and the algorithm from there on, ascending. Local.

        Bytes count as in `Call.nbytes`. ``registered`` is whether the output lies in a SymmetricArray on all ranks. If
        the table has no row for that, the row for any output decides. ``quantized_itemsize`` is the size of an element
        if elements travel quantized, else 0. ``without`` are algorithms, except "one_shot", that the calls cannot take.

        If a number of ranks has no row, the row of the next smaller number decides, with scaled bounds. The bounds of
        "one_shot" and "two_shot" keep the bytes that one rank sends in one hop, nbytes * (size - 1). The bounds of the
        other algorithms keep the bytes of one copy, nbytes / size. Rows of 2 ranks are only for 2 ranks, because a
        second hop saves nothing between them. Without any row the algorithm is "one_shot".
        """
        row = self._find(kind_of(operation, registered=registered, quantized=quantized_itemsize > 0), size)
        found = [(0, "one_shot")]
        if row is not None:
            begins = {0: "one_shot", **{begin: name for begin, name in row.choices if name not in without}}
            found = replace(row, choices=tuple(begins.items())).choices_above(-1, size)
        return [(begin * (quantized_itemsize or 1), name) for begin, name in found]

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
        largest = max(times["nbytes"] for times in row.measured["times"])
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

    def describe(self) -> list[str]:
        """Return the table as lines of text; numbers of ranks with the same choices share a line."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            operation, registered, quantized = row.kind
            calls = operation + ", symmetric output" * registered + ", quantized" * quantized
            choices: list[str] = []
            for begin, name in row.choices:
                unit, text = (_MIB, "MiB") if begin >= _MIB else (_KIB, "KiB")
                choices.append(f"{name} from {begin / unit:.4g} {text}" if choices else name)
            sizes.setdefault((calls, ", ".join(choices)), []).append(row.size)
        return [
            self.source,
            *(f"{what}, {', '.join(map(str, sorted(ranks)))} ranks: {says}" for (what, says), ranks in sizes.items()),
        ]

    def _find(self, kind: Kind, size: int) -> Row | None:
        for candidate in (kind, kind._replace(registered=False)):
            fitting = [row for row in self.rows if row.kind == candidate and (row.size == size or 2 < row.size < size)]
            if fitting:
                return max(fitting, key=lambda row: row.size)
        return None


def scaled(link_gb_s: float) -> Tuning:
    """Return the table for links that carry ``link_gb_s`` each way.

    The model: an algorithm for large messages has more launches and barriers, which take the same time on any GPU, and
    saves time on the links. So bounds grow with the speed of the links.
    """
    speed = link_gb_s / _LINK_GB_S
    rows = tuple(
        replace(row, choices=tuple((round(begin * speed), name) for begin, name in row.choices))
        for row in BUILT_IN.rows
    )
    source = f"{BUILT_IN.source}, scaled to links of {link_gb_s:.3g} GB/s"
    return replace(BUILT_IN, source=source, rows=rows, link_speed=speed)


def find(device_name: str, link_gb_s: Callable[[], float | None]) -> Tuning:
    """Return the table for GPUs of this name: a file's table and the built-in table, or only the latter. Local.

    MPICOMM_TUNING names the file, which has to exist; "off" means no file. Without the variable it is the
    `default_file`, if that exists. The built-in table is scaled if it was measured on other GPUs. ``link_gb_s`` returns
    the GB/s that the slowest link between the GPUs carries each way, or None if that is not known. Raises as `load`.
    """
    bandwidth = None if device_name == BUILT_IN.device else link_gb_s()
    built_in = BUILT_IN if bandwidth is None else scaled(bandwidth)
    named = environment.tuning()
    path = Path(named) if named else default_file(device_name)
    # Not Path.exists, because that raises for a home directory that this user may not enter.
    if named == "off" or path is None or not (named or os.access(path, os.F_OK)):
        return built_in
    return replace(load(path).completed(built_in), link_speed=built_in.link_speed)


def default_file(device_name: str) -> Path | None:
    """Return the file for GPUs of this name; None without a cache directory."""
    directory = environment.cache_directory()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return directory / f"tuning-{slug}.json" if directory is not None else None


def to_json(table: Tuning) -> dict[str, Any]:
    """Return a table as JSON types. `load` reads them back from a file."""
    rows = [
        {
            "operation": row.kind.operation,
            "registered": row.kind.registered,
            **({"quantized": True} if row.kind.quantized else {}),
            "ranks": row.size,
            "choices": [{"from_nbytes": begin, "algorithm": name} for begin, name in row.choices],
            "measured": row.measured,
        }
        for row in table.rows
    ]
    return {"format": _FORMAT, "device": table.device, "rows": rows}


def load(path: Path) -> Tuning:
    """Read a file of `to_json`. Local; raises `InvalidUsageError` with the file and the problem."""
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != _FORMAT:
            raise ValueError(f"it has format {document['format']!r}, and this mpicomm reads format {_FORMAT}")
        rows = [_row_from_json(record) for record in document["rows"]]
        device = str(document["device"])
        return Tuning(f"{path} ({device})", (), device).updated(rows)
    except OSError as error:
        raise InvalidUsageError(
            f"tuning file {path}: {error.strerror}; set MPICOMM_TUNING to a file that python -m mpicomm.tune has "
            "written, or to off"
        ) from error
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InvalidUsageError(
            f"tuning file {path}: {error!r}; delete it and run python -m mpicomm.tune, or set MPICOMM_TUNING=off"
        ) from error


def _row_from_json(record: Any) -> Row:
    operation, size = record["operation"], int(record["ranks"])
    choices = tuple((int(choice["from_nbytes"]), choice["algorithm"]) for choice in record["choices"])
    begins = [begin for begin, _ in choices]
    if operation not in TUNED or size < 2 or begins[0] != 0 or begins != sorted(set(begins)):
        raise ValueError(f"no row of {operation} between {size} ranks can begin at {begins}")
    for _, name in choices:
        if name not in algorithms_of(operation):  # such as the ring, which reduces in another order
            raise ValueError(f"a table cannot choose {name} for {operation}")
    kind = kind_of(operation, registered=bool(record["registered"]), quantized=bool(record.get("quantized", False)))
    return Row(kind, size, choices, record["measured"])


BUILT_IN = replace(load(Path(__file__).with_name("tuning-nvidia-h200.json")), source="built in, measured on H200s")
