"""Collectives whose elements travel as codes of 8 bits. test_random_collectives.py has more calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, PeerError
from tests.helpers.inputs.buffers import Placed
from tests.helpers.references.coded import bound, coded_sum
from tests.helpers.references.reductions import Array, dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator

CODES = ("float8_e4m3fn", "int8")
COUNTS = (0, 5, 129, 3001, 70_001)


def parts(size: int, count: int, name: str = "float32") -> list[Array]:
    dtype = dtype_or_skip(name)
    return [np.random.default_rng([rank, count]).standard_normal(count).astype(dtype) for rank in range(size)]


def expected_sum(given: list[Array], codes: str, op: str = "sum", *, again: bool = True) -> Array:
    return given[0] if len(given) == 1 else coded_sum(given, codes, op, again=again)


def require_equal(got: Array, expected: Array) -> None:
    assert np.array_equal(got.astype(np.float32), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_sum_that_travels_as_it_is(comm: mpicomm.Communicator, xp: Any, name: str, codes: str) -> None:
    for count in COUNTS:
        given = parts(comm.size, count, name)
        send, receive = Placed(xp, given[comm.rank]), Placed(xp, np.zeros_like(given[0]))
        for algorithm in ("auto", "one_shot"):  # two shots send the sum on as codes
            comm.Allreduce(send.array, receive.array, algorithm=algorithm, wire_dtype=(codes, None))
            comm.check()
            require_equal(receive.get(), expected_sum(given, codes, again=False))
        exact = np.sum([part.astype(np.float64) for part in given], axis=0)
        assert (np.abs(receive.get().astype(np.float64) - exact) <= bound(given, codes, again=False)).all()


def test_a_graph_is_replayed(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.device == "cpu":
        pytest.skip("graphs are CUDA's")
    for count in (3001, 700_001):
        given = parts(comm.size, count)
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
                expected = expected_sum(given, "int8") if turn == 1 else np.zeros(count, np.float32)
                require_equal(receive.get(), expected)


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


def test_what_makes_no_sense_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    floats, integers = xp.ones(8, xp.float32), xp.ones(8, xp.int32)
    doubles, out = xp.ones(8, xp.float64), xp.zeros(8, xp.float32)
    cases: list[tuple[str, Any]] = [
        (
            r'Allreduce: wire_dtype="int8" is for elements of float32, float16, bfloat16, and these are int32',
            lambda: comm.Allreduce(integers, integers.copy(), wire_dtype="int8"),
        ),
        ("and these are float64", lambda: comm.Allreduce(doubles, doubles.copy(), wire_dtype="int8")),
        ("is for SUM and AVG, and op is max", lambda: comm.Allreduce(floats, out, MPI.MAX, wire_dtype="int8")),
        (r"^wire_dtype='int4': pass", lambda: comm.Allreduce(floats, out, wire_dtype="int4")),
        (
            r"^wire_dtype=\('int8', 'float8_e4m3fn'\)",
            lambda: comm.Allreduce(floats, out, wire_dtype=("int8", CODES[0])),
        ),
        (
            'algorithm="mpi" of Allreduce sends no codes',
            lambda: comm.Allreduce(floats, out, algorithm="mpi", wire_dtype="int8"),
        ),
        (
            'algorithm="ring" of Allreduce sends no codes',
            lambda: comm.Allreduce(floats, out, algorithm="ring", wire_dtype="int8"),
        ),
        ("derived datatype and no epilogue", lambda: comm.Allreduce(floats, out, epilogue="v", wire_dtype="int8")),
        (
            "is for two buffers of one element type",
            lambda: comm.Allgather(floats, xp.zeros(16 * comm.size, xp.float16), wire_dtype="int8"),
        ),
    ]
    for said, call in cases:
        with pytest.raises(InvalidUsageError, match=said):
            call()
    comm.Allreduce(floats, out, wire_dtype=np.int8)
    comm.check()
    assert np.allclose(out.get() if xp is not np else out, comm.size, rtol=1 / 60)


@pytest.mark.parametrize("codes", [("int8", "float8_e4m3fn"), ("int8", ("int8", None))])
def test_ranks_that_differ_in_it_notice(device: str, codes: tuple[Any, Any]) -> None:
    comm = communicator(device)
    if comm.size == 1:
        comm.Free()
        pytest.skip("one rank cannot differ")
    with array_module(comm) as xp:
        send, receive = xp.ones(1000, xp.float32), xp.zeros(1000, xp.float32)
        with pytest.raises(PeerError, match="wire_dtype=int8"):
            comm.Allreduce(send, receive, wire_dtype=codes[comm.rank == 0])
            if device != "cpu":
                xp.cuda.Device().synchronize()
                comm.check()
    comm.Free()
