"""Tuning: which algorithm a collective on GPU arrays takes, as a table that ``python -m mpicomm.tune`` can measure."""

from __future__ import annotations

import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpicomm import environment
from mpicomm.collectives.gpu.algorithms.registry import NAMES, names_for
from mpicomm.collectives.operations import OPERATIONS as COLLECTIVES
from mpicomm.errors import InvalidUsageError

_CHOICES = {row.name: names_for(row, in_rank_order=True) for row in COLLECTIVES.values()}
OPERATIONS = tuple(name for name, names in _CHOICES.items() if len(names) > 1)
"""The collectives between whose algorithms a table chooses."""
_FORMAT = 2
_BUILT_IN_LINK_GB_S = 478.0
"""What the links of an H200 carry each way: 18 NVLinks of 26.6 GB/s."""
_KIB, _MIB = 1 << 10, 1 << 20


def algorithms_of(operation: str) -> tuple[str, ...]:
    """Return the algorithms that a table may choose for a collective: those that reduce in the order of ranks."""
    return _CHOICES[operation]


class Kind(NamedTuple):
    """What a row of a table is for, but for the number of ranks; made by `kind_of`."""

    operation: str
    registered: bool


def kind_of(operation: str, *, registered: bool) -> Kind:
    """Return the kind of a call: only what makes a difference to the operation is told apart."""
    # Into the output of one rank alone nobody else can store.
    return Kind(operation, registered and COLLECTIVES[operation].into_all)


@dataclass(frozen=True)
class Measured:
    """What a row was chosen from: when, with which version and element type, and the times by size and algorithm."""

    date: str
    version: str
    datatype: str
    times_us: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """The algorithms for calls of a kind between ``size`` ranks."""

    kind: Kind
    size: int
    choices: tuple[tuple[int, str], ...]
    """From how many bytes on which algorithm is used: ascending, the first one from 0 on."""
    measured: Measured | None = None

    def algorithm(self, nbytes: int, size: int) -> str:
        """Return the last choice that ``nbytes`` reach between ``size`` ranks, as many as here or more."""
        return next(name for begin, name in reversed(self.choices) if nbytes >= self._begin(begin, name, size))

    def choices_above(self, nbytes: int, size: int) -> list[tuple[int, str]]:
        """Return what `algorithm` says of more than ``nbytes``, as ``choices`` of a row for ``size`` ranks say it."""
        found: list[tuple[int, str]] = []
        for begin, name in reversed(self.choices):
            begin = max(nbytes + 1, self._begin(begin, name, size))
            if not found or begin < found[-1][0]:  # else later ones hold wherever it would
                found.append((begin, name))
        return found[::-1]

    def _begin(self, begin: int, name: str, size: int) -> int:
        # Between more ranks one hop sends more, so that two are sooner better, and a copy is a smaller part of the
        # whole. What is scaled is the last size below the bound: bounds begin right behind a size that was measured.
        theirs, ours = (size - 1, self.size - 1) if name in ("one_shot", "two_shot") else (self.size, size)
        return (begin - 1) * ours // theirs + 1

    def _described(self) -> tuple[str, str]:
        """Return what the row is for, but for its ranks, and what it says."""
        first, *rest = self.choices
        operation, registered = self.kind
        what = f"{operation}, symmetric output" if registered else operation
        return what, ", ".join([first[1], *(f"{name} from {_size(begin)}" for begin, name in rest)])


