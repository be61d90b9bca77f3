"""The algorithm of a call, another one if there is no memory for the first, and the regions of this memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="memory of a GPU is opened with cuda-bindings")
pytest.importorskip("cuda.bindings", reason="the arena is memory of a GPU")

from mpicomm.collectives.checks import Signature
from mpicomm.collectives.gpu import call_memory as device_arena
from mpicomm.collectives.gpu.algorithms.base import Domain, Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import CODES_OF_PACKET, FEWEST_LAPS, OVERSEERS
from mpicomm.collectives.gpu.algorithms.steps import Copy, Step
from mpicomm.collectives.gpu.call_memory import CallMemory, DeviceArena, NoMemoryError, OverBoundError
from mpicomm.collectives.gpu.decision import Decision
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues import Elementwise, rms_norm
from mpicomm.errors import HandleError, InvalidUsageError, MpicommError, PeerError
from mpicomm.kernels.team import ABSENT, Team
from mpicomm.kernels.variant import Launch
from mpicomm.log import log_once
from mpicomm.mpi.arguments import Span, parse
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.inputs.tuning import row, table
from tests.helpers.rigs.filled_calls import Arena as EmptyArena

TABLE = table(row("Allreduce", 3, (100, "two_shot"), (1000, "copy_engine")))
FLOAT32 = np.dtype(np.float32)


class Arena(EmptyArena):
    """An arena that raises the error that ``failures`` has for a purpose."""

    def __init__(self, failures: dict[str, MpicommError]) -> None:
        super().__init__(3, regions=False)
        self.failures = failures
        self.over_bound: set[str] = set()
        self.tried: list[str] = []
        self._there: list[Request] = []

    def has(self, request: Request) -> bool:
        return request in self._there

    def require_room(self, request: Request) -> None:
        if request.what in self.over_bound:
            raise OverBoundError("MPICOMM_MEMORY is too small")

    def set_up(self, request: Request) -> None:
        self.tried.append(request.what)
        if request.what in self.failures:
            raise self.failures[request.what]
        self._there.append(request)


class Rig:
    def __init__(self, **failures: MpicommError) -> None:
        self.arena = Arena({what.replace("_", ": "): error for what, error in failures.items()})
        self.posted: list[str] = []
        self._domain = Domain(Team(size=3, rank=0), self.arena, 8, most_staged_nbytes=1 << 30)
        nowhere: Any = None
        call_log: Any = SimpleNamespace(post=self.posted.append)
        self._memory = CallMemory(nowhere, call_log, nowhere, self.arena)  # type: ignore[arg-type]
        self._memory.require_same = lambda: None  # type: ignore[method-assign]

    def steps(
        self, count: int, asked: str = "auto", result: str = "", hidden: int = 0, wire: Wire | None = None
    ) -> list[Step]:
        """Return the steps of an all-reduce, with an epilogue to ``result`` or of rows of ``hidden`` elements."""
        send, output = Span(1 << 40, count), Span(2 << 40, count)
        pattern = patterns.allreduce(0, 3, FLOAT32, send, output, "sum")
        form = pattern.form
        if wire is not None:
            form = replace(form, wire=(wire, FLOAT32))
        if result:
            receive = parse(np.empty(count, result), writable=True, name="recvbuf")
            epilogue = Elementwise("v * i").bind("Allreduce", FLOAT32, receive)
            epilogue.output = output.pointer if result == "float32" else 3 << 40
            form = replace(form, epilogue=epilogue)
        if hidden:
            receive = parse(np.empty(count, np.float32), writable=True, name="recvbuf")
            residual, weight = np.empty(count, np.float32), np.empty(hidden, np.float32)
            norm = rms_norm(residual, weight).bind("Allreduce", FLOAT32, receive)
            norm.output = output.pointer
            form = replace(form, epilogue=norm)
        return self.steps_of(pattern, form, Signature("Allreduce", "float32", count, "sum"), asked)

    def steps_of(self, pattern: Pattern, form: Form, signature: Signature, asked: str) -> list[Step]:
        nowhere: Any = None
        decision = Decision(form, asked, TABLE, self._domain, nowhere)
        longest = max(form.numbers(pattern.buffers)[0])
        chosen, _, _ = self._memory.provide_for_call(decision, longest, str(signature), None)
        steps = decision.steps(chosen, pattern.buffers, signature.hash32, None, form.epilogue)
        assert steps is not None
        return steps


def is_copied(steps: Iterable[Step]) -> bool:
    return any(isinstance(step, Copy) for step in steps)


@pytest.fixture(autouse=True)
def _unwarned() -> None:
    log_once.cache_clear()


def test_the_table_decides_and_an_algorithm_may_be_asked_for() -> None:
    rig = Rig()
    assert not is_copied(rig.steps(2)) and not is_copied(rig.steps(100)) and is_copied(rig.steps(1000))
    assert not is_copied(rig.steps(1000, "one_shot")) and is_copied(rig.steps(100, "copy_engine"))
    assert rig.posted[:1] == ["Allreduce(float32, count=2, op=sum)"]
    assert rig.arena.tried == ["collectives: copies"] * 2


def test_an_epilogue_is_applied_by_the_kernel_that_reduces_or_by_the_next_one() -> None:
    rig = Rig()
    for asked in ("one_shot", "two_shot"):
        (fused,) = rig.steps(100, asked, "float32")
        assert isinstance(fused, Launch) and fused.variant.entry == "mpicomm_packets"
        assert fused.arguments.finish.operands.count == 100
        (converts,) = rig.steps(100, asked, "float64")
        assert isinstance(converts, Launch) and "-DMPICOMM_RESULT=float64" in converts.variant.options
        assert (converts.arguments.finish.reduced, converts.arguments.finish.finished) == (2 << 40, 3 << 40)
    *_, behind = rig.steps(1000, "ring", "float64")
    assert isinstance(behind, Launch) and behind.variant.entry == "mpicomm_epilogue"
    assert (behind.arguments.source, behind.arguments.output) == (2 << 40, 3 << 40)
    (instead,) = rig.steps(1000, "auto", "float32")  # the table has copy_engine
    assert isinstance(instead, Launch) and instead.variant.entry == "mpicomm_packets"
    last = rig.steps(1000, "copy_engine", "float32")[-1]
    assert isinstance(last, Launch) and last.variant.entry == "mpicomm_epilogue"
    assert last.arguments.source == last.arguments.output == 2 << 40


def test_rows_are_normalised_by_the_kernel_of_one_hop_or_by_the_next_one() -> None:
    rig = Rig()
    (fused,) = rig.steps(32 * 1024, "one_shot", hidden=1024)
    assert isinstance(fused, Launch) and "-DMPICOMM_WEIGHT=float32" in fused.variant.options
    assert (fused.blocks, fused.threads, fused.arguments.steps) == (8, 256 + OVERSEERS, 4)
    assert fused.arguments.finish.rows == 32 and not rig.arena.tried
    # A row of 257 packets takes 2 steps, so the slots are twice as many as the packets.
    (uneven,) = rig.steps(900 * 1028, "one_shot", hidden=1028)
    assert isinstance(uneven, Launch) and rig.arena.tried == ["collectives: large messages"]
    assert uneven.arguments.steps == uneven.arguments.laps == 226
    # In two hops each of 3 ranks has 11 rows.
    (of_shards,) = rig.steps(32 * 1024, "two_shot", hidden=1024)
    assert isinstance(of_shards, Launch) and of_shards.variant.entry == "mpicomm_packets"
    assert of_shards.arguments.steps == 2 and of_shards.arguments.finish.rows_of_shard == 11
    (of_eight,) = rig.steps(24 * 1024, "two_shot", hidden=1024)  # a row of each rank for each of 8 blocks
    assert isinstance(of_eight, Launch) and of_eight.variant.entry == "mpicomm_packets"
    for count, asked, hidden in (
        (21 * 1024, "two_shot", 1024),
        (99, "two_shot", 33),
        (99, "one_shot", 33),
        (16384, "one_shot", 16384),
    ):
        *_, behind = rig.steps(count, asked, hidden=hidden)
        assert isinstance(behind, Launch) and behind.variant.entry == "mpicomm_norm"


def test_without_memory_for_large_inboxes_codes_go_through_small_inboxes() -> None:
    rig = Rig(**{"collectives_large messages": NoMemoryError("there is none")})
    count = 18 * rig.arena.sentinels.nbytes
    (launch,) = rig.steps(count, wire=Wire("int8"))
    assert isinstance(launch, Launch) and "-DMPICOMM_WIRE=int8" in launch.variant.options
    assert "-DMPICOMM_LAPS" in launch.variant.options
    arguments = launch.arguments
    assert arguments.inbox_nbytes == 2 * rig.arena.sentinels.nbytes and arguments.laps >= FEWEST_LAPS
    assert arguments.steps * launch.blocks * (launch.threads - OVERSEERS) * CODES_OF_PACKET >= count


def test_without_memory_for_copy_engines_another_way_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    rig = Rig(collectives_copies=NoMemoryError("rank 1: out of memory"))
    for _ in range(2):
        assert not is_copied(rig.steps(1000))
    # The second choice stays, also if there is memory later: a rank that repeats the call does not prepare it again.
    rig.arena.failures.clear()
    assert not is_copied(rig.steps(1000)) and not is_copied(rig.steps(2000))
    assert rig.arena.tried == ["collectives: copies"]
    with pytest.raises(NoMemoryError, match="rank 1: out of memory"):
        rig.steps(1000, "copy_engine")
    assert [record.getMessage() for record in caplog.records] == [
        "Allreduce runs slower, without algorithm 'copy_engine', because memory is short: rank 1: out of memory"
    ]


@pytest.mark.parametrize(
    ("asked", "failure"),
    [
        ("copy_engine", NoMemoryError("x")),  # it was asked for
        ("auto", PeerError("x")),  # the error does not concern memory
        ("auto", HandleError("x")),  # of a kernel's code, for example, only on this rank
    ],
)
def test_other_failures_are_raised(asked: str, failure: MpicommError) -> None:
    with pytest.raises(MpicommError, match="x"):
        Rig(collectives_copies=failure).steps(1000, asked)


@pytest.mark.parametrize("asked", ["auto", "one_shot"])
def test_what_one_shot_lacks_memory_for_goes_in_the_arena_and_is_never_tried_again(
    caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    caplog.set_level(logging.WARNING, "mpicomm")
    rig = Rig(collectives_copies=NoMemoryError("x"), **{"collectives_large messages": NoMemoryError("x")})
    for _ in range(2):
        (launch,) = rig.steps(10 << 20, asked)
        assert isinstance(launch, Launch) and launch.arguments.inbox_nbytes == 2 * rig.arena.sentinels.nbytes
        assert launch.arguments.laps >= FEWEST_LAPS
    # Two hops need twice the memory of one.
    assert rig.arena.tried.count("collectives: large messages") == (2 if asked == "auto" else 1)
    assert len(caplog.records) == (3 if asked == "auto" else 1)
    assert "runs slower, only in the inboxes of the arena" in caplog.text


def test_without_room_below_the_bound_another_way_is_taken_before_the_ranks_are_told() -> None:
    rig = Rig()
    rig.arena.over_bound = {"collectives: copies"}
    assert not is_copied(rig.steps(1000)) and not rig.arena.tried
    assert len(rig.posted) == 1  # as on a rank that keeps the plan of the other way
    with pytest.raises(InvalidUsageError, match="MPICOMM_MEMORY is too small"):
        rig.steps(1000, "copy_engine")
    assert len(rig.posted) == 1


def test_an_undefined_reduction_is_refused_before_the_ranks_are_told() -> None:
    rig = Rig()
    pattern = patterns.allreduce(0, 3, np.dtype(np.int32), Span(0, 1), Span(8, 1), "avg")
    with pytest.raises(MpicommError, match="op='avg' is not defined for int32"):
        rig.steps_of(pattern, pattern.form, Signature("Allreduce", "int32", 1, "avg"), "auto")
    assert not rig.posted


MIB = 1 << 20


class Segments(list[Any]):
    @property
    def pointers(self) -> list[int]:
        return [each.pointer for each in self]

    content: Any


class Machine:
    """An arena of two ranks on a machine that has ``free`` bytes for each region."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_nbytes: int | None = None) -> None:
        self.free = 1 << 40
        self.asked: list[int] = []
        monkeypatch.setattr(device_arena, "share", self._share)
        node, self.backend = SimpleNamespace(size=2), SimpleNamespace(loading=contextlib.nullcontext)
        self.arena = DeviceArena(node, self.backend, "ipc", ArenaLayout(2, 8), most_nbytes)  # type: ignore[arg-type]
        self.asked.clear()

    def _share(self, node: Any, backend: Any, what: str, produce: Any, signature: Any) -> Any:
        self.asked.append(signature())
        if signature() > self.free:
            raise HandleError("rank 1: out of memory", ranks=[1])
        return Segments(SimpleNamespace(pointer=100 * len(self.asked) + rank) for rank in range(node.size))


