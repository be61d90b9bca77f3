"""All-reduces with an epilogue: the same bits by every algorithm, in every form of call, and refusals."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, PeerError
from mpicomm.epilogues import Elementwise, fp8, layer_norm, rms_norm
from tests.helpers.inputs.buffers import Placed
from tests.helpers.references.reductions import Array, dtype_or_skip, reduced, require_same
from tests.helpers.rigs.communicators import array_module, communicator

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
def test_every_algorithm_has_the_same_bits(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
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
                in_place = bool(receive.get().any())
                for _ in range(1 if in_place else 3):  # known calls take a shorter way
                    comm.Allreduce(
                        MPI.IN_PLACE if in_place else send.array,
                        receive.array,
                        algorithm=algorithm,
                        epilogue="v * n + bias[i] - rows[i % k] * i",
                        n=0.1,
                        k=7,
                        bias=bias.array,
                        rows=rows.array,
                    )
                comm.check()
                require_same(receive.get(), expected)


def test_requests(comm: mpicomm.Communicator, xp: Any) -> None:
    send, receive = xp.asarray(part(comm.rank, 1000)), xp.zeros(1000, xp.float32)
    expected = xp.asarray(total(comm, 1000) - 2)
    comm.Iallreduce(send, receive, epilogue="v - n", n=2).Wait()
    assert (receive == expected).all()
    request = comm.Allreduce_init(send, receive, epilogue=Elementwise("v - n", n=2))
    for _ in range(3):
        receive[...] = 0
        request.Start()
        request.Wait()
        assert (receive == expected).all()
    request.Free()


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


@pytest.mark.parametrize("name", ["float32", "float16", "float8_e5m2"])
def test_conversion_to_eight_bits_of_another_result_is_refused(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    dtype_or_skip("float8_e4m3fn")
    send, receive = xp.ones(4, xp.float32), Placed(xp, np.zeros(4, dtype_or_skip(name)))
    said = rf"^Allreduce: epilogue=fp8\(..., dtype='float8_e4m3fn'\): recvbuf has {name}: pass one of float8_e4m3fn"
    with pytest.raises(InvalidUsageError, match=said):
        comm.Allreduce(send, receive.array, epilogue=fp8(2.0))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_residual_and_rms_norm(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    dtype, hidden, rng = dtype_or_skip(name), 40, np.random.default_rng(1)
    ways = ((5, "auto"), (7, "one_shot"), (301, "one_shot"), (101, "two_shot"), (4_000, "auto"))
    for count, algorithm in ((rows * hidden, algorithm) for rows, algorithm in ways):
        weight = rng.standard_normal(hidden).astype(np.float32)
        old = rng.standard_normal(count).astype(dtype)
        h = (total(comm, count, name).astype(np.float32) + old.astype(np.float32)).astype(dtype)
        rows = h.astype(np.float64).reshape(-1, hidden)
        expected = rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + 1e-5) * weight
        residual, send, receive = (
            Placed(xp, old),
            Placed(xp, part(comm.rank, count, name)),
            Placed(xp, np.zeros_like(h)),
        )
        scale = Placed(xp, weight)
        for _ in range(2):  # a known call takes a shorter way
            residual.set(old)
            epilogue = rms_norm(residual.array, scale.array, 1e-5)
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, epilogue=epilogue)
            comm.check()
            require_same(residual.get(), h)
            result = receive.get()
            assert np.allclose(result.astype(np.float64), expected.ravel(), rtol=1e-5 if name == "float32" else 0.01)
            assert len(set(comm.allgather(zlib.crc32(result.tobytes())))) == 1


def test_layer_norm_with_biases(comm: mpicomm.Communicator, xp: Any) -> None:
    hidden, rng = 48, np.random.default_rng(2)
    weight, bias, linear = (rng.standard_normal(hidden).astype(np.float32) for _ in range(3))
    for count, algorithm in ((7 * hidden, "auto"), (301 * hidden, "one_shot"), (101 * hidden, "two_shot")):
        old = 100 + rng.standard_normal(count).astype(np.float32)
        h = total(comm, count) + np.tile(linear, count // hidden) + old
        rows = h.astype(np.float64).reshape(-1, hidden)
        centred = rows - rows.mean(axis=1, keepdims=True)
        expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
        residual, send, receive = xp.asarray(old), xp.asarray(part(comm.rank, count)), xp.zeros(count, xp.float32)
        epilogue = layer_norm(residual, *map(xp.asarray, (weight, bias)), linear_bias=xp.asarray(linear))
        comm.Allreduce(send, receive, algorithm=algorithm, epilogue=epilogue)
        comm.check()
        assert (residual == xp.asarray(h)).all()
        assert np.allclose(receive if xp is np else receive.get(), expected.ravel(), atol=1e-4)


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


def test_bad_codes(comm: mpicomm.Communicator, xp: Any) -> None:
    send, residual, weight = xp.ones(128, xp.float32), xp.ones(128, xp.float32), xp.ones(64, xp.float32)
    eight = Placed(xp, np.zeros(128, dtype_or_skip("float8_e4m3fn"))).array
    four, plain, few = xp.zeros(64, xp.uint8), xp.zeros(128, xp.float32), xp.zeros(3, xp.float32)
    bytes_ = xp.zeros(4, xp.uint8)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("scales is for codes, and recvbuf has float32: pass float8_e4m3fn", plain, {"scales": few}),
        ("scale is for codes, and recvbuf has float32", plain, {"scale": 2.0}),
        (
            "scales has 3 elements of float32 in the layout linear, for 2 rows of 64 .* 8 for each 16",
            eight,
            {"scales": few},
        ),
        (
            "layout 128x4, for 2 rows of 64 elements: pass 512 for each 32",
            eight,
            {"scales": bytes_, "scale_layout": "128x4"},
        ),
        ("scales has elements of int32: pass float32", eight, {"scales": xp.zeros(4, xp.int32)}),
        ("scale has 3 elements of float32: pass a number", eight, {"scale": few}),
        ("bias has 3 elements of float32: pass 64 of float32, as a row has", plain, {"linear_bias": few}),
        ("scales overlaps recvbuf: copy one", four, {"scales": four[:4]}),
        ("sendbuf holds 128 elements, but recvbuf has room for 64", four, {"scale": 2.0}),
    ]
    for said, receive, more in cases:
        with pytest.raises(InvalidUsageError, match=said):
            comm.Allreduce(send, receive, epilogue=rms_norm(residual, weight, **more))
    with pytest.raises(InvalidUsageError, match="scale_layout='128x4' of layer_norm is for scales"):
        layer_norm(residual, weight, scale_layout="128x4")
    with pytest.raises(InvalidUsageError, match="scale_layout='rows' of rms_norm: use one of linear, 128x4"):
        rms_norm(residual, weight, scale_layout="rows")  # type: ignore[arg-type]


def test_bad_norms(comm: mpicomm.Communicator, xp: Any) -> None:
    send, receive, residual, weight = (xp.ones(n, xp.float32) for n in (12, 12, 12, 4))
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("residual has 4 elements of float32: pass 12 of float32", (weight, weight)),
        ("residual has 12 elements of float64: pass 12 of float32", (residual.astype(xp.float64), weight)),
        ("weight has 5 elements, and the 12 of the result make no rows", (residual, xp.ones(5, xp.float32))),
        ("weight has elements of int32: pass floats", (residual, xp.ones(4, xp.int32))),
        ("residual and weight overlap", (residual, residual[:4])),
        ("residual overlaps recvbuf", (receive, weight)),
        ("residual overlaps sendbuf", (send, weight)),
    ]
    for said, operands in cases:
        with pytest.raises(InvalidUsageError, match=said):
            comm.Allreduce(send, receive, epilogue=rms_norm(*operands))
    with pytest.raises(InvalidUsageError, match="eps=-1 of rms_norm is no small number"):
        rms_norm(residual, weight, -1)
    with pytest.raises(InvalidUsageError, match="dtype='float32' is no float of 8 bits"):
        fp8(1.0, "float32")


def test_bad_epilogues(comm: mpicomm.Communicator, xp: Any) -> None:
    send, receive, few = (xp.ones(n, xp.float32) for n in (8, 8, 7))
    whole = xp.ones(8, xp.int32)
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (InvalidUsageError, "few has 7 elements, and its index goes from 0 to 7 for 8", "v + few[i]", {"few": few}),
        (InvalidUsageError, "goes from -1 to 6", "v + few[i - 1]", {"few": few}),
        (InvalidUsageError, "may need more than 64 bits", f"v + few[i * {2**62} // {2**62}]", {"few": few}),
        (InvalidUsageError, "may need more than 64 bits", "v + few[i * n // n]", {"few": few, "n": 2**62}),
        (InvalidUsageError, "'b' is no name here: use v, i", "v + b", {}),
        (InvalidUsageError, "'v' is no name here: use i", "v + few[v]", {"few": few}),
        (InvalidUsageError, "out overlaps recvbuf: copy one", "v + out[i]", {"out": receive}),
        (TypeError, "x is no array of numbers: x is a str", "v + x[i]", {"x": "text"}),
        (MPI.Exception, "few is no array of numbers: few: count -1 is negative", "v + few[i]", {"few": [few, -1, "f"]}),
        (InvalidUsageError, "the operand sqrt has a name that means", "v", {"sqrt": 3}),
        (InvalidUsageError, "has 9 operands: pass up to 8", "v", dict.fromkeys("abcdefghj", 1)),
        (InvalidUsageError, "^Allreduce: epilogue='v' does not use the operand extra: leave", "v", {"extra": 3}),
        (InvalidUsageError, "does not use the operand few: leave it out", "v * k", {"k": 2, "few": few}),
        (InvalidUsageError, r"^epilogue='(v \+ ){20}'\.\.\. has 9", "v + " * 25_000, dict.fromkeys("abcdefghj", 1)),
        (InvalidUsageError, r"^epilogue='(v \+ ){20}'\.\.\.: it has \d+ letters", "v + " * 25_000, {}),
        (TypeError, "epilogue=3 is no epilogue: pass an expression", 3, {}),
        (TypeError, "scale: operands are for an expression", fp8(1.0), {"scale": 2}),
        (TypeError, "scale: no argument of the call has this name", None, {"scale": 2}),
    ]
    if xp is not np:
        cases.append((InvalidUsageError, "x is not on the device of recvbuf", "v + x[i]", {"x": np.ones(8)}))
    for error, said, epilogue, operands in cases:
        with pytest.raises(error, match=said):
            comm.Allreduce(send, receive, epilogue=epilogue, **operands)
    if xp is not np:
        with pytest.raises(InvalidUsageError, match="MPI applies no epilogue to device arrays"):
            comm.Allreduce(send, receive, epilogue="v", algorithm="mpi")
    with pytest.raises(InvalidUsageError, match="recvbuf has int32 for results of float32: pass one of float"):
        comm.Allreduce(send, whole, epilogue="v")
    with pytest.raises(InvalidUsageError, match="n is float: convert it"):
        comm.Allreduce(whole, xp.ones(8, xp.int32), epilogue="v * n", n=0.5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("others", [1, None])
def test_ranks_with_different_epilogues_are_told(device: str, others: int | None) -> None:
    other = r"epilogue='v \* n', n=1, " if others else "op=sum, algorithm"
    said = rf"rank 0: [^;]*epilogue='v \* n', n=0, .*rank 1: [^;]*{other}"
    with communicator(device, timeout_s=10) as comm, array_module(comm) as xp:
        send, receive = xp.ones(8, xp.float32), xp.ones(8, xp.float32)
        n = others if comm.rank else 0
        with pytest.raises(PeerError, match=said):
            if n is None:
                comm.Allreduce(send, receive, algorithm="one_shot")
            else:
                comm.Allreduce(send, receive, epilogue="v * n", n=n, algorithm="one_shot")
            comm.check()
            comm.Allreduce(send, receive, algorithm="one_shot")
            comm.check()