@dataclass(frozen=True)
class Tuning:
    """A table of algorithms: the same on all ranks of a communicator, or they would wait for each other in vain."""

    source: str
    rows: tuple[Row, ...]
    device: str
    """Name of the GPUs that it was measured on."""
    link_speed: float = 1.0
    """Of the slowest link between the ranks, by that of the links that what is built in was measured on."""

    def algorithm(self, operation: str, nbytes: int, size: int, *, registered: bool) -> str:
        """Return the algorithm for a call of ``nbytes`` in all, as `Call.nbytes` counts, between ``size`` ranks. Local.

        ``registered`` is whether the output lies in a SymmetricArray on all ranks; without a row for that, the one for
        any output counts.

        A number of ranks that has no row takes the row of the next smaller one. Its bounds are scaled: those of
        "one_shot" and "two_shot" to as much sent by one rank in one hop, nbytes * (size - 1); those of the
        others to as large a copy, nbytes / size. Rows of 2 ranks are for 2 ranks alone, between which a second hop
        saves nothing. Without any row it is "one_shot".
        """
        row = self._find(kind_of(operation, registered=registered), size)
        return row.algorithm(nbytes, size) if row else "one_shot"

    def updated(self, rows: Iterable[Row]) -> Tuning:
        """Return the table with ``rows`` in the place of those for the same."""
        found = {(row.kind, row.size): row for row in (*self.rows, *rows)}
        return replace(self, rows=tuple(found[key] for key in sorted(found)))

    def continued(self, row: Row) -> Row:
        """Return a row that was measured, continued with what this table says of larger sizes than that.

        An algorithm that it has come to already, and that this table has for larger sizes still, is not given up again.
        """
        assert row.measured is not None
        largest = max(row.measured.times_us)
        found = self._find(row.kind, row.size)
        above = found.choices_above(largest, row.size) if found else []
        last, names = row.choices[-1][1], [name for _, name in above]
        kept = above[names.index(last) + 1 :] if last in names else above
        return replace(row, choices=(*row.choices, *kept))

    def completed(self, other: Tuning) -> Tuning:
        """Return the table with the rows of another one where this one has none to go by."""
        missing = [row for row in other.rows if self._find(row.kind, row.size) is None]
        if not missing:
            return self
        return replace(self.updated(missing), source=f"{self.source}; for the rest {other.source}")

    def without(self, algorithm: str) -> Tuning:
        """Return the table as if there were no such algorithm, which is not "one_shot"."""
        rows = []
        for row in self.rows:
            begins = {0: "one_shot", **{begin: name for begin, name in row.choices if name != algorithm}}
            rows.append(replace(row, choices=tuple(begins.items())))
        return replace(self, rows=tuple(rows))

    def scaled(self, link_gb_s: float) -> Tuning:
        """Return the table for other links than it was measured on, which carry so much each way.

        The model: what an algorithm costs more than another to begin with is a time that launches and barriers take,
        and is as long anywhere; what it saves is time on the links. So bounds are larger the faster the links are.
        """
        speed = link_gb_s / _BUILT_IN_LINK_GB_S
        rows = [
            replace(row, choices=tuple((round(begin * speed), name) for begin, name in row.choices))
            for row in self.rows
        ]
        source = f"{self.source}, scaled to links of {link_gb_s:.3g} GB/s"
        return replace(self, source=source, rows=tuple(rows), link_speed=speed)

    def describe(self) -> list[str]:
        """Return the table for a person to read, ranks with the same choices on one line."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for row in self.rows:
            sizes.setdefault(row._described(), []).append(row.size)
        ranks = {key: ", ".join(map(str, sorted(found))) for key, found in sizes.items()}
        return [self.source, *(f"{what}, {ranks[what, says]} ranks: {says}" for what, says in sizes)]

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON's types, which `load` reads back from a file."""
        return {"format": _FORMAT, "device": self.device, "rows": [_row_to_json(row) for row in self.rows]}

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


