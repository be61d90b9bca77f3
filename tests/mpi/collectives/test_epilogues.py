"""Reductions with an epilogue, quantized or in a promised order: the same bits by every algorithm."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.epilogues import fp8, layer_norm, rms_norm
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import REDUCTIONS, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import Array, dtype_or_skip, quantized_sum, reduced, require_same
from tests.helpers.rigs.communicators import FORMS, array_module, complete, groups_on, method_name, on_hosts, to_host

COUNTS = (5, 3001, 70_001)


def part(rank: int, count: int, name: str = "float32") -> Array:
    # Sums of these are exact, so MPI, which adds small host arrays in another order, has the same bits.
    numbers = np.random.default_rng([rank, count]).integers(-3, 4, count)
    return numbers.astype(np.float32).astype(dtype_or_skip(name))


def total(comm: mpicomm.Communicator, count: int, name: str = "float32") -> Array:
    return reduced("sum", [part(rank, count, name) for rank in range(comm.size)])


def algorithms(comm: mpicomm.Communicator) -> tuple[str, ...]:
    return ("auto", "one_shot", "two_shot", "ring", *(("copy_engine",) if comm.device != "cpu" else ()))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_every_algorithm_has_the_same_bits_in_every_form_of_call(
    comm: mpicomm.Communicator, xp: Any, name: str
) -> None:
    rows = Placed(xp, np.linspace(-1, 1, 7).astype(np.float32))
    for count in COUNTS:
        bias = Placed(xp, np.random.default_rng(count).standard_normal(count).astype(dtype_or_skip(name)))
        wide = np.float64 if name == "float64" else np.float32
        n, i = wide(0.1), np.arange(count)
        expected = total(comm, count, name).astype(wide) * n + bias.get().astype(wide)
        expected = (expected - rows.get().astype(wide)[i % 7] * i.astype(wide)).astype(dtype_or_skip(name))
        send = Placed(xp, part(comm.rank, count, name))
        for algorithm in algorithms(comm):
            for receive in (Placed(xp, np.zeros_like(expected)), Placed(xp, part(comm.rank, count, name))):
                before = receive.get()
                in_place = bool(before.any())
                for form in ("{}", *FORMS):  # known calls take a shorter way
                    receive.set(before)
                    call = getattr(comm, method_name(form, "Allreduce"))(
                        MPI.IN_PLACE if in_place else send.array,
                        receive.array,
                        algorithm=algorithm,
                        epilogue="v * n + bias[i] - rows[i % k] * i",
                        n=0.1,
                        k=7,
                        bias=bias.array,
                        rows=rows.array,
                    )
                    complete(call)
                    comm.check()
                    require_same(receive.get(), expected)


@pytest.mark.parametrize(("name", "result"), [("float32", "float8_e4m3fn"), ("bfloat16", "float8_e5m2")])
def test_conversion_to_fp8(comm: mpicomm.Communicator, xp: Any, name: str, result: str) -> None:
    dtype = dtype_or_skip(result)
    limit = np.float32(448 if result == "float8_e4m3fn" else 57344)
    for count, algorithm in ((5, "auto"), (3001, "one_shot"), (3001, "two_shot"), (70_001, "auto")):
        send, receive = Placed(xp, part(comm.rank, count, name)), Placed(xp, np.zeros(count, dtype))
        expected = np.clip(total(comm, count, name).astype(np.float32) * np.float32(1e4), -limit, limit).astype(dtype)
        for scale in (1e4, xp.full(1, 1e4, xp.float32)):
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, epilogue=fp8(scale, result))
            comm.check()
            require_same(receive.get(), expected)


@pytest.mark.parametrize(
    ("name", "hidden", "layer"), [("float32", 40, False), ("bfloat16", 40, False), ("float32", 48, True)]
)
def test_norms(comm: mpicomm.Communicator, xp: Any, name: str, hidden: int, layer: int) -> None:
    """Of rows with a residual; a layer norm has biases, too."""
    dtype, rng = dtype_or_skip(name), np.random.default_rng(hidden)
    weight, bias, linear = (rng.standard_normal(hidden).astype(np.float32) for _ in range(3))
    ways = ((5, "auto"), (7, "one_shot"), (301, "one_shot"), (101, "two_shot"), (4_000, "auto"))
    for count, algorithm in ((rows * hidden, algorithm) for rows, algorithm in ways):
        old = (100 * layer + rng.standard_normal(count)).astype(dtype)
        sums = total(comm, count, name).astype(np.float32)
        h = ((sums + np.tile(linear, count // hidden) if layer else sums) + old.astype(np.float32)).astype(dtype)
        rows = h.astype(np.float64).reshape(-1, hidden)
        rows -= rows.mean(axis=1, keepdims=True) * layer
        expected = rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + 1e-5) * weight + bias * layer
        residual, send, receive, scale = (
            Placed(xp, each) for each in (old, part(comm.rank, count, name), np.zeros_like(h), weight)
        )
        for _ in range(2):  # a known call takes a shorter way
            residual.set(old)
            epilogue = rms_norm(residual.array, scale.array, 1e-5)
            if layer:
                epilogue = layer_norm(residual.array, scale.array, xp.asarray(bias), linear_bias=xp.asarray(linear))
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, epilogue=epilogue)
            comm.check()
            require_same(residual.get(), h)
            result = receive.get()
            rtol = 1e-5 if name == "float32" else 0.01
            assert np.allclose(result.astype(np.float64), expected.ravel(), rtol, atol=1e-8 + 1e-4 * layer)
            assert len(set(comm.allgather(zlib.crc32(result.tobytes())))) == 1


@pytest.mark.parametrize(
    ("result", "kind", "group", "error"),
    [
        ("float8_e4m3fn", "float32", 0, 2**-4),
        ("float8_e4m3fn", "float32", 128, 2**-4),
        ("float8_e5m2", "uint8", 32, 2**-3),
        ("uint8", "float8_e4m3fn", 16, 0.25),
    ],
)
def test_quantized_norms_with_scales(
    comm: mpicomm.Communicator, xp: Any, result: str, kind: str, group: int, error: float
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    hidden, rng, global_scale = 256, np.random.default_rng(3), 300.0
    weight = rng.standard_normal(hidden).astype(np.float32)
    for rows, algorithm in ((3, "auto"), (77, "one_shot"), (77, "two_shot")):
        count = rows * hidden
        old = rng.standard_normal(count).astype(np.float32)
        h = (total(comm, count) + old).astype(np.float64).reshape(rows, hidden)
        expected = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-6) * weight * global_scale
        four = result == "uint8"
        receive = Placed(xp, np.zeros(count // (2 if four else 1), dtype_or_skip(result)))
        scales = Placed(xp, np.zeros(count // (group or hidden), dtype_or_skip(kind)))
        residual, send = xp.asarray(old), xp.asarray(part(comm.rank, count))
        epilogue = rms_norm(residual, xp.asarray(weight), scales=scales.array, scale=global_scale)
        comm.Allreduce(send, receive.array, algorithm=algorithm, epilogue=epilogue)
        comm.check()
        made, factors = receive.get(), scales.get()
        assert len(set(comm.allgather(zlib.crc32(made.tobytes() + factors.tobytes())))) == 1
        if four:
            made = np.stack([made & 15, made >> 4], axis=1).view(ml_dtypes.float4_e2m1fn)
        if kind == "uint8":
            factors = factors.view(ml_dtypes.float8_e8m0fnu)
        shape = -1, group or hidden
        values = made.astype(np.float64).reshape(shape) * factors.astype(np.float64)[:, None]
        peaks = np.abs(expected).reshape(shape).max(axis=1, keepdims=True)
        assert (np.abs(values - expected.reshape(shape)) <= error * peaks).all()
        assert (np.abs(factors.astype(np.float64)[:, None]) > peaks / 1e5).all()


WIRE_DTYPES = ("float8_e4m3fn", "int8")


@pytest.mark.gpu_alone  # graphs are CUDA's
def test_a_graph_is_replayed(comm: mpicomm.Communicator, xp: Any) -> None:
    for count in (3001, 700_001):
        given = [np.random.default_rng([rank, count]).standard_normal(count, np.float32) for rank in range(comm.size)]
        total = given[0] if comm.size == 1 else quantized_sum(given, "int8", "sum", results=True)
        send, receive = xp.asarray(given[comm.rank]), xp.zeros(count, xp.float32)
        stream = xp.cuda.Stream(non_blocking=True)
        with stream:
            comm.Allreduce(send, receive, wire_dtype="int8")  # the first call sets up memory
            stream.synchronize()
            stream.begin_capture()
            for algorithm in ("one_shot", "two_shot", "auto"):
                comm.Allreduce(send, receive, algorithm=algorithm, wire_dtype="int8")
            graph = stream.end_capture()
            for turn in range(1, 4):
                send *= 0 if turn == 2 else 1
                receive[...] = -1
                graph.launch(stream)
                stream.synchronize()
                comm.check()
                assert np.array_equal(receive.get(), total if turn == 1 else np.zeros(count, np.float32))


def test_a_block_with_a_nan_or_an_infinity_is_nan_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    content = np.ones(1000, np.float32)
    if comm.rank == comm.size - 1:
        content[[130, 700]] = np.nan, -np.inf
    content[384:512] = 3e38  # the sum exceeds float32
    send, receive = Placed(xp, content), Placed(xp, np.zeros_like(content))
    expected = np.full(1000, comm.size, np.float32)
    expected[128:256] = expected[384:512] = expected[640:768] = np.nan
    for wire_dtype in WIRE_DTYPES:
        for algorithm in ("one_shot", "two_shot"):
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, wire_dtype=wire_dtype)
            comm.check()
            got = receive.get()
            assert np.array_equal(np.isnan(got), np.isnan(expected))
            assert np.allclose(got[~np.isnan(got)], comm.size, rtol=1 / 16)


WORLD = MPI.COMM_WORLD
LEAVES = 8
SIZES = [size for size in (1, 2, 4, 8) if size <= WORLD.size]
COUNTS_OF_LEAVES = (1, 1000, 300_001)  # the last one goes through mapped memory without order=, too


def leaves_of(dtype: np.dtype[Any], count: int, seed: int = 0) -> list[Any]:
    """Leaves whose sum depends on the order, the same on all ranks."""
    rng = np.random.default_rng([seed, count])
    shape = (LEAVES, count)
    if dtype.kind in "iu":
        return list(rng.integers(-100, 100, shape).astype(dtype))
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return list((values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype))


def few(device: str, size: int, leaves: int = LEAVES) -> mpicomm.Communicator | None:
    """Return a Communicator of the first ranks; None on the others. Collective."""
    part = WORLD.Split(int(WORLD.rank >= size), WORLD.rank)
    try:
        if WORLD.rank >= size:
            return None
        chosen: Any = "cpu" if device == "cpu" else "auto"
        assert isinstance(part, MPI.Intracomm)
        return mpicomm.Communicator(part, device=chosen, timeout_s=stretched(20), leaves=leaves)
    finally:
        part.Free()


def own_sum(comm: mpicomm.Communicator, xp: Any, leaves: list[Any]) -> Any:
    own = comm.leaves // comm.size
    return mpicomm.tree_sum(xp.asarray(np.stack(leaves[comm.rank * own : (comm.rank + 1) * own])))


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "int16"])
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_gets_the_same_bits(device: str, size: int, name: str) -> None:
    comm = few(device, size)
    if comm is None:
        return
    dtype = np.dtype(name)
    with comm, array_module(comm) as xp:
        assert comm.leaves == LEAVES
        for seed, count in enumerate(COUNTS_OF_LEAVES):
            leaves = leaves_of(dtype, count, seed)
            expected, mine, made = reduced("tree", leaves), own_sum(comm, xp, leaves), xp.zeros(count, dtype)
            for algorithm in ("auto", "one_shot", "two_shot"):
                made[:] = 0
                comm.Allreduce(mine, made, order="tree", algorithm=algorithm)
                require_same(to_host(made), expected)
        comm.check()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_narrow_leaves_are_rounded_once(device: str, size: int, name: str) -> None:
    dtype = dtype_or_skip(name)
    if device != "cpu" and name != "float16":
        pytest.skip("CuPy lacks the type")
    comm = few(device, size)
    if comm is None:
        return
    with comm, array_module(comm) as xp:
        leaves = leaves_of(dtype, 1000)
        mine, made = own_sum(comm, xp, leaves), xp.zeros(1000, dtype)
        assert mine.dtype == np.float32
        comm.Allreduce(mine, made, order="tree", epilogue="v")
        require_same(to_host(made), reduced("tree", leaves))
        with raises_everywhere(comm, InvalidUsageError, match="mpicomm.tree_sum returns"):
            comm.Allreduce(made, xp.zeros_like(made), order="tree")


@pytest.mark.parametrize("placement", ["in order", "in turns"])
def test_peer_domains(device: str, placement: str) -> None:
    size = WORLD.size
    with on_hosts(placement, device) as comm, array_module(comm) as xp:
        leaves = leaves_of(np.dtype(np.float32), 1000)
        groups = groups_on(placement, size, str(comm.device))
        mine, made = xp.asarray(leaves[comm.rank]), xp.zeros(1000, "float32")
        if 64 % size or [rank for ranks in groups for rank in ranks] != list(range(size)):
            with raises_everywhere(comm, InvalidUsageError, match="equal blocks|follow each other"):
                comm.Allreduce(mine, made, order="tree")
            return
        for algorithm in ("auto", "one_shot", "two_shot"):
            comm.Allreduce(mine, made, order="tree", algorithm=algorithm)
            require_same(to_host(made), reduced("tree", leaves[:size]))


def test_children_have_the_leaves() -> None:
    with mpicomm.Communicator(WORLD, device="cpu", leaves=16) as comm, comm.Dup() as child:
        assert child.leaves == 16


@pytest.fixture(params=["argument", "environment", "child"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    how: dict[str, Any] = {} if request.param == "environment" else {"reductions": "ordered"}
    if request.param == "environment":
        monkeypatch.setenv("MPICOMM_REDUCTIONS", "ordered")
    with mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", **how) as comm:
        assert comm.describe().reductions == "ordered"
        if request.param != "child":
            yield comm
            return
        with comm.Dup() as child:
            yield child


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_ranks_have_the_bits_of_rank_order(ordered: mpicomm.Communicator, op: str) -> None:
    for operation, count, way in itertools.product(REDUCTIONS, (1, 5, 1000), ("run", "start", "prepare")):
        case = Case(operation, np.dtype(np.float64), count, op, form="any", wild=True)
        prepared = Prepared(case, ordered.rank, ordered.size, np)
        complete(getattr(prepared, way)(ordered))
        prepared.check()
