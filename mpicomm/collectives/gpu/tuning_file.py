"""The JSON file in which ``python -m mpicomm.tune`` keeps a table of algorithms: find, read and write it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpicomm import environment
from mpicomm.collectives.gpu.built_in import BUILT_IN, scaled
from mpicomm.collectives.gpu.tuning import TUNED, Measured, Row, Tuning, algorithms_of, kind_of
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
    """Return the file for GPUs of this name; None without a cache directory."""
    directory = environment.cache_directory()
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return directory / f"tuning-{slug}.json" if directory is not None else None


def to_json(table: Tuning) -> dict[str, Any]:
    """Return a table as JSON types. `load` reads them back from a file."""
    return {"format": _FORMAT, "device": table.device, "rows": [_row_to_json(row) for row in table.rows]}


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


def _row_from_json(record: Any) -> Row:
    operation, size, source = record["operation"], int(record["ranks"]), record["measured"]
    choices = tuple((int(choice["from_nbytes"]), choice["algorithm"]) for choice in record["choices"])
    begins = [begin for begin, _ in choices]
    if operation not in TUNED or size < 2 or begins[0] != 0 or begins != sorted(set(begins)):
        raise ValueError(f"no row of {operation} between {size} ranks can begin at {begins}")
    for _, name in choices:
        if name not in algorithms_of(operation):  # such as the ring, which reduces in another order
            raise ValueError(f"a table cannot choose {name} for {operation}")
    measured = None
    if source is not None:
        times_us = {int(line["nbytes"]): dict(line["us"]) for line in source["times"]}
        measured = Measured(source["date"], source["mpicomm"], source["datatype"], times_us)
    return Row(kind_of(operation, registered=bool(record["registered"])), size, choices, measured)