def _built_in() -> Tuning:
    def row(operation: str, size: int, *changes: tuple[int, str], registered: bool = False) -> Row:
        return Row(kind_of(operation, registered=registered), size, ((0, "one_shot"), *changes))

    def allreduce(copies_from: dict[int, int], *, registered: bool = False) -> list[Row]:
        # Between two ranks one hop has no more traffic than two.
        two_hops = {3: 384, 4: 256, 6: 152, 8: 176}
        return [
            row(
                "Allreduce",
                size,
                *([(two_hops[size] * _KIB + 1, "two_shot")] if size > 2 else []),
                (begin * _MIB, "copy_engine"),
                registered=registered,
            )
            for size, begin in copies_from.items()
        ]

    blocks = ("Allgather", "Alltoall")
    rows = (
        *allreduce({2: 240, 3: 192, 4: 176, 6: 160, 8: 192}),
        *allreduce({2: 112, 3: 112, 4: 112, 6: 96, 8: 120}, registered=True),
        # Call after call a chain of 4 is ahead from 384 KiB on. But a call takes 2 us for each rank on its way, and a
        # single one is as soon over from 2 MiB on, by two hops: the bound is in between, where what some lose is what
        # others gain. For 6 and 8 ranks that of the chain comes of these times.
        row("Bcast", 3, (896 * _KIB, "chain")),
        row("Bcast", 4, (576 * _KIB, "chain")),
        row("Bcast", 6, (448 * _KIB, "two_shot"), (1280 * _KIB, "chain")),
        row("Bcast", 8, (384 * _KIB, "two_shot"), (2048 * _KIB, "chain")),
        row("Bcast", 2, (144 * _MIB, "copy_engine")),
        row("Bcast", 2, (80 * _MIB, "copy_engine"), registered=True),
        *(
            row("Reduce", size, (begin * _KIB, "two_shot"), (chain * _KIB, "chain"))
            for size, begin, chain in ((3, 1024, 2560), (4, 1024, 3072), (6, 576, 3584), (8, 448, 4608))
        ),
        row("Reduce", 2, (160 * _MIB, "copy_engine")),
        *(
            row(name, size, (begin * _MIB, "copy_engine"), registered=True)
            for name in blocks
            for size, begin in ((2, 152), (3, 120), (4, 160), (6, 144), (8, 176))
        ),
        *(
            row(name, size, (begin * _MIB, "copy_engine"))
            for name in blocks
            for size, begin in ((2, 416), (3, 224), (4, 320))
        ),
        *(
            row(name, size, (begin * _MIB, "copy_engine"))
            for name in ("Gather", "Scatter")
            for size, begin in ((2, 224), (3, 224), (4, 320))
        ),
        *(
            row("Reduce_scatter_block", size, (begin * _MIB, "copy_engine"))
            for size, begin in ((2, 512), (3, 240), (4, 240), (6, 176), (8, 176))
        ),
    )
    return Tuning("built in, measured on H200s", rows, "NVIDIA H200")


BUILT_IN = _built_in()


def find(device_name: str, link_gb_s: Callable[[], float | None]) -> Tuning:
    """Return the table for GPUs of this name: a file's, completed by what is built in, or that alone. Local.

    The file is the one that MPICOMM_TUNING names ("off" for none), which has to be there, else the `default_file`, if
    it is there. What is built in is `scaled` for other GPUs than it was measured on: ``link_gb_s`` is asked then what
    the slowest link between them carries each way, and may not know. Raises as `load`.
    """
    bandwidth = None if device_name == BUILT_IN.device else link_gb_s()
    built_in = BUILT_IN if bandwidth is None else BUILT_IN.scaled(bandwidth)
    named = environment.tuning()
    path = Path(named) if named else default_file(device_name)
    # To Path.exists a home that belongs to somebody else is an error.
    if named == "off" or path is None or not (named or os.access(path, os.F_OK)):
        return built_in
    return replace(load(path).completed(built_in), link_speed=built_in.link_speed)


def default_file(device_name: str) -> Path | None:
    """Return where the table for GPUs of this name is kept, None for a user without a home."""
    directory = environment.cache_directory()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return directory / f"tuning-{slug}.json" if directory is not None else None


