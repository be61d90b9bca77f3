"""All-reduces with an epilogue, or whose elements travel as codes of 8 bits: the same bits by every algorithm."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.epilogues import fp8, layer_norm, rms_norm
from tests.helpers.inputs.buffers import Placed
from tests.helpers.references.coded import coded_sum
from tests.helpers.references.reductions import Array, dtype_or_skip, reduced, require_same
from tests.helpers.rigs.call_forms import FORMS, complete, method_name

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
def test_conversion_to_eight_bits(comm: mpicomm.Communicator, xp: Any, name: str, result: str) -> None:
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
def test_norms_to_codes_with_scales(
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


CODES = ("float8_e4m3fn", "int8")


def test_a_graph_is_replayed(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.device == "cpu":
        pytest.skip("graphs are CUDA's")
    for count in (3001, 700_001):
        given = [np.random.default_rng([rank, count]).standard_normal(count, np.float32) for rank in range(comm.size)]
        total = given[0] if comm.size == 1 else coded_sum(given, "int8", "sum", again=True)
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
    for codes in CODES:
        for algorithm in ("one_shot", "two_shot"):
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, wire_dtype=codes)
            comm.check()
            got = receive.get()
            assert np.array_equal(np.isnan(got), np.isnan(expected))
            assert np.allclose(got[~np.isnan(got)], comm.size, rtol=1 / 16)
