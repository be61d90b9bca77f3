"""Result files: tables of measurements as JSON. The scripts that measure write them, and tables.py reads them.

A file holds one table, or a list of tables. To publish it, put it into scripts/results and run tables.py there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpicomm.cli.arguments import output_file, processor, versions, write_json

LONG_RUNS = ["run", "date", "how many", "result"]
"""The columns of tables of reliability: a row is a run."""


@dataclass
class Table:
    """A table and how it was measured. A cell is a text, a number, None, or a list of two numbers for a range."""

    group: str
    """A group of scripts/results/tables.py."""
    title: str
    hardware: str
    columns: list[str]
    rows: list[list[Any]]
    text: str = ""
    """A text above the table, which explains the columns."""
    notes: list[str] = field(default_factory=list)
    """Below the table."""
    command: str | None = None
    """The command of all rows; None if a column names the commands."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of software that `mpicomm.cli.arguments.versions` does not name."""


class Sheet:
    """A table whose rows rank 0 prints as they come, and adds to the file of ``options`` when the block ends.

    ``comm`` is a Communicator, or a communicator of MPI if the rows are of the host. Creation is collective.
    """

    def __init__(
        self, comm: Any, options: argparse.Namespace, title: str, columns: list[str], *, digits: int = 2, **more: Any
    ) -> None:
        where = hardware_of(comm) if hasattr(comm, "describe") else hardware([])
        facts = {"group": "Calls", "command": command(comm.size), **more}
        self.table = Table(title=title, hardware=where, columns=columns, rows=[], **facts)
        self._path, self._digits, self._shows = options.json, digits, comm.rank == 0
        self._print(columns)

    def __enter__(self) -> Sheet:
        return self

    def __exit__(self, error: object, *rest: object) -> None:
        if error is None and self._shows and self._path is not None:
            add_tables(self._path, [self.table])

    def add(self, *cells: Any) -> None:
        """Add a row. Floats get the digits of the sheet."""
        self.table.rows.append([round(cell, self._digits) if isinstance(cell, float) else cell for cell in cells])
        self._print(self.table.rows[-1])

    def _print(self, cells: Sequence[Any]) -> None:
        if self._shows:
            sys.stdout.write(" | ".join("-" if cell is None else str(cell) for cell in cells) + "\n")
            sys.stdout.flush()


def add_tables(path: Path, tables: Sequence[Table]) -> None:
    """Write tables into a file. If the file has a table already, the rows follow its rows.

    Exits if the file has the table with other hardware, because one table has one machine.
    """
    found: Any = json.loads(path.read_text()) if path.exists() else []
    documents: list[dict[str, Any]] = found if isinstance(found, list) else [found]
    for table in tables:
        earlier = next((each for each in documents if _same_table(each, table)), None)
        if earlier is None:
            documents.append({**asdict(table), "date": today(), "versions": {**_versions(), **table.versions}})
        elif earlier["hardware"] != table.hardware:
            sys.exit(f"{path} is of {earlier['hardware']}, this is {table.hardware}: name another file")
        else:
            earlier["rows"] += table.rows
            first = earlier["date"].split(" to ")[0]
            earlier["date"] = first if first == today() else f"{first} to {today()}"
    write_json(path, documents if len(documents) > 1 else documents[0])


def measuring_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script with that docstring, with the option of the file for `add_tables`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="add the tables to this file")
    return parser


def hardware_of(comm: Any) -> str:
    """Return the hardware of a Communicator. Collective."""
    from mpicomm.cli.options import rank_record  # not above, because some scripts run without MPI

    return hardware(comm.allgather(rank_record(comm.describe())))


def hardware(ranks: Sequence[dict[str, Any]], cpu: str = "") -> str:
    """Return the GPUs, the links and the processor of a run: ``cpu``, or the processor of this machine.

    ``ranks`` are records of `cli.options.rank_record`.
    """
    gpus = {rank["device_uuid"]: rank["device_name"] for rank in ranks if rank["device_uuid"]}
    links = {link["path"] for rank in ranks for link in rank["links"]} & {"NVLink", "PCIe", "staged"}
    nodes = len({rank["node"] for rank in ranks})
    parts = [f"{count} x {name}" for name, count in Counter(gpus.values()).items()]
    return "; ".join(
        filter(None, [", ".join([*parts, *sorted(links)]), f"{nodes} machines" * (nodes > 1), cpu or processor()])
    )


def command(ranks: int | None = None) -> str:
    """Return the command line of this process; ``ranks`` is how many of them mpirun started."""
    program = ["python", *sys.orig_argv[1:]]
    started = program if ranks is None else ["mpirun", "-np", str(ranks), *program]
    return shlex.join(without(started, "--json"))


def without(words: Sequence[str], *options: str) -> list[str]:
    """Return a command without these options and their values, because they do not change the measurement."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in options:
            next(rest)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def today() -> str:
    """Return the date of a row."""
    return datetime.now(timezone.utc).date().isoformat()


def _same_table(document: dict[str, Any], table: Table) -> bool:
    return (document["title"], document["columns"]) == (table.title, table.columns)


def _versions() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name != "Linux"}