def load(path: Path) -> Tuning:
    """Read a file of `Tuning.to_json`. Local; raises `InvalidUsageError` naming the file and what is wrong with it."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidUsageError(
            f"tuning file {path}: {error.strerror}; set MPICOMM_TUNING to a file that python -m mpicomm.tune has "
            "written, or to off"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"it is no JSON: {error}") from error
    whole = _Value(path, "", document)
    if whole["format"].content != _FORMAT:
        whole["format"].refuse(f"this mpicomm reads format {_FORMAT}")
    rows: dict[tuple[Kind, int], Row] = {}
    for value in whole["rows"].items():
        row = _row_from_json(value)
        if (row.kind, row.size) in rows:
            value.refuse("there is another row for the same")
        rows[row.kind, row.size] = row
    device = whole["device"].text()
    return Tuning(f"{path} ({device})", tuple(rows.values()), device)


def _row_to_json(row: Row) -> dict[str, Any]:
    measured = row.measured
    return {
        **row.kind._asdict(),
        "ranks": row.size,
        "choices": [{"from_nbytes": begin, "algorithm": name} for begin, name in row.choices],
        "measured": measured
        and {
            "date": measured.date,
            "mpicomm": measured.version,
            "datatype": measured.datatype,
            "times": [{"nbytes": nbytes, "us": dict(times_us)} for nbytes, times_us in measured.times_us.items()],
        },
    }


def _row_from_json(value: _Value) -> Row:
    operation = value["operation"].one_of(OPERATIONS)
    registered = value["registered"].boolean()
    legal = algorithms_of(operation)
    choices: list[tuple[int, str]] = []
    for choice in value["choices"].items():
        begin = choice["from_nbytes"].whole(0)
        if begin <= choices[-1][0] if choices else begin != 0:
            choice["from_nbytes"].refuse("they must ascend from 0")
        choices.append((begin, choice["algorithm"].one_of(legal)))
    if not choices:
        value["choices"].refuse("there must be one at least")
    source, measured = value["measured"], None
    if source.content is not None:
        times_us = {
            line["nbytes"].whole(1): {name: time.positive() for name, time in line["us"].members(NAMES).items()}
            for line in source["times"].items()
        }
        measured = Measured(source["date"].text(), source["mpicomm"].text(), source["datatype"].text(), times_us)
    kind = kind_of(operation, registered=registered)
    return Row(kind, value["ranks"].whole(2), tuple(choices), measured)


class _Value:
    """Something in a file, and where: every way to read it raises `InvalidUsageError` where it is something else."""

    def __init__(self, path: Path, name: str, content: Any) -> None:
        self._path = path
        self._name = name
        self.content = content

    def __getitem__(self, key: str) -> _Value:
        if not isinstance(self.content, dict):
            self.refuse("it must be an object")
        if key not in self.content:
            self.refuse(f'it lacks "{key}"')
        return _Value(self._path, f"{self._name}.{key}".lstrip("."), self.content[key])

    def items(self) -> list[_Value]:
        if not isinstance(self.content, list):
            self.refuse("it must be a list")
        return [_Value(self._path, f"{self._name}[{index}]", item) for index, item in enumerate(self.content)]

    def members(self, names: tuple[str, ...]) -> dict[str, _Value]:
        """Return what there is of an object that may have these names alone."""
        if not isinstance(self.content, dict) or not set(self.content) <= set(names):
            self.refuse(f"it must be an object with names from {', '.join(names)}")
        return {name: self[name] for name in self.content}

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.refuse("it must be text")

    def one_of(self, names: tuple[str, ...]) -> str:
        if self.content not in names:
            self.refuse(f"use one of {', '.join(names)}")
        checked: str = self.content
        return checked

    def boolean(self) -> bool:
        return self.content if isinstance(self.content, bool) else self.refuse("it must be true or false")

    def whole(self, smallest: int) -> int:
        if type(self.content) is not int or self.content < smallest:  # to isinstance, true is an integer
            self.refuse(f"it must be a whole number from {smallest} up")
        return self.content

    def positive(self) -> float:
        if type(self.content) not in (int, float) or not 0 < self.content <= sys.float_info.max:
            self.refuse("it must be a positive number")
        return float(self.content)

    def refuse(self, problem: str) -> NoReturn:
        value = "" if isinstance(self.content, (dict, list)) else f"={reprlib.repr(self.content)}"
        raise _unusable(self._path, f"{self._name or 'the whole'}{value}: {problem}")


def _unusable(path: Path, problem: str) -> InvalidUsageError:
    return InvalidUsageError(
        f"tuning file {path}: {problem}; delete it and run python -m mpicomm.tune, or set MPICOMM_TUNING=off"
    )


def _size(nbytes: int) -> str:
    unit, name = (_MIB, "MiB") if nbytes >= _MIB else (_KIB, "KiB")
    return f"{nbytes / unit:.4g} {name}"
