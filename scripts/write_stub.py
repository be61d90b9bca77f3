"""Write mpicomm/api/collectives.pyi, which tells readers and type checkers the methods that are made at import.

`python scripts/write_stub.py [--check]`. ``--check`` writes nothing and exits with 1 if the file differs.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

from mpicomm.api import collectives
from mpicomm.api.methods import documentation, signature
from mpicomm.collectives.operations import OPERATIONS, Operation

PATH = Path(collectives.__file__).with_suffix(".pyi")
WIDTH = 120
IMPORTS = """\
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
"""
CLASSES = (
    (collectives.BlockingCollectives, "MPI.Intracomm", (0,)),
    (collectives.NonblockingCollectives, "MPI.Intracomm", (1,)),
    (collectives.PersistentCollectives, "MPI.Intracomm", (2,)),
    (collectives.NeighborCollectives, "MPI.Topocomm", (0, 1, 2)),
)
"""The classes, their bases, and the modes of their methods: see `Operation.methods`."""


def method(row: Operation, mode: int) -> str:
    """Return a method with its docstring, broken as ruff breaks it."""
    for join in (", ".join, lambda each: f"\n        {', '.join(each)}\n    ", lambda each: exploded(each)):
        first = f"    def {signature(row, mode, join)}:"
        if max(map(len, first.splitlines())) <= WIDTH:
            break
    return f"{first}\n{docstring(documentation(row, mode), 8)}\n"


def exploded(parameters: list[str]) -> str:
    """Return parameters in a line each."""
    return "".join(f"\n        {each}," for each in parameters) + "\n    "


def docstring(text: str, indent: int) -> str:
    """Return a docstring whose paragraphs have lines of the right length."""
    width, paragraphs = WIDTH - indent, text.split("\n\n")
    filled = [each if max(map(len, each.splitlines())) <= width else textwrap.fill(each, width) for each in paragraphs]
    end = '\n"""' if "\n" in text else '"""'
    return textwrap.indent('"""' + "\n\n".join(filled) + end, " " * indent)


def stub() -> str:
    """Return the text of the file."""
    parts = [f'"""{collectives.__doc__}"""\n\n{IMPORTS}']
    for cls, base, modes in CLASSES:
        methods = [
            method(row, mode)
            for mode in modes
            for row in OPERATIONS.values()
            if row.of_neighbors == (cls is collectives.NeighborCollectives)
        ]
        if modes == (0,):
            barrier = docstring(inspect.getdoc(collectives.BlockingCollectives.Barrier) or "", 8)
            methods.insert(0, f"    def Barrier(self, *, stream: Any = None) -> None:\n{barrier}\n")
        text = docstring(inspect.getdoc(cls) or "", 4)
        parts.append("\n".join([f"class {cls.__name__}({base}):\n{text}\n", *methods]))
    return "\n".join(parts)


def main() -> int:
    """Write the file, or compare it; return the exit status."""
    written = stub()
    if PATH.exists() and PATH.read_text() == written:
        return 0
    if "--check" in sys.argv:
        sys.stdout.write(f"{PATH}: differs from the table: run python scripts/write_stub.py\n")
        return 1
    PATH.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
