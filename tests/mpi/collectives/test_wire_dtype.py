"""Collectives whose elements travel as codes of 8 bits. test_random_collectives.py has more calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicomm
from tests.helpers.inputs.buffers import Placed
from tests.helpers.references.coded import coded_sum

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
