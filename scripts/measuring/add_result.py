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

FOLDER = Path(__file__).parents[1] / "results"


def published(result: dict[str, Any], where: str | None) -> dict[str, Any]:
    """Return a result without the fields that name a machine, and with its hardware in words."""
    ranks, program = result["ranks"], shlex.split(result["command"])
    options = without(program[program.index("mpicomm.bench") + 1 :], "-J", "--json", "--plot")
    kept = {name: value for name, value in result.items() if name not in ("ranks", "processor")}
    return {
        "hardware": where or hardware(ranks, result["processor"]),
        **kept,
        "command": shlex.join(["mpirun", "-np", str(len(ranks)), "python", "-m", "mpicomm.bench", *options]),
        "options": {**result["options"], "json": None, "plot": None},
        "versions": {name: version for name, version in result["versions"].items() if name != "Linux"},
    }


def table_of_products(result: dict[str, Any], where: str | None) -> dict[str, Any]:
    """Return a result of ``bench matmul`` as a table: see `result_file.Table`."""
    document = published(result, where)
    names = list(dict.fromkeys(name for row in result["results"] for name in row["times"]))
    rows = [
        [
            f"`{row['kind']}`, {row['rows']} rows, {row['inner']} x {row['columns']}",
            *(round(row["times"][name]["time_us"], 1) if name in row["times"] else None for name in names),
            round(row["ratio"], 2),
        ]
        for row in result["results"]
    ]
    return {
        "group": "Calls",
        "title": f"Matrix products with a collective, {len(result['ranks'])} ranks, {result['datatype']}",
        "hardware": document["hardware"],
        "columns": ["product", *(f"{name}, us" for name in names), "ratio"],
        "rows": rows,
        "text": "Collective and product are the parts alone. Serial is mpicomm's collective and the product, one after "
        "the other. The ratio is mpicomm's time divided by the larger part. All times are of one run.",
        "notes": [],
        "versions": {**document["versions"], **document["peers"]},
        **{name: document[name] for name in ("command", "date")},
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("--hardware", help="default: the GPUs, their links and the processor of the result")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    document = (published if "collective" in result else table_of_products)(result, options.hardware)
    write_json(FOLDER / f"{options.name}.json", document)


main()
