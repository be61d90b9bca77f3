"""Inboxes for messages of private lengths grow with the messages, and all ranks always use the same ones.

Each rank is a thread with the package's `CallMemory` and `LongestMessage`. Memory and kernels are simulated.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="memory of a GPU is opened with cuda-bindings")

from mpicomm.collectives.gpu import call_memory
from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import FEWEST_LAPS, SLOT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.configs import geometry_within
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.call_memory import CallMemory, LongestMessage, NoMemoryError, OverBoundError
from mpicomm.collectives.gpu.decision import Chosen, Decision
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import Team
from mpicomm.mpi.arguments import Span
from mpicomm.waiting import wait_until
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.inputs.tuning import table
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.rigs.filled_calls import Arena as EmptyArena

KIB, MIB = 1 << 10, 1 << 20
BYTE = np.dtype(np.uint8)
MULTIPROCESSORS = 132


class World:
    """A meeting point of the ranks; a rank that comes without the others breaks it."""

    def __init__(self, size: int, most_nbytes: int = 1 << 40, free_nbytes: int = 1 << 40) -> None:
        self.size = size
        self.most_nbytes = most_nbytes
        self.free_nbytes = free_nbytes
        self.exchanges = 0
        self.longest: list[list[tuple[int, int]]] = [[(-1, 0)] * size for _ in range(2)]
        """The number and the longest message that each rank has written at its latest even and odd checkpoint."""
        self._barrier = threading.Barrier(size)
        self._told: list[Any] = [None] * size

    def exchange(self, rank: int, told: Any) -> list[Any]:
        self._barrier.wait(HANG_S)
        self._told[rank] = told
        self._barrier.wait(HANG_S)
        everything = [*self._told]
        if self._barrier.wait(HANG_S) == 0:
            self.exchanges += 1
        return everything


class Arena(EmptyArena):
    """The arena of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world.size, regions=False)
        self._world, self._rank = world, rank
        self.regions: list[Request] = []

    def has(self, request: Request) -> bool:
        return request in self.regions

    def require_room(self, request: Request) -> None:
        if sum(region.nbytes for region in self.regions) + request.nbytes > self._world.most_nbytes:
            raise OverBoundError("MPICOMM_MEMORY is too small")

    def set_up(self, request: Request) -> None:
        assert len({*self._world.exchange(self._rank, request)}) == 1, "ranks set up different memory"
        if request.nbytes > self._world.free_nbytes:
            raise NoMemoryError("rank 0: out of memory")
        self.regions.append(request)

    def region(self, request: Request) -> ArenaRegion:
        assert request in self.regions
        return ArenaRegion(tuple(len(self.regions) << 41 for _ in range(self._world.size)), request.slots_nbytes)


class CallLog:
    """The words of the call log for longest messages, and the wait for them, as one rank sees them."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.waits = 0

    def write_longest(self, checkpoint: int, nbytes: int) -> None:
        self._world.longest[checkpoint % 2][self._rank] = checkpoint, nbytes

    def without_longest(self, checkpoint: int) -> list[int]:
        return [rank for rank, (number, _) in enumerate(self._world.longest[checkpoint % 2]) if number != checkpoint]

    def longest(self, checkpoint: int) -> int:
        assert not self.without_longest(checkpoint), "a rank has overwritten what another one has to read"
        return max(nbytes for _, nbytes in self._world.longest[checkpoint % 2])

    def wait_for(self, missing: Any) -> None:
        self.waits += 1
        assert wait_until(lambda: not missing(), HANG_S)


class Rank:
    """One rank; if it ``remembers`` plans, it keeps them as the engine and its cache do."""

    def __init__(self, world: World, rank: int, *, remembers: bool) -> None:
        self.world, self.rank, self._remembers = world, rank, remembers
        self.arena = Arena(world, rank)
        words: Any = CallLog(world, rank)
        self._longest = LongestMessage(words, words)
        self._domain = Domain(Team(size=world.size, rank=rank), self.arena, MULTIPROCESSORS)
        call_log, calls = SimpleNamespace(post=self._post), SimpleNamespace(require_same=self._require_same)
        self._memory = CallMemory(self._domain, self.arena, call_log, calls)  # type: ignore[arg-type]
        self._plans: dict[object, Any] = {}
        self.posted = 0

    def longest(self, pattern: Pattern) -> int | None:
        """Return this rank's longest message with its peers."""
        return self._prepared(pattern)[0].launcher.private_nbytes

    def _prepared(self, pattern: Pattern) -> tuple[Chosen, list[Step]]:
        signature, nowhere = Signature("Alltoallv", "uint8"), cast(Any, None)
        decision = Decision(pattern.form, "auto", table(), self._domain, nowhere)
        longest = max(decision.form.numbers(pattern.buffers)[0])
        chosen, _, _ = self._memory.provide_for_call(decision, longest, str(signature), None)
        steps = decision.steps(chosen, pattern.buffers, signature.hash32)
        assert steps is not None
        return chosen, steps

    def call(self, pattern: Pattern) -> tuple[Any, ...]:
        """Make a call; return the values that must be equal in the ranks' launches."""
        key = [span.count if span else None for span in pattern[0].sends + pattern[0].receives]
        plan = self._plans.get(str(key))
        if plan is None or plan.is_old:
            chosen, steps = self._prepared(pattern)
            assert chosen.launcher.private_nbytes is not None
            plan = cast(Any, _Plan(steps))
            self._longest.keep(plan, chosen.launcher.private_nbytes)
            if self._remembers:
                self._plans[str(key)] = plan
        else:
            self._post("again")
        assert plan.private_nbytes is not None
        counted = self._longest.count(plan.private_nbytes)
        if counted and self._memory.enlarge_inboxes("Alltoallv", self._longest.agree()):
            self._longest.make_plans_old()
        (launch,) = (step for step in plan.steps if isinstance(step, Launch))
        x = launch.arguments
        return launch.blocks, launch.threads, x.inbox_nbytes, [*x.inboxes], x.laps, self.posted

    def _post(self, text: str) -> None:
        self.posted += 1

    def _require_same(self) -> None:
        posted = self.world.exchange(self.rank, self.posted)
        assert posted == [self.posted] * self.world.size, "ranks are in different calls"


