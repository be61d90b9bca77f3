"""Write the collective methods of a Communicator from the table of operations.

`python scripts/write_methods.py [--check]` writes the end of each file in ``FILES``, below the line that names this
script. A method that stands above the line, by hand, is not written again. The docstring of a blocking method is the
string below its row, with the order, the algorithms and the errors of all collectives. ``--check`` writes nothing and
exits with 1 if a file differs from the text it would write.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpicomm.collectives import operations
from mpicomm.collectives.operations import OPERATIONS, Operation

FOLDER = Path(__file__).resolve().parents[1] / "mpicomm/api"
MARK = "    # scripts/write_methods.py writes all that follows, from the table of operations.\n"
WIDTH = 120
PARAMETERS = {
    "buf": "buf: Any",
    "sendbuf": "sendbuf: Any",
    "recvbuf": "recvbuf: Any",
    "recvcounts": "recvcounts: Sequence[int] | None = None",
    "op": "op: MPI.Op = MPI.SUM",
    "root": "root: int = 0",
    "info": "info: MPI.Info = MPI.INFO_NULL",
}

KEPT_BY_MPI4PY = ("Allgather", "Alltoall", "Alltoallv", "Bcast")
"""The collectives with nonblocking methods in mpi4py whose requests keep all buffers, on every rank."""


def fold(head: str, items: Sequence[str], tail: str) -> list[str]:
    """Return the lines of ``head``, the items with commas, and ``tail``, broken as ruff breaks them."""
    indent = head[: -len(head.lstrip())]
    joined = ", ".join(items)
    for lines in ([head + joined + tail], [head, f"{indent}    {joined}", indent + tail]):
        if max(map(len, lines)) <= WIDTH:
            return lines
    return [head, *(f"{indent}    {item}," for item in items), indent + tail]


def method(
    row: Operation, name: str, returned: str, doc: str, body: list[str], arguments: Iterable[str] | None = None
) -> str:
    """Return the text of a method; ``arguments`` are by default the arguments of the row."""
    parameters = [PARAMETERS[each] for each in arguments or row.arguments]
    more = ["wire_dtype: Any = None"] * row.coded + ['order: str = "auto"'] * row.tree
    head = fold(
        f"    def {name}(",
        ["self", *parameters, "*", "stream: Any = None", 'algorithm: str = "auto"', *more],
        f") -> {returned}:",
    )
    end = '\n"""' if "\n" in doc else '"""'
    return "\n".join([*head, textwrap.indent(f'"""{doc}{end}', " " * 8), *body]) + "\n"


def row_of(row: Operation) -> str:
    """Return the expression for a row."""
    return f"rows.{row.name.upper()}"


def values(row: Operation) -> list[str]:
    """Return the expressions for the fields of `Arguments`, in its order."""
    buffers = ["None", "buf"] if row.rooted == "bcast" else ["sendbuf", "recvbuf"]
    root = ["root" if row.reduces else "root=root"] * bool(row.rooted)
    return [*buffers, *["op"] * row.reduces, *root, *["counts=recvcounts"] * (row.send == "counted")]


def kept(row: Operation) -> list[str]:
    """Return the expressions for all that a call passes on: `values`, and the codes of its elements."""
    return [*values(row), *["wire=as_wire(wire_dtype)"] * row.coded]


def in_order(row: Operation) -> list[str]:
    """Return the lines that take another operation for another order."""
    taken = f"            op = self._collectives.in_order({row_of(row)}, op, order)"
    return ['        if order != "auto":', taken] * row.tree


def has_shortcut(row: Operation) -> bool:
    """Return whether the blocking and the nonblocking method hand plain arrays to MPI at once."""
    return row.in_mpi and not row.of_neighbors and row.send != "typed"


def plainly(row: Operation, name: str) -> list[str]:
    """Return the lines that ask whether a call of the method is certainly MPI's."""
    # Only the root has both buffers.
    has_both = row.rooted in ("send", "receive")
    given = [*values(row)[:2], *(["op"] if row.reduces else ["None"] * has_both)]
    buffers = ", ".join([*given, *["root"] * has_both])
    conditions = ["stream is None", 'algorithm == "auto"', *["wire_dtype is None"] * row.coded]
    conditions += ["recvcounts is not None"] * (row.send == "counted")
    conditions.append(f'self._plain["{name}"]({buffers})')
    condition = f"        if {' and '.join(conditions)}:"
    if len(condition) <= WIDTH:
        return [condition]
    return [
        "        if (",
        f"            {conditions[0]}",
        *(f"            and {each}" for each in conditions[1:]),
        "        ):",
    ]


def shortcut(row: Operation, name: str) -> list[str]:
    """Return the lines by which the method of that name hands plain arrays to MPI."""
    given = ", ".join(row.arguments)
    call = f"_{name.lower()}(self, {given})"
    # MPI uses the buffers until the request is complete. mpi4py itself keeps the buffers of some calls.
    done = (
        [f"                return {call}"]
        if name == row.name or row.name in KEPT_BY_MPI4PY
        else fold("                return holding(", [call, f"({given})"], ")")
    )
    again = "again" if name == row.name else "start_again"
    return [
        *plainly(row, name),
        f"            begin_by_mpi(self._row, _{row.name.upper()})",
        "            try:",
        *done,
        "            except REFUSALS as error:",
        *fold(f"                return self._collectives.{again}(", ["error", row_of(row), *values(row)], ")"),
    ]


