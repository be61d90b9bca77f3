"""The kernels of ``python -m mpicomm.p2p``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpicomm.p2p.kernels import COPY, GATE, PING_PONG, POINTER_CHASE, Copying, Gate, PingPong, PointerChase
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine

OVER = 0xFFFFFFFF
ROUNDS = 200


def test_bytes_are_copied_into_memory_of_another_rank(builds: Builds) -> None:
    machine, rng = Machine(builds, 2), np.random.default_rng(1)
    kernel = builds.kernel(COPY.source, COPY.entry)
    arrived = []
    for nbytes, offset in ((1, 0), (16, 0), (100_003, 0), (100_003, 5), (4096, 16)):
        content = rng.integers(0, 256, nbytes, np.uint8)
        source = machine.place(0, content, offset=offset)
        target = machine.allocate(1, nbytes)
        copying = Copying(machine.address(1, target, 0), source.address, nbytes)
        machine.launch(0, kernel, [copying], blocks=3, threads=96)
        arrived.append((target, content))
    machine.run()
    assert all((target.bytes == content).all() for target, content in arrived)


@pytest.mark.parametrize("released", [True, False])
def test_a_held_stream_goes_on_when_it_is_released_or_time_is_up(builds: Builds, released: bool) -> None:
    machine = Machine(builds, 1)
    word = machine.place(0, np.array([released], np.uint32))
    kernel = builds.kernel(GATE.source, GATE.entry)
    machine.launch(0, kernel, [Gate(word.address, 300_000_000)], blocks=1, threads=1)
    machine.run()
    assert machine.elapsed_s < 0.01 if released else 0.3 <= machine.elapsed_s < 0.4


def ping_pong(
    builds: Builds,
    changes: Sequence[Change] = (),
    *,
    answers: bool = True,
    budget_s: float = 20,
    limit_s: float = 20,
) -> tuple[int, int, int]:
    """Return the nanoseconds, the rounds, and the word of the rank that answers."""
    machine = Machine(builds, 2)
    kernel = builds.kernel(PING_PONG.source, PING_PONG.entry, changes=changes)
    words, result = [machine.allocate(rank, 4) for rank in range(2)], machine.allocate(0, 16)
    limits = int(budget_s * 1e9), int(limit_s * 1e9), ROUNDS
    for rank in range(2 if answers else 1):
        theirs = machine.address(1 - rank, words[1 - rank], rank)
        own = PingPong(words[rank].address, theirs, 0 if rank else result.address, *limits, rank == 0)
        machine.launch(rank, kernel, [own], blocks=1, threads=1, nap_us=2000 * rank)
    machine.run(limit_s=30)
    elapsed_ns, rounds = map(int, result.view(np.uint64))
    return elapsed_ns, rounds, int(words[1].view(np.uint32)[0])


def test_a_word_goes_to_and_fro(builds: Builds) -> None:
    elapsed_ns, rounds, word = ping_pong(builds)
    assert elapsed_ns > 0
    assert (rounds, word) == (ROUNDS, OVER)


def test_a_ping_pong_ends_when_it_has_taken_long_enough(builds: Builds) -> None:
    elapsed_ns, rounds, word = ping_pong(builds, budget_s=1e-9)
    assert elapsed_ns > 0
    assert (rounds, word) == (31, OVER)


def test_a_ping_pong_without_an_answer_ends_without_a_time(builds: Builds) -> None:
    assert ping_pong(builds, answers=False, limit_s=0.1) == (0, 0, OVER)
    no_answer = Change("p2p.cu", "    store_relaxed(x.theirs, value);\n", "")
    assert ping_pong(builds, [no_answer], limit_s=0.1) == (0, 0, OVER)


def test_loads_that_follow_each_other(builds: Builds) -> None:
    machine = Machine(builds, 2)
    word, result = machine.allocate(1, 8), machine.allocate(0, 16)
    kernel = builds.kernel(POINTER_CHASE.source, POINTER_CHASE.entry)
    machine.launch(0, kernel, [PointerChase(machine.address(1, word, 0), result.address, 500)], blocks=1, threads=1)
    machine.run()
    elapsed_ns, loads = result.view(np.uint64)
    assert elapsed_ns > 0 and loads == 500