class _Plan:
    private_nbytes: int | None = None
    is_old = False

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps


def alltoall(rank: int, counts: Sequence[Sequence[int]]) -> Pattern:
    """``counts[a][b]`` bytes go from rank a to rank b."""
    size = len(counts)
    sends = [Span((1 << 50) + (to << 40), counts[rank][to]) for to in range(size)]
    receives = [Span((1 << 51) + (frm << 40), counts[frm][rank]) for frm in range(size)]
    return patterns.alltoall(rank, size, BYTE, sends, receives)


def even(size: int, nbytes: int) -> list[list[int]]:
    return [[nbytes] * size for _ in range(size)]


def run(world: World, calls: Sequence[Sequence[Sequence[int]]], *, forgets: Sequence[int] = ()) -> list[Any]:
    """Make the calls on all ranks; return the size of each call's inboxes, and the memory that is set up at the end."""
    ranks = [Rank(world, rank, remembers=rank not in forgets) for rank in range(world.size)]

    def work(rank: Rank) -> list[Any]:
        return [rank.call(alltoall(rank.rank, counts)) for counts in calls]

    with ThreadPoolExecutor(world.size) as threads:
        agreed = list(threads.map(work, ranks))
    assert agreed == [agreed[0]] * world.size, "ranks launch kernels that do not meet"
    assert all(rank.arena.regions == ranks[0].arena.regions for rank in ranks)
    return [*(call[2] for call in agreed[0]), ranks[0].arena.regions]


@pytest.fixture(autouse=True)
def _unwarned() -> None:
    call_memory._warn_of_memory.cache_clear()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_short_messages_need_no_memory_but_the_arena(size: int) -> None:
    *inboxes, regions = run(World(size), [even(size, 4 * KIB)] * 20)
    assert not regions and {*inboxes} == {ArenaLayout(size, 8).sentinel_inbox_nbytes}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_long_messages_have_the_largest_inboxes_from_the_second_call_on(size: int) -> None:
    first, *inboxes, regions = run(World(size), [even(size, 64 * MIB)] * 5)
    layout = ArenaLayout(size, 8)
    assert first == layout.sentinel_inbox_nbytes and {*inboxes} == {layout.most_inbox_nbytes} and len(regions) == 1


@pytest.mark.parametrize("short", [1, 7, 50, 2000])
def test_inboxes_grow_some_calls_after_the_messages(short: int) -> None:
    calls = [even(4, 4 * KIB)] * short + [even(4, 64 * MIB)] * (short + 4)
    *inboxes, regions = run(World(4), calls)
    layout = ArenaLayout(4, 8)
    slow = inboxes.count(layout.sentinel_inbox_nbytes) - short
    # The first checkpoint with the messages comes up to a fourth later, and the next one after another fourth.
    assert 2 <= slow <= 3 + short * 9 // 16
    assert inboxes[short + slow :] == [layout.most_inbox_nbytes] * (len(calls) - short - slow)
    assert len(regions) == 1