def blocking(row: Operation) -> str:
    """Return the blocking method."""
    run = fold("        return self._collectives.run(", [row_of(row), "stream", "algorithm", *kept(row)], ")")
    return method(
        row,
        row.name,
        "None",
        documentation(row),
        [*in_order(row), *(shortcut(row, row.name) if has_shortcut(row) else []), *run],
    )


def nonblocking(row: Operation) -> str:
    """Return the nonblocking method."""
    start = fold("        return self._collectives.start(", [row_of(row), "stream", "algorithm", *kept(row)], ")")
    body = [*in_order(row), *(shortcut(row, row.nonblocking) if has_shortcut(row) else []), *start]
    doc = f"Start `{row}` with its arguments; return the request. Keep its buffers until ``Wait``."
    return method(row, row.nonblocking, "MPI.Request", doc, body)


def persistent(row: Operation) -> str:
    """Return the persistent method."""
    items = [row_of(row), f"Arguments({', '.join(kept(row))})", "info", "stream", "algorithm"]
    body = [*in_order(row), *fold("        return self._collectives.prepare(", items, ")")]
    arguments = (*row.arguments, "info")
    doc = f"Prepare `{row}` with its arguments; return the request, for ``Start`` and ``Wait``."
    return method(row, row.persistent, "MPI.Prequest", doc, body, arguments)


FORMS = (blocking, nonblocking, persistent)
"""Functions that write methods, in the order of `Operation.methods`."""
FILES = {
    "blocking.py": (False, (blocking,)),
    "nonblocking.py": (False, (nonblocking,)),
    "persistent.py": (False, (persistent,)),
    "neighbors.py": (True, FORMS),
}
"""The files, each with a flag for methods of neighbours, and the forms of its methods."""


@functools.cache
def docstrings() -> dict[str, list[str]]:
    """Return the paragraphs of the string below each row, by the name of the row's variable."""
    found = {}
    for row, below in itertools.pairwise(ast.parse(inspect.getsource(operations)).body):
        match row, below:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text).split("\n\n")
    return found


def documentation(row: Operation) -> str:
    """Return the docstring of the blocking method: its own paragraphs, and before the example what all have."""
    paragraphs = docstrings().get(row.name.upper(), [])
    example = next((number for number, each in enumerate(paragraphs) if is_code(each)), None)
    if example is None:
        raise SystemExit(f"{row} has no docstring with an example below its row")
    names = ["auto", "one_shot", *["two_shot"] * bool(row.two_shot), *["ring"] * bool(row.ring)]
    names += [*["chain"] * bool(row.chain), *["copy_engine"] * bool(row.copies), *["mpi"] * row.in_mpi]
    quoted = [f'"{name}"' for name in names]
    common = (
        "Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the "
        f"current stream of their library. ``algorithm`` is {', '.join(quoted[:-1])} or {quoted[-1]}, the same on all "
        "ranks. Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and "
        "`CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two."
    )
    return filled([*paragraphs[:example], common, *paragraphs[example:]])


def is_code(paragraph: str) -> bool:
    """Return whether a paragraph of a docstring is an example."""
    return paragraph.startswith("    ")


def filled(paragraphs: Iterable[str]) -> str:
    """Return a docstring in lines that fit a method."""
    return "\n\n".join(each if is_code(each) else textwrap.fill(each, WIDTH - 8) for each in paragraphs)


def completed(name: str, text: str) -> str:
    """Return the text of a file with the methods of the table below the line."""
    by_hand, mark, _ = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{name} has no line {MARK.strip()!r}")
    of_neighbors, forms = FILES[name]
    rows = [row for row in OPERATIONS.values() if row.of_neighbors == of_neighbors]
    wanted = [
        (form, row)
        for form, row in itertools.product(forms, rows)
        if f"def {row.methods[FORMS.index(form)]}(" not in by_hand
    ]
    methods = "\n".join(form(row) for form, row in wanted)
    aliases = [
        f'_{name.lower()}, _{row.name.upper()} = MPI.Intracomm.{name}, by_mpi("{row}")\n'
        for form, row in wanted
        if form is not persistent and has_shortcut(row)
        for name in [row.methods[FORMS.index(form)]]
    ]
    return by_hand + mark + "\n" + methods + "".join(["\n\n", *aliases] if aliases else [])


def main() -> int:
    """Write the files, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    options = parser.parse_args()
    differing = False
    for path in (FOLDER / name for name in FILES):
        text = path.read_text()
        wanted = completed(path.name, text)
        if text != wanted:
            differing = True
            if not options.check:
                path.write_text(wanted)
            sys.stdout.write(f"{path}: {'differs from the table' if options.check else 'written'}\n")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
