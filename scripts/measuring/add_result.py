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


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("name")
    parser.add_argument("--hardware", help="default: the GPUs, their links and the processor of the result")
    options = parser.parse_args()
    document = published(json.loads(options.result.read_text()), options.hardware)
    write_json(FOLDER / f"{options.name}.json", document)


main()
