"""Collectives on copy engines, carried out in every order that streams, events and barriers allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives.gpu.algorithms.base import Copy, Form
from mpicomm.collectives.gpu.algorithms.copies import plan as copy_plan
from mpicomm.collectives.gpu.algorithms.copies import schedule
from mpicomm.collectives.gpu.algorithms.copies.plan import CopyLauncher, Then, parts_of
from mpicomm.collectives.gpu.algorithms.copies.schedule import Action, OutputDestination, Parts, Reduce, movement
from mpicomm.collectives.gpu.algorithms.memory import ArenaRegion, Domain
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.collectives.packed import Gaps, Strides
from mpicomm.collectives.patterns import Buffers
from mpicomm.kernels.team import Team
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped
from tests.helpers.inputs import patterns
from tests.helpers.rigs.stream_orders import carry_out

Array = npt.NDArray[Any]
RANK_NBYTES = 1 << 20
OUTPUT, INPUT, STAGING = (RANK_NBYTES * quarter // 4 for quarter in range(3))
FLOAT32 = np.dtype(np.float32)
HUGE = 0x7F  # a float of these bytes shows in each sum
SUM = "sum"


def act(action: Action, memory: Array) -> None:
    if isinstance(action, Copy):
        for row in range(action.rows):
            target, source = action.target + row * action.target_pitch, action.source + row * action.source_pitch
            memory[target:][: action.nbytes] = memory[source:][: action.nbytes].copy()
    elif isinstance(action, Reduce):
        parts = [memory[source:][: action.nbytes].view(np.float32) for source in action.sources]
        memory[action.output :][: action.nbytes] = reduced(parts).view(np.uint8)


def base(rank: int, place: int) -> int:
    return rank * RANK_NBYTES + place


def launcher_of(row: Operation, b: Buffers) -> CopyLauncher:
    pointers = tuple(base(peer, STAGING) for peer in range(b.size))
    region = ArenaRegion(pointers, RANK_NBYTES // 2)
    arena: Any = SimpleNamespace(region=lambda request: region)
    domain = Domain(Team(size=b.size, rank=b.rank), arena, 132, most_staged_nbytes=RANK_NBYTES // 2)
    return CopyLauncher(Form.of_buffers(row, b), domain)


def results(row: Operation, given: list[Array], before: list[Array], root: int, in_place: bool) -> list[Array]:
    """Return the outputs of all ranks after a call; ``given`` and ``before`` have a row for each block."""
    size, after = len(given), [each.copy() for each in before]
    sent = [before[rank] if in_place and (rank == root or row.rooted == "") else given[rank] for rank in range(size)]
    for rank in range(size) if row.rooted != "receive" else [root]:
        if row.reduces:
            after[rank][0] = reduced([each[rank if row.send == "blocks" else 0] for each in sent])
        elif row.receive == "blocks":
            index = rank if row.send == "blocks" else None
            after[rank][:] = [each[in_place * peer if index is None else index] for peer, each in enumerate(sent)]
        else:
            after[rank][0] = before[root][0] if row.rooted == "bcast" else given[root][rank]
    return after


def reduced(parts: Sequence[Array]) -> Array:
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


CALLS = [
    (row.name, in_place, symmetric)
    for row in OPERATIONS.values()
    for in_place in (False, True)
    for symmetric in (False, True)
    if row.copies
    # The output of one rank is never symmetric, nor is an all-to-all in place: others may still read its input.
    and (row.into_all or not symmetric)
    and not (in_place and (row.rooted in ("bcast", "send") or row.name == "Gather"))
    and not (in_place and symmetric and row.send == "blocks")
]


@pytest.mark.parametrize(("number", "size"), [(1, 3), (2, 4), (3, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize(("name", "in_place", "symmetric"), CALLS)
def test_calls_in_any_order_of_streams(
    monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool, symmetric: bool, number: int, size: int
) -> None:
    """Each call is made twice, then another call follows; none may disturb the memory that one before still reads."""
    monkeypatch.setattr(copy_plan, "parts_of", lambda nbytes, *_, **__: Parts.equal(nbytes, number))
    row, after = OPERATIONS[name], OPERATIONS["Reduce_scatter_block"]
    for seed, count in enumerate((1, 3, 1000, 2003, 4099, 4099)):
        rng = np.random.default_rng([size, count, seed])
        root = int(rng.integers(size))
        memory = np.full(size * RANK_NBYTES, HUGE, np.uint8)
        given, outputs = ([rng.standard_normal((size, count), np.float32) for _ in range(size)] for _ in range(2))
        for rank in range(size):
            for place, content in ((INPUT, given[rank]), (OUTPUT, outputs[rank])):
                memory[base(rank, place) :][: content.nbytes] = content.view(np.uint8).ravel()
        programs: list[list[Action]] = []
        for rank in range(size):
            mapped = Mapped(1, 0, tuple(base(peer, OUTPUT) for peer in range(size))) if symmetric else None
            where = rank, [count] * size, FLOAT32, base(rank, INPUT), base(rank, OUTPUT)
            buffers = patterns.buffers_of(row, *where, root=root, in_place=in_place)
            last = patterns.buffers_of(after, *where, root=root)
            actions = launcher_of(row, buffers)._actions(buffers, mapped)
            programs.append([*actions, *actions, *launcher_of(after, last)._actions(last, None)])
        carry_out([[(each, partial(act, each, memory)) for each in program] for program in programs], seed)
        for _ in range(2):
            outputs = results(row, given, outputs, root, in_place)
        outputs = results(after, given, outputs, root, False)
        for rank, expected in enumerate(outputs):
            assert memory[base(rank, OUTPUT) :][: expected.nbytes].tobytes() == expected.tobytes(), (rank, count)


def gaps_of(*regions: tuple[int, int, Sequence[tuple[int, int]]]) -> Gaps:
    """Return gaps: for each region its offset, the bytes of a run, and its loops, the innermost first."""
    made = []
    for offset, run_nbytes, loops in regions:
        counts, strides = zip(*loops, *[(1, 0)] * (4 - len(loops)), strict=True)
        made.append(Strides(run_nbytes * prod(counts), run_nbytes, counts, offset, strides))
    return Gaps(16, tuple(made))


def places_of(gaps: Gaps | None, nbytes: int) -> Array:
    """Return the offset of each byte of a block."""
    if gaps is None:
        return np.arange(nbytes)
    found = []
    for region in gaps.regions:
        places = np.arange(region.run_nbytes)
        for count, stride in zip(region.counts, region.strides, strict=True):
            places = (np.arange(count)[:, None] * stride + places).ravel()
        found.append(region.offset + places)
    return np.concatenate(found)


LAYOUTS = [
    None,
    gaps_of((0, 512, [(9, 1024)])),
    gaps_of((0, 768, [(2, 800), (3, 2400)])),
    gaps_of((0, 1536, [(2, 2048)]), (5120, 256, [(5, 304)]), (8192, 256, [(1, 0)])),
]
"""Blocks of 4,608 bytes."""


MOVING = [row for row in OPERATIONS.values() if row.copies == "one_shot" and not row.reduces]


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "symmetric"), [(row.name, place) for row in MOVING for place in (False, True) if row.into_all or not place]
)
def test_blocks_with_gaps_stay_in_place(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, symmetric: bool
) -> None:
    """Each rank has other gaps. Parts of the messages end inside of rows."""
    monkeypatch.setattr(copy_plan, "parts_of", lambda nbytes, *_, **__: Parts.equal(nbytes, number))
    row, size, nbytes, room = OPERATIONS[name], 3, 4608, 1 << 14
    for seed in range(8):
        rng = np.random.default_rng(seed)
        memory, root = rng.integers(0, 256, size * RANK_NBYTES, np.uint8), seed % size
        programs, sent, received = list[list[Action]](), list[Any](), list[Any]()
        for rank in range(size):
            where = rank, [nbytes // 4] * size, FLOAT32, base(rank, INPUT), base(rank, OUTPUT)
            launcher = launcher_of(row, patterns.buffers_of(row, *where, root=root, in_place=False))
            form = launcher._form
            of_send, of_receive = (LAYOUTS[int(n)] for n in rng.integers(len(LAYOUTS), size=2))
            if symmetric:
                of_receive = None
            elif of_send and of_receive:
                of_send = of_receive = LAYOUTS[int(rng.integers(3))]
            gaps = (of_send,) * form.sends + (of_receive,) * form.receives
            launcher = CopyLauncher(replace(form, gaps=gaps if any(gaps) else ()), launcher._domain)
            assert launcher.moves_gaps == any(gaps)
            steps = [nbytes if symmetric else room] * form.receives
            begins = [base(rank, INPUT) + room * block for block in range(form.sends)]
            begins += [base(rank, OUTPUT) + step * block for block, step in enumerate(steps)]
            sent.append([begin + places_of(of_send, nbytes) for begin in begins[: form.sends]])
            received.append([begin + places_of(of_receive, nbytes) for begin in begins[form.sends :]])
            mapped = Mapped(1, 0, tuple(base(peer, OUTPUT) for peer in range(size))) if symmetric else None
            programs.append(launcher._actions(form.buffers([nbytes] * len(begins), begins), mapped))
        expected = memory.copy()
        for rank, blocks in enumerate(received):
            for peer, places in enumerate(blocks):
                source = sent[root] if row.rooted == "send" else sent[peer]
                expected[places] = memory[source[rank if row.send == "blocks" else 0]]
        carry_out([[(each, partial(act, each, memory)) for each in program] for program in programs], seed)
        for rank in range(size):
            mine = slice(base(rank, 0), base(rank, STAGING))
            assert memory[mine].tobytes() == expected[mine].tobytes(), (seed, rank)


@pytest.mark.parametrize(
    "gaps",
    [
        gaps_of((0, 128, [(36, 512)])),  # short rows
        gaps_of((0, 512, [(1, 1024), (9, 4096)])),  # too many copies
        gaps_of((0, 512, [(9, -1024)])),
        gaps_of((0, 512, [(9, 1 << 31)])),
        gaps_of((0, 512, [(9, 1024)]))._replace(grain=8),
        LAYOUTS[2],  # to rows of other bytes
    ],
)
def test_other_gaps_are_packed(gaps: Gaps) -> None:
    row, where = OPERATIONS["Allgather"], (0, [1152] * 2, FLOAT32, base(0, INPUT), base(0, OUTPUT))
    launcher = launcher_of(row, patterns.buffers_of(row, *where, root=0, in_place=False))
    form = replace(launcher._form, gaps=(gaps, LAYOUTS[1], None))
    assert not CopyLauncher(form, launcher._domain).moves_gaps


@pytest.mark.parametrize(
    ("name", "symmetric", "number"), [("Bcast", False, 8), ("Allgather", False, 8), ("Allreduce", True, 8)]
)
def test_two_regions_would_be_too_few(monkeypatch: pytest.MonkeyPatch, name: str, symmetric: bool, number: int) -> None:
    monkeypatch.setattr(schedule, "REGIONS", 2)
    with pytest.raises(AssertionError):
        test_calls_in_any_order_of_streams(monkeypatch, name, False, symmetric, number, 3)


def test_each_rank_writes_to_one_at_a_time_and_each_to_another() -> None:
    size, count = 4, 1000
    targets = []
    for rank in range(size):
        blocks = patterns.blocks(base(rank, OUTPUT), [count] * size, [index * count for index in range(size)], 4)
        (exchange,) = patterns.allgather(rank, size, FLOAT32, Span(base(rank, INPUT), count), blocks)
        destination = OutputDestination(rank, Mapped(1, 0, tuple(base(peer, OUTPUT) for peer in range(size))))
        actions = movement(rank, exchange, Parts.equal(4 * count, 1), destination)
        copies = [action for action in actions if isinstance(action, Copy)]
        targets.append([copy.target // RANK_NBYTES for copy in copies])
    for turn in zip(*targets, strict=True):
        assert len(set(turn)) == size


@given(
    longest_nbytes=st.integers(1, 1 << 36),
    size=st.integers(2, 8),
    then=st.sampled_from(["nothing", "relay", "gather"]),
    staged=st.booleans(),
)
def test_staging_memory_is_bounded(longest_nbytes: int, size: int, then: Then, staged: bool) -> None:
    most = 512 << 20
    for reduces in {"nothing": (False, staged), "relay": (False,), "gather": (True,)}[then]:
        parts = parts_of(longest_nbytes, size, most, reduces=reduces, then=then, staged=staged)
        assert list(parts.bounds) == sorted(set(parts.bounds))
        assert (parts.bounds[0], parts.bounds[-1]) == (0, longest_nbytes)
        assert ((then == "gather") + staged) * (size - 1) * parts.peer_nbytes <= most
        if then == "nothing" and not staged:
            assert parts.number == 1  # the copies are fastest in it
        if reduces and longest_nbytes > 1024:
            assert parts.number > 1  # so that there is something to copy while one is reduced
