"""The collective methods of a Communicator. They are made at import from the table of operations.

Each row of `mpicomm.collectives.operations` has a blocking, a nonblocking and a persistent method. Their code is
compiled from text, as the methods of dataclasses are, because a small call on host arrays would take longer through a
general function with ``*arguments``. ``scripts/write_stub.py`` writes their signatures and docstrings into
``collectives.pyi``, for readers and type checkers.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALL, CALLS_BY_MPI
from mpicomm.collectives.call import Arguments
from mpicomm.collectives.operations import ALLREDUCE, BLOCKING, DOCS, NONBLOCKING, PERSISTENT, Operation
from mpicomm.collectives.wire import as_wire
from mpicomm.dispatch.reader import REFUSALS
from mpicomm.epilogues import as_epilogue
from mpicomm.mpi.request_lists import holding

_SCOPE = {
    "Any": Any, "Arguments": Arguments, "MPI": MPI, "REFUSALS": REFUSALS, "Sequence": Sequence,
    "as_epilogue": as_epilogue, "as_wire": as_wire, "holding": holding,
}  # fmt: skip
"""What the text of the methods names, beside ``row`` and ``mpi``, the row and the method of mpi4py."""
_TYPES = {
    "recvcounts": "Sequence[int] | None = None",
    "op": "MPI.Op = MPI.SUM",
    "root": "int = 0",
    "info": "MPI.Info = MPI.INFO_NULL",
}
_RETURNED = "None", "MPI.Request", "MPI.Prequest"
_KEPT_BY_MPI4PY = ("Allgather", "Alltoall", "Alltoallv", "Bcast")
"""The collectives with nonblocking methods in mpi4py whose requests keep all buffers, on every rank."""


class UncompiledMethod:
    """The method ``row.methods[mode]`` of a class, until it is first looked up and compiled.

    To compile all methods at once would take a tenth of the import's time.
    """

    def __init__(self, cls: type, row: Operation, mode: int) -> None:
        self._cls, self._row, self._mode = cls, row, mode

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        cls, row, mode = self._cls, self._row, self._mode
        name = row.methods[mode]
        text, file = "\n".join([f"def {signature(row, mode)}:", *_body(row, mode)]), f"<mpicomm {name}>"
        scope = {**_SCOPE, "row": row, "mpi": getattr(row.mpi_class, name, None), "__name__": cls.__module__}
        exec(compile(text, file, "exec"), scope)
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # tracebacks show the lines
        method: Any = scope[name]
        method.__qualname__ = f"{cls.__name__}.{name}"
        method.__doc__ = documentation(row, mode)
        setattr(cls, name, method)
        return method.__get__(instance, owner)


def signature(row: Operation, mode: int, join: Callable[[list[str]], str] = ", ".join) -> str:
    """Return the name, the parameters and the type of the result of a method. ``join`` joins the parameters."""
    names = [*row.arguments, *["info"] * (mode == PERSISTENT)]
    parameters = ["self", *(f"{name}: {_TYPES.get(name, 'Any')}" for name in names)]
    parameters += ["*", "stream: Any = None", 'algorithm: str = "auto"']
    parameters += ["epilogue: Any = None"] * (row is ALLREDUCE) + ["wire_dtype: Any = None"] * row.quantizable
    parameters += ['order: str = "auto"'] * row.tree
    parameters += ["**operands: Any"] * (row is ALLREDUCE)
    return f"{row.methods[mode]}({join(parameters)}) -> {_RETURNED[mode]}"


def _body(row: Operation, mode: int) -> list[str]:
    """Return the lines of a method."""
    send, receive = ("None", "buf") if row.rooted == "bcast" else ("sendbuf", "recvbuf")
    op, root = "op" if row.reduces else "None", "root" if row.rooted else "0"
    fields = ", ".join([send, receive, op, root, "recvcounts" if row.send == "by_recvcounts" else "None"])
    given_options, epilogue = ["wire_dtype is not None"] * row.quantizable, "None"
    if row is ALLREDUCE:
        given_options += ["epilogue is not None", "operands"]
        epilogue = "as_epilogue(epilogue, operands)"
    with_options = f"{fields}, {epilogue}, {'as_wire(wire_dtype)' if row.quantizable else 'None'}"
    lines = ["    if order != 'auto':", "        op = self._collectives.ordered_op(row, op, order)"] * row.tree
    if mode == PERSISTENT:
        prepare = f"self._collectives.prepare(row, Arguments({with_options}), info, stream, algorithm)"
        return [*lines, f"    return {prepare}"]
    run = f"self._collectives.{('run', 'start')[mode]}(row, stream, algorithm, "
    if given_options:
        lines += [f"    if {' or '.join(given_options)}:", f"        return {run}({with_options}))"]
    if not row.of_neighbors and row.send != "typed":
        # Plain NumPy arrays go to MPI at once. Only a rooted call has to say which rank has both buffers.
        has_both = row.rooted in ("send", "receive")
        checked = ", ".join([send, receive, *[op] * (row.reduces or has_both), *[root] * has_both])
        has_recvcounts = " and recvcounts is not None" * (row.send == "by_recvcounts")
        given = ", ".join(row.arguments)
        call = f"mpi({('self', 'self._nonblocking_comm')[mode]}, {given})"
        if mode == NONBLOCKING and row.name not in _KEPT_BY_MPI4PY:
            call = f"holding({call}, ({given}))"  # MPI uses the buffers until the request is complete
        name = row.methods[mode]
        lines += [
            f"    if stream is None and algorithm == 'auto'{has_recvcounts} and self._fast_path[{name!r}]({checked}):",
            "        words = self._row",  # as `begin_mpi_call`, without the time of a call
            f"        words[{CALLS_BY_MPI}] += 1",
            f"        words[{CALL}] = {row.number}",
            "        try:",
            f"            return {call}",
            "        except REFUSALS as error:",
            f"            return self._collectives.retry(error, row, Arguments({fields}), {mode})",
        ]
    return [*lines, f"    return {run}({fields}, None, None))"]


def documentation(row: Operation, mode: int) -> str:
    """Return the docstring of a method, in paragraphs, from the text below the row.

    The example of the blocking method ends with its call, from which the examples of the other methods are made.
    """
    paragraphs = DOCS[row].rstrip().split("\n\n")
    at = next(number for number, each in enumerate(paragraphs) if each.startswith("    "))
    if mode == BLOCKING:
        algorithms = ["auto", "one_shot", *["two_shot"] * bool(row.two_shot), *["ring"] * bool(row.ring)]
        algorithms += [*["chain"] * bool(row.chain), *["copy_engine"] * bool(row.copies), "mpi"]
        *first, last = (f'"{name}"' for name in algorithms)
        return "\n\n".join([*paragraphs[:at], _COMMON.format(f"{', '.join(first)} or {last}"), *paragraphs[at:]])
    *before, call = paragraphs[at].splitlines()
    indent = call[: -len(call.lstrip())]
    example = [*before, f"{indent}request = {call.strip().replace(row.name, row.methods[mode], 1)}"]
    if mode == NONBLOCKING:
        summary = f"Start `{row}` with its arguments; return the request."
        more = "Keep the buffers until ``Wait``. Later work on the stream of device arrays finds the result without it."
        example += [f"{indent}request.Wait()"]
    else:
        summary = f"Prepare `{row}` with its arguments; return the request."
        more = "Each ``Start`` and ``Wait`` carries the call out. ``Free`` releases the request."
        example += [f"{indent}for _ in range(3):", f"{indent}    request.Start()", f"{indent}    request.Wait()"]
        example += [f"{indent}request.Free()"]
    return "\n".join([summary, "", more, "", *example])


_COMMON = """\
Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the current stream
of their library. ``algorithm`` is {}, the same on all ranks.
Raises `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and `CollectiveTimeoutError`
if one does not come; on device arrays `check` or the next call raises the last two."""