def test_a_request_takes_the_smallest_region_of_its_purpose_that_it_fits_into(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    large, small = Request("copies", 8 * MIB), Request("copies", 2 * MIB)
    for request in (large, small):
        machine.arena.set_up(request)
    assert machine.arena.region(Request("copies", MIB)) == machine.arena.region(small)
    assert machine.arena.region(Request("copies", 3 * MIB)) == machine.arena.region(large)
    assert machine.arena.region(large).slots_nbytes == 8 * MIB
    assert not machine.arena.has(Request("copies", 9 * MIB))
    assert not machine.arena.has(Request("chain", MIB))
    assert not machine.arena.has(Request("copies", MIB, words_nbytes=128))


def test_slots_of_the_sentinel_protocol_have_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.arena.set_up(Request("chain", 32 * MIB, words_nbytes=MIB, sentinel=True))
    machine.arena.set_up(Request("slots", 32 * MIB, words_nbytes=MIB))
    assert machine.asked == [35 * MIB, 33 * MIB]


def test_a_region_that_cannot_be_set_up_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.free = MIB
    with pytest.raises(NoMemoryError, match="rank 1: out of memory") as caught:
        machine.arena.set_up(Request("copies", 2 * MIB))
    assert list(caught.value.ranks) == [1]
    assert not machine.arena.has(Request("copies", 2 * MIB))


def test_regions_stay_below_the_bound_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10 * MIB)
    machine.arena.require_room(Request("copies", 10 * MIB))
    machine.arena.set_up(Request("copies", 5 * MIB))  # which takes 6
    machine.arena.require_room(Request("chain", 4 * MIB))
    with pytest.raises(OverBoundError) as caught:
        machine.arena.require_room(Request("chain", 4 * MIB, words_nbytes=1))
    assert isinstance(caught.value, InvalidUsageError)
    assert str(caught.value) == (
        f'MPICOMM_MEMORY leaves {4 * MIB} bytes for shared memory of this communicator, and "chain" takes {6 * MIB}: '
        f"raise MPICOMM_MEMORY by {2 * MIB} bytes or more, or unset it"
    )


def test_without_a_bound_there_is_room_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).arena.require_room(Request("copies", 1 << 60))


def test_a_suspension_keeps_messages_and_makes_other_memory_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.arena.set_up(Request("messages", 2 * MIB, words_nbytes=128, holds_messages=True))
    machine.arena.set_up(Request("chain", 2 * MIB, words_nbytes=128, sentinel=True))
    arena, messages, chain = (segments.content for segments in machine.arena.memories())
    assert arena is not None and messages is not None and chain is not None
    assert (messages.kept_nbytes, messages.fill) == (2 * MIB + 128, None)
    assert arena.kept_nbytes == chain.kept_nbytes == 0
    filled: list[tuple[int, int, int]] = []
    machine.backend.fill = lambda *given: filled.append(given)
    machine.backend.fill_words = lambda *given: filled.append(given)
    assert chain.fill is not None
    chain.fill(1 << 40)
    slots = (1 << 40) + 128
    assert filled == [(1 << 40, 128, 0), (slots, 2 * MIB, ABSENT), (slots + 2 * MIB, 2 * MIB // 16, 0)]
