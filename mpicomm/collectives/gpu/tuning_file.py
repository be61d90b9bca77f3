"""The JSON file in which ``python -m mpicomm.tune`` keeps a table of algorithms: find, read and write it."""

from __future__ import annotations

import json
import os
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mpicomm import environment
from mpicomm.collectives.gpu.algorithms.registry import NAMES, names_for
from mpicomm.collectives.gpu.built_in import BUILT_IN, scaled
from mpicomm.collectives.gpu.tuning import TUNED, Kind, Measured, Row, Tuning, algorithms_of, kind_of
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import InvalidUsageError

_FORMAT = 2


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
    """Return the file for GPUs of this name; None for a user without a home directory."""
    directory = environment.cache_directory()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return directory / f"tuning-{slug}.json" if directory is not None else None


def to_json(table: Tuning) -> dict[str, Any]:
    """Return a table as JSON types. `load` reads them back from a file."""
    return {"format": _FORMAT, "device": table.device, "rows": [_row_to_json(row) for row in table.rows]}


def load(path: Path) -> Tuning:
    """Read a file of `to_json`. Local; raises `InvalidUsageError` with the file, the member and the problem."""
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
            value.refuse("another row is for the same calls and ranks")
        rows[row.kind, row.size] = row
    device = whole["device"].text()
    return Tuning(f"{path} ({device})", tuple(rows.values()), device)


def _row_to_json(row: Row) -> dict[str, Any]:
    measured = row.measured
    return {
        "operation": row.kind.operation,
        "registered": row.kind.registered,
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
    operation = value["operation"].one_of(TUNED)
    registered = value["registered"].boolean()
    choices: list[tuple[int, str]] = []
    for choice in value["choices"].items():
        begin = choice["from_nbytes"].whole(0)
        if begin <= choices[-1][0] if choices else begin != 0:
            choice["from_nbytes"].refuse("they must ascend from 0")
        choices.append((begin, _choice(choice["algorithm"], operation)))
    if not choices:
        value["choices"].refuse("there must be at least one")
    source, measured = value["measured"], None
    if source.content is not None:
        times_us = {
            line["nbytes"].whole(1): {name: time.positive() for name, time in line["us"].members(NAMES).items()}
            for line in source["times"].items()
        }
        measured = Measured(source["date"].text(), source["mpicomm"].text(), source["datatype"].text(), times_us)
    kind = kind_of(operation, registered=registered)
    return Row(kind, value["ranks"].whole(2), tuple(choices), measured)


def _choice(value: _Value, operation: str) -> str:
    """Read an algorithm that a table may choose."""
    possible = algorithms_of(operation)
    if value.content in names_for(OPERATIONS[operation]) and value.content not in possible:
        value.refuse(
            "it does not reduce in the order of ranks, and a table chooses only algorithms that do: "
            f"use one of {', '.join(possible)}"
        )
    return value.one_of(possible)


class _Value:
    """A value in a file and its path there. A method that reads it raises `InvalidUsageError` for another type."""

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
        """Return the members of an object, which may have only these names."""
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
        if type(self.content) is not int or self.content < smallest:  # isinstance takes True for an integer
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
