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
    options = without(program[program.index("mpicomm.bench") + 1 :], "-J", "--json")
    kept = {name: value for name, value in result.items() if name not in ("ranks", "processor")}
    return {
        "hardware": where or hardware(ranks, result["processor"]),
        **kept,
        "command": shlex.join(["mpirun", "-np", str(len(ranks)), "python", "-m", "mpicomm.bench", *options]),
        "options": {**result["options"], "json": None},
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


def table_of_experts(result: dict[str, Any], where: str | None) -> dict[str, Any]:
    """Return a result of ``bench experts`` as a table: see `result_file.Table`."""
    document, options = published(result, where), result["options"]
    rows = [
        [
            row["tokens"],
            row["layout"],
            *_rate(row, "dispatch_us"),
            *_rate(row, "combine_us"),
            round(row["even_us"], 1),
            _rate(row, "copy_us")[1],
            *(_with_ratio(row, name) for name in ("dispatch", "combine")),
        ]
        for row in result["experts"]
    ]
    shape = f"{options['hidden']} elements of {options['datatype']}"
    return {
        "group": "Calls",
        "title": f"A mixture of experts, {len(result['ranks'])} ranks, {options['num_experts']} experts",
        "hardware": document["hardware"],
        "columns": [
            *("tokens of a rank", "layout", "dispatch, us", "GB/s", "combine, us", "GB/s"),
            *("even all-to-all, us", "copy engine, GB/s", "NCCL dispatch, us", "NCCL combine, us"),
        ],
        "rows": rows,
        "text": f"A token has {shape} and {options['top_k']} different experts, drawn at random. The tokens of a rank "
        "are the `max_tokens` of its `Experts` object. GB/s are the bytes that cross the links of a GPU, each way. The "
        "even all-to-all is mpicomm's, of as many rows to each rank. Calls are in CUDA graphs, but dispatch and "
        "combine of NCCL are not: there the host waits for the counts. NCCL moves rows that lie by rank already, and "
        "does not sort or add them.",
        "notes": [],
        **{name: document[name] for name in ("command", "versions", "date")},
    }


def _rate(row: dict[str, Any], name: str) -> tuple[float | None, float | None]:
    """Return a time in microseconds, and the rate of the bytes that cross the links."""
    time_us = row[name]
    return (None, None) if time_us is None else (round(time_us, 1), round(row["crossing_nbytes"] / time_us / 1e3, 1))


def _with_ratio(row: dict[str, Any], name: str) -> str | None:
    time_us = row[f"nccl_{name}_us"]
    return None if time_us is None else f"{time_us:.1f} ({time_us / row[f'{name}_us']:.2f})"


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("--hardware", help="default: the GPUs, their links and the processor of the result")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    written = published if "collective" in result else table_of_experts if "experts" in result else table_of_products
    document = written(result, options.hardware)
    write_json(FOLDER / f"{options.name}.json", document)


main()