def test_ranks_tell_each_other_less_and_less_often_but_always_again() -> None:
    def told(calls: int) -> int:
        longest = LongestMessage(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        return sum(longest.count(0) for _ in range(calls))

    assert [told(calls) for calls in (1, 2, 8, 100, 1000)] == [1, 2, 8, 20, 30]
    assert told(100_000) - told(90_000) == 10  # one in 1024


@pytest.mark.parametrize("steady", [1, 10, 1000, 50_000])
def test_a_rank_goes_on_until_it_is_a_checkpoint_ahead(steady: int) -> None:
    world = World(2)
    call_logs: list[Any] = [CallLog(world, rank) for rank in range(2)]
    first, second = (LongestMessage(call_log, call_log) for call_log in call_logs)

    def call(longest: LongestMessage, nbytes: int) -> int | None:
        return longest.agree() if longest.count(nbytes) else None

    first.count(1), second.count(2)
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(LongestMessage.agree, (first, second))] == [2, 2]  # the first call waits
    for _ in range(steady):
        call(first, 7)
        call(second, 7)
    waits = [call_log.waits for call_log in call_logs]
    ahead = max(1, min(steady // 5, 1024))
    told = [answer for _ in range(ahead) if (answer := call(first, 9)) is not None]
    assert [call_log.waits for call_log in call_logs] == waits
    assert set(told) <= {7} or steady == 1
    for _ in range(ahead):
        call(second, 8)
    assert call(second, 8) in (None, 7, 9) and [call_log.waits for call_log in call_logs] == waits


@pytest.mark.parametrize("seed", range(12))
def test_ranks_agree_whatever_they_send_and_remember(seed: int) -> None:
    """Some ranks have no data, some forget all plans, and there may be a bound."""
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    some = [
        [[rng.choice((0, 0, 5, 4 * KIB, 700 * KIB, 3 * MIB, 40 * MIB)) for _ in range(size)] for _ in range(size)]
        for _ in range(4)
    ]
    some[0] = even(size, 8)
    for counts in some:
        counts[rng.randrange(size)] = [0] * size
    world = World(size, rng.choice((1 << 40, 100 * MIB)), rng.choice((1 << 40, 100 * MIB, MIB)))
    forgets = [rank for rank in range(size) if rng.random() < 0.4]
    calls = [some[0]] * 3 + [rng.choice(some) for _ in range(60)]
    *inboxes, _ = run(world, calls, forgets=forgets)
    assert inboxes == sorted(inboxes)


def test_a_bound_leaves_the_inboxes_that_it_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    layout = ArenaLayout(4, 8)
    _, *inboxes, regions = run(World(4, 50 * MIB), [even(4, 64 * MIB)] * 5)
    assert {*inboxes} == {layout.large_inboxes_nbytes[0]} and [each.slots_nbytes for each in regions] == [32 * MIB]
    assert {record.getMessage() for record in caplog.records} == {
        "Alltoallv runs slower, in smaller inboxes, because memory is short: MPICOMM_MEMORY is too small"
    }
    *inboxes, regions = run(World(4, 10 * MIB), [even(4, 64 * MIB)] * 5)
    assert {*inboxes} == {layout.sentinel_inbox_nbytes} and not regions


def test_memory_that_is_not_there_is_asked_for_once() -> None:
    world = World(4, free_nbytes=MIB)
    *inboxes, regions = run(world, [even(4, 64 * MIB)] * 8)
    assert {*inboxes} == {ArenaLayout(4, 8).sentinel_inbox_nbytes} and not regions
    # After the first call they try both sizes, each after a look at the ranks that are there.
    assert world.exchanges == 2 * 2


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("multiprocessors", [8, 60, 132])
def test_inboxes_can_always_be_used_again(size: int, multiprocessors: int) -> None:
    layout = ArenaLayout(size, 8)
    for inbox_nbytes in (layout.sentinel_inbox_nbytes, *layout.large_inboxes_nbytes):
        shape = geometry_within(inbox_nbytes, min(128, multiprocessors), size)
        assert shape.workers >= 32 and shape.workers % 32 == 0
        assert inbox_nbytes // SLOT_NBYTES // shape.threads >= FEWEST_LAPS


def test_the_message_to_oneself_needs_no_inbox() -> None:
    counts = [[50, 3, 1], [0, 0, 2], [7, 0, 0]]
    assert [Rank(World(3), rank, remembers=False).longest(alltoall(rank, counts)) for rank in range(3)] == [7, 3, 7]
