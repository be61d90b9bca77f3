"""Calls that every rank refuses before anything moves: one table for all collectives and all their arguments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, Op
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.epilogues import fp8, layer_norm, rms_norm
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import OPS, REDUCTIONS, legal_ops, require_works
from tests.helpers.inputs.random_collectives import known
from tests.helpers.references.reductions import OWN, dtype_named

LARGE = 1 << 20  # elements: mapped memory in any case
PAIRS = MPI.FLOAT.Create_contiguous(2).Commit()  # as long as the process
MAPPED = ("Allreduce", "Reduce", "Scan")  # in host memory; MPI carries out the others of any size
FREED = Op("a - b - 1")
FREED.Free()

Row = tuple[type[Exception], str, str, tuple[Any, ...], dict[str, Any]]
Table = Callable[[Any, int, int], list[Row]]


def row(text: str, *given: Any, to: str = "Allreduce", error: type[Exception] = InvalidUsageError, **how: Any) -> Row:
    """Return a call ``to`` an operation, and its error, which matches ``text``."""
    return error, text, to, given, how


def ones(xp: Any, count: int, name: str = "float32") -> Any:
    return Placed(xp, np.ones(count, dtype_named(name))).array


def arguments(xp: Any, size: int, n: int) -> list[Row]:
    x, y, double, longer = ones(xp, n), ones(xp, n), ones(xp, n, "float64"), ones(xp, n + 1)
    host, half = np.ones(n, np.float32), [ones(xp, n, "bfloat16"), "bfloat16"]
    lacks, scatter = 'algorithm="mpi": MPI has no type for the bfloat16 of ', partial(row, to="Reduce_scatter")
    of_device = [("Allreduce", (x, y), "copy_engine"), ("Bcast", (x,), "chain"), ("Reduce", (x, y), "chain")]
    return [
        *(row("is for device arrays", *given, to=to, algorithm=a) for to, given, a in of_device if xp is np),
        row("element types differ: sendbuf float32 and recvbuf float64", x, double),
        row(f"sendbuf holds {n} .* recvbuf has room for {n + 1}", x, longer),
        row(f"sendbuf holds {n - 1}", [x, n - 1], y, to="Scan"),
        row("sendbuf holds", x, [x, 0], to="Allgather"),
        row("elements 0 to .* are asked for", [x, n + 1], y),
        row("the buffer holds 0: pass a larger buffer", [MPI.memory.fromaddress(0, 0), 3, MPI.FLOAT], y),
        row("count -1 is negative", [x, -1], to="Bcast"),
        row(f"root={size} is no rank: use 0 to {size - 1}", x, to="Bcast", root=size),
        row("root=-1 is no rank", x, y, to="Reduce", root=-1),
        row("'ring-a-ring' is unknown", x, y, algorithm="ring-a-ring"),
        row("two_shot.* is for .*, not Scan", x, y, to="Scan", algorithm="two_shot"),
        row("is for Bcast, Reduce, not Allreduce", x, y, algorithm="chain"),
        row("ring cannot average", x, y, mpicomm.AVG, algorithm="ring"),
        row(r'"ring" of Allreduce: .* does not commute: use "two_shot"', x, y, Op("a - b"), algorithm="ring"),
        scatter("recvcounts is needed", MPI.IN_PLACE, x),
        *(scatter("recvcounts", MPI.IN_PLACE, x, counts) for counts in ([1] * (size - 1), [n] * (size + 1))),
        row("recvbuf=.*IN_PLACE.* has no meaning", x, MPI.IN_PLACE),
        *(row("stream=", MPI.IN_PLACE, x, stream=bad) for bad in ("default", -1, True, 1.5)),
        *(row("stream=5 is for device arrays", each, each.copy(), stream=5) for each in (host, host.astype("f2"))),
        *(row(f"{lacks}{name}", half, half, to=name, algorithm="mpi") for name in ("Allreduce", "Scan")),
        row("MPI has no AVG for Allreduce", double, ones(xp, n, "float64"), mpicomm.AVG, algorithm="mpi"),
        row("op='a & b' is not defined for float32: & is for bool, integer", x, y, Op("a & b")),
        row("'a - b'.* is for plain element types", [x, n // 2, PAIRS], [y, n // 2, PAIRS], Op("a - b")),
        row("'a - b - 1'.* was freed: make another", x, y, FREED),
    ]


def overlaps(xp: Any, size: int, n: int) -> list[Row]:
    """MPI must not get them: what it does then is undefined."""
    whole, root = ones(xp, 2 * n * size + 1), {"root": MPI.COMM_WORLD.rank}  # at a root both buffers count
    one, many, within = whole[: n + 1], whole[: n * size], whole[n * size - n : n * size]
    shifted, every = whole[1 : n + 2], whole[n * size - 1 : 2 * n * size - 1]
    calls: list[tuple[str, Any, Any, dict[str, Any]]] = [
        *((name, one, shifted, root if name == "Reduce" else {}) for name in ("Allreduce", "Reduce", "Scan", "Exscan")),
        *((name, within, many, {}) for name in ("Allgather", "Allgatherv")),
        *((name, within, many, root) for name in ("Gather", "Gatherv")),
        *((name, many, within, root) for name in ("Scatter", "Scatterv")),
        *((name, many, every, {}) for name in ("Alltoall", "Alltoallv")),
    ]
    if size > 1:  # else they are the same memory
        calls += [("Reduce_scatter_block", many, within, {})]
        calls += [("Reduce_scatter", many, within, {"recvcounts": [n] * size})]
    return [row("sendbuf and recvbuf overlap", send, receive, to=name, **how) for name, send, receive, how in calls]


def reductions(xp: Any, size: int, n: int) -> list[Row]:
    rows = []
    for name, op in itertools.product(known(COVERED), OPS):
        if op in legal_ops(name) or op == "a and (not b)":  # which is defined for all types
            continue
        to = REDUCTIONS[len(name + op) % len(REDUCTIONS)]
        how: dict[str, Any] = {"recvcounts": [n // size] * size} if to == "Reduce_scatter" else {}
        said = re.escape(f"op={repr(op) if op in OWN else op} is not defined for {name}")
        part = n // size if "scatter" in to else n
        rows.append(
            row(said, ones(xp, n, name), [ones(xp, n, name), part], to=to, op=OPS[op], algorithm="one_shot", **how)
        )
    return rows


def types(xp: Any, size: int, n: int) -> list[Row]:
    y, bad_type = ones(xp, n), partial(row, algorithm="one_shot", error=TypeError)
    counts: list[Any] = [5, ["x"], [1.5]]
    text = [re.escape(f"Reduce_scatter: recvcounts={each!r}: pass a sequence of") for each in counts]
    roots: list[Any] = [None, "0", [0], 0.5]
    said = [re.escape(f"Bcast: root={root!r} is no rank: pass an integer from 0 to ") for root in roots]
    return [
        *(bad_type(".", bad, y) for bad in (3, "text", object(), {})),
        bad_type("op=", MPI.IN_PLACE, y, op="sum"),
        *(bad_type(each, y, to="Bcast", root=root) for each, root in zip(said, roots, strict=True)),
        *(bad_type(each, y.copy(), y, bad, to="Reduce_scatter") for each, bad in zip(text, counts, strict=True)),
    ]


def epilogues(xp: Any, size: int, n: int) -> list[Row]:
    n = 8
    x, y, few, whole = xp.ones(n, xp.float32), xp.ones(n, xp.float32), xp.ones(7, xp.float32), xp.ones(n, xp.int32)
    nine, many, of_type = dict.fromkeys("abcdefghj", 1), "v + " * 25_000, {"error": TypeError}
    wide, fp8_text = (
        "may need more than 64 bits",
        r"^Allreduce: epilogue=fp8\(..., dtype='float8_e4m3fn'\): recvbuf has ",
    )
    calls: list[tuple[str, Any, dict[str, Any]]] = [
        ("few has 7 elements, and its index goes from 0 to 7 for 8", "v + few[i]", {"few": few}),
        ("goes from -1 to 6", "v + few[i - 1]", {"few": few}),
        (wide, f"v + few[i * {2**62} // {2**62}]", {"few": few}),
        (wide, "v + few[i * n // n]", {"few": few, "n": 2**62}),
        ("'b' is no name here: use v, i", "v + b", {}),
        ("'v' is no name here: use i", "v + few[v]", {"few": few}),
        ("out overlaps recvbuf: copy one", "v + out[i]", {"out": y}),
        ("x is a str, which has neither", "v + x[i]", {"x": "text", **of_type}),
        ("few: count -1 is negative", "v + few[i]", {"few": [few, -1, "f"], "error": MPI.Exception}),
        ("the operand sqrt has a name that means", "v", {"sqrt": 3}),
        ("has 9 operands: pass up to 8", "v", nine),
        ("^Allreduce: epilogue='v' does not use the operand extra: leave", "v", {"extra": 3}),
        ("does not use the operand few: leave it out", "v * k", {"k": 2, "few": few}),
        (r"^epilogue='(v \+ ){20}'\.\.\.: it has \d+ letters", many, {}),
        ("epilogue=3 is no epilogue: pass an expression", 3, of_type),
        ("scale: operands are for an expression", fp8(1.0), {"scale": 2, **of_type}),
        ("scale: no argument of the call has this name", None, {"scale": 2, **of_type}),
    ]
    if xp is not np:
        calls.append(("x is not on the device of recvbuf", "v + x[i]", {"x": np.ones(n)}))
        calls.append(("MPI applies no epilogue to device arrays", "v", {"algorithm": "mpi"}))
    eight = known(("float16", "float8_e5m2")) if known(("float8_e4m3fn",)) else []
    return [
        *(row(text, x, y, epilogue=epilogue, **how) for text, epilogue, how in calls),
        row("recvbuf has int32 for results of float32: pass one of float", x, whole, epilogue="v"),
        row("n is float: convert it", whole, whole.copy(), epilogue="v * n", n=0.5),
        *(row(f"{fp8_text}{name}", x, ones(xp, n, name), epilogue=fp8(2.0)) for name in ("float32", *eight)),
    ]


def norms(xp: Any, size: int, n: int) -> list[Row]:
    x, y, residual, weight = (xp.ones(count, xp.float32) for count in (12, 12, 12, 4))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("residual has 4 elements of float32: pass 12 of float32", (weight, weight)),
        ("residual has 12 elements of float64: pass 12 of float32", (residual.astype(xp.float64), weight)),
        ("weight has 5 elements, and the 12 of the result make no rows", (residual, xp.ones(5, xp.float32))),
        ("weight has elements of int32: pass floats", (residual, xp.ones(4, xp.int32))),
        ("residual and weight overlap", (residual, residual[:4])),
        ("residual overlaps recvbuf", (y, weight)),
        ("residual overlaps sendbuf", (x, weight)),
    ]
    rows = [row(text, x, y, epilogue=rms_norm(*operands)) for text, operands in calls]
    if not known(("float8_e4m3fn",)):
        return rows
    send, residual, weight = xp.ones(128, xp.float32), xp.ones(128, xp.float32), xp.ones(64, xp.float32)
    eight, four, plain = ones(xp, 128, "float8_e4m3fn"), xp.zeros(64, xp.uint8), xp.zeros(128, xp.float32)
    few, bytes_ = xp.zeros(3, xp.float32), xp.zeros(4, xp.uint8)
    linear = "scales has 3 elements of float32 in the layout linear, for 2 rows of 64 .* 8 for each 16"
    tiles = "layout 128x4, for 2 rows of 64 elements: pass 512 for each 32"
    more: list[tuple[str, Any, dict[str, Any]]] = [
        ("scales is for quantized results, and recvbuf has float32: pass float8_e4m3fn", plain, {"scales": few}),
        ("scale is for quantized results, and recvbuf has float32", plain, {"scale": 2.0}),
        (linear, eight, {"scales": few}),
        (tiles, eight, {"scales": bytes_, "scale_layout": "128x4"}),
        ("scales has elements of int32: pass float32", eight, {"scales": xp.zeros(4, xp.int32)}),
        ("scale has 3 elements of float32: pass a number", eight, {"scale": few}),
        ("bias has 3 elements of float32: pass 64 of float32, as a row has", plain, {"linear_bias": few}),
        ("scales overlaps recvbuf: copy one", four, {"scales": four[:4]}),
        ("sendbuf holds 128 elements, but recvbuf has room for 64", four, {"scale": 2.0}),
    ]
    return rows + [row(text, send, out, epilogue=rms_norm(residual, weight, **how)) for text, out, how in more]


def orders(xp: Any, size: int, n: int) -> list[Row]:
    x, y, double = ones(xp, 4), ones(xp, 4), np.zeros(4, np.longdouble)
    unequal = f"{size} ranks cannot hold 64 leaves in equal blocks: use 1, 2, 4, ..."
    calls: list[tuple[str, dict[str, Any]]] = [
        ("is for op=MPI.SUM, and op is max", {"op": MPI.MAX}),
        ("and op is avg", {"op": mpicomm.AVG}),
        ('MPI has no order="tree"', {"algorithm": "mpi"}),
        ("the ring is no tree", {"algorithm": "ring"}),
        ("and op is tree", {"wire_dtype": "int8"}),
    ]
    rows = [row(text, x, y, order="tree", **how) for text, how in calls]
    rows.append(row("equal blocks" if 64 % size else 'has no order="tree"', double, double.copy(), order="tree"))
    wrong = row('order=\'rank\' of Allreduce: use "auto" or "tree"', x, y, order="rank")
    return [wrong, *([row(unequal, x, y, order="tree"), rows[-1]] if 64 % size else rows)]


def wires(xp: Any, size: int, n: int) -> list[Row]:
    x, y, whole = xp.ones(8, xp.float32), xp.zeros(8, xp.float32), xp.ones(8, xp.int32)
    of_wire = r'wire_dtype="int8" is for elements of float32, float16, bfloat16, and these are int32'
    rows = [
        row(f"Allreduce: {of_wire}", whole, whole.copy(), wire_dtype="int8"),
        row("and these are float64", x.astype("f8"), y.astype("f8"), wire_dtype="int8"),
        row("is for SUM and AVG, and op is max", x, y, MPI.MAX, wire_dtype="int8"),
        *(
            row(rf"^wire_dtype={re.escape(repr(bad))}", x, y, wire_dtype=bad)
            for bad in ("int4", ("int8", "float8_e4m3fn"))
        ),
        *(
            row(f'algorithm="{name}" of Allreduce does not support wire_dtype', x, y, algorithm=name, wire_dtype="int8")
            for name in ("mpi", "ring")
        ),
        row("derived datatype and no epilogue", x, y, epilogue="v", wire_dtype="int8"),
    ]
    wide = xp.zeros(16 * size, xp.float16)
    return [*rows, row("is for two buffers of one element type", x, wide, to="Allgather", wire_dtype="int8")]


WAYS: list[tuple[Table, str]] = [
    *((arguments, way) for way in ("one_shot", "large", "nonblocking", "persistent")),
    *((overlaps, way) for way in ("blocking", "large", "nonblocking", "persistent")),
    *((table, "blocking") for table in (reductions, epilogues, norms, orders, wires, types)),
]


@pytest.mark.parametrize(("table", "way"), WAYS, ids=lambda each: getattr(each, "__name__", each))
def test_a_call_is_refused(comm: mpicomm.Communicator, xp: Any, table: Table, way: str) -> None:
    count = LARGE if way == "large" else 4 * comm.size
    for error, text, operation, given, how in table(xp, comm.size, count):
        if way == "one_shot":
            if "algorithm" in how:
                continue
            how["algorithm"] = way
        if way == "large" and table is arguments and xp is np and (comm.size == 1 or operation not in MAPPED):
            continue
        row_of = OPERATIONS[operation]
        method = {"nonblocking": row_of.nonblocking, "persistent": row_of.methods[2]}.get(way, row_of.name)
        try:
            with pytest.raises(error, match=text):
                getattr(comm, method)(*given, **how)
        except BaseException as failed:
            raise AssertionError(f"{operation}, {text}: {type(failed).__name__}: {failed}") from failed
    require_works(comm, xp)


def test_operands_that_no_call_takes() -> None:
    residual, weight = np.ones(12, np.float32), np.ones(4, np.float32)
    makers: list[tuple[str, Callable[[], Any]]] = [
        (
            "scale_layout='128x4' of layer_norm is for scales",
            lambda: layer_norm(residual, weight, scale_layout="128x4"),
        ),
        (
            "scale_layout='rows' of rms_norm: use one of linear, 128x4",
            lambda: rms_norm(residual, weight, scale_layout="rows"),  # type: ignore[arg-type]
        ),
        ("eps=-1 of rms_norm is no small number", lambda: rms_norm(residual, weight, -1)),
        ("dtype='float32' is no fp8 type", lambda: fp8(1.0, "float32")),
    ]
    for text, make in makers:
        with pytest.raises(InvalidUsageError, match=text):
            make()
