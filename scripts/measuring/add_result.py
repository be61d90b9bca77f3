"""Take a result of the bench into scripts/results.

Run `python scripts/measuring/add_result.py RESULT.json NAME [--hardware TEXT]`. RESULT.json is a file of `python -m
mpicomm.bench -J`. The script writes NAME.json in scripts/results, and replaces an earlier result of the name. Names of
hosts, processes and devices stay out. `python scripts/results/tables.py` then writes the tables.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from result_file import hardware, without

from mpicomm.cli.arguments import write_json

OWN = "mpicomm"
TABLES = {
    "matmul": (
        "Matrix products with a collective",
        "Collective and product are the parts alone. Serial is mpicomm's collective and the product, one after the "
        "other. The number in brackets is the time divided by mpicomm's. All times are of one run.",
    ),
    "experts": (
        "A mixture of experts",
        "The experts of a token are drawn at random. The tokens of a rank are the `max_tokens` of its `Experts`. "
        "Copy moves the bytes of a dispatch that cross the links by a copy engine. Even is an all-to-all of as many "
        "rows to each rank. Calls are in CUDA graphs, but dispatch and combine of NCCL are not: there the host waits "
        "for the counts. NCCL moves rows that lie by rank already, and does not sort or add them.",
    ),
}
FOLDER = Path(__file__).parents[1] / "results"


def published(result: dict[str, Any], where: str | None) -> dict[str, Any]:
    """Return a result without the fields that name a machine, and with its hardware in words."""
    ranks, program = result["ranks"], shlex.split(result["command"])
    options = without(program[program.index("mpicomm.bench") + 1 :], "-J", "--json")
    kept = {name: value for name, value in result.items() if name not in ("ranks", "processor")}
    return {
        "hardware": where or hardware(ranks, result["processor"]),
        **kept,
        "command": shlex.join(["mpirun", "-np", str(len(ranks)), "python", "-m", "mpicomm.bench", *options]),
        "options": {**result["options"], "json": None},
        "versions": {name: version for name, version in result["versions"].items() if name != "Linux"},
    }


def as_table(result: dict[str, Any], where: str | None) -> dict[str, Any]:
    """Return a result of ``bench matmul`` or ``bench experts`` as a table: see `result_file.Table`."""
    document, first = published(result, where), result["results"][0]
    facts = [name for name in first if name not in ("places", "missing")]
    places = {place: list(found) for place, found in first["places"].items()}
    title, text = TABLES[result["collective"]]
    return {
        "group": "Calls",
        "title": f"{title}, {len(result['ranks'])} ranks, {result['options']['datatype']}",
        "hardware": document["hardware"],
        "columns": [*facts, *(f"{place}: {name}, us" for place, names in places.items() for name in names)],
        "rows": [
            [
                *(row[name] for name in facts),
                *(_time(row["places"][place], name) for place, names in places.items() for name in names),
            ]
            for row in result["results"]
        ],
        "text": text,
        "notes": [],
        "versions": {**document["versions"], **document["peers"]},
        **{name: document[name] for name in ("command", "date")},
    }


def _time(found: dict[str, Any], name: str) -> float | str | None:
    """Return mpicomm's time, or another time with its ratio to mpicomm's."""
    if name not in found:
        return None
    time_us, own_us = found[name]["time_us"], found[OWN]["time_us"]
    return round(time_us, 1) if name == OWN else f"{time_us:.1f} ({time_us / own_us:.2f})"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("--hardware", help="default: the GPUs, their links and the processor of the result")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    written = as_table if result["collective"] in TABLES else published
    document = written(result, options.hardware)
    write_json(FOLDER / f"{options.name}.json", document)


main()
