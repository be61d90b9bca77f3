"""The choice of the algorithm of a call on GPUs, the same on all ranks; the launches and memory of algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ml_dtypes")

from mpicomm.collectives import operations
from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.gpu.algorithms.chain.plan import (
    BATCH_NBYTES,
    CHAIN_SLOTS,
    CHAIN_THREADS,
    cut,
    layout_of,
    serve_chain,
)
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectLauncher
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Domain
from mpicomm.collectives.gpu.algorithms.packets.arguments import FEWEST_LAPS, SLOT_NBYTES, ll_can_carry, most_workers
from mpicomm.collectives.gpu.algorithms.packets.configs import Geometry, ProtocolLimits, limits_of, sized_configs
from mpicomm.collectives.gpu.decision import Chosen, Decision, names_for, usual_kernels
from mpicomm.collectives.gpu.tuning import BUILT_IN, Tuning
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import HOST_SLOTS, REDUCTIONS
from mpicomm.kernels.team import LANES, Team
from mpicomm.kernels.variant import Launch
from mpicomm.sharing.segments import Mapped
from tests.helpers.inputs import patterns
from tests.helpers.inputs.tuning import row, table
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.template_calls import Arena

SIZES = st.integers(2, 8)
KIB, MIB = 1 << 10, 1 << 20


@given(
    nbytes=st.integers(1, 1 << 34) | st.integers(1, 1 << 17),
    dtype=st.sampled_from([None, *REDUCTIONS]),
    link_speed=st.floats(0.1, 10),
    operation=st.sampled_from([operations.ALLREDUCE, operations.REDUCE]),
)
def test_a_protocol_carries_the_type_and_as_much_as_it_may(
    nbytes: int, dtype: str | None, link_speed: float, operation: Operation
) -> None:
    reduction = (dtype, "sum") if dtype else None
    node = node_of(0, 4, link_speed=link_speed)
    limits = limits_of(reduction, node, to_all=operation.to_all)
    config = sized_configs(limits, node).of(nbytes)
    assert config is not None
    assert (config.protocol == "ll") == (nbytes <= limits.ll)
    assert config.protocol == "sentinel" or dtype is None or ll_can_carry(dtype)


@given(
    units=st.integers(1, 1 << 32) | st.integers(1, 1 << 20),
    blocks=st.integers(1, 128),
    size=SIZES,
    fan_out=st.booleans(),
)
def test_a_launch_keeps_its_limits(units: int, blocks: int, size: int, fan_out: bool) -> None:
    """Inboxes that are used again hold enough steps."""
    node, layout = replace(node_of(0, size), multiprocessors=blocks), ArenaLayout(size, 64)
    way = sized_configs(ProtocolLimits(0, 1 << 62), node, fan_out=fan_out).of(16 * units)
    assert way is not None
    geometry = Geometry(way.blocks, way.workers)
    most = most_workers(size, fan_out=fan_out, one_step=units <= geometry.threads)
    assert 1 <= geometry.blocks <= blocks
    assert 32 <= geometry.workers <= most and geometry.workers % 32 == 0
    assert geometry.threads < units + 2 * geometry.workers  # only the last block has idle threads
    nbytes, inbox = 16 * units, layout.sentinel_inbox_nbytes
    if nbytes > inbox:
        inbox = layout.large_inbox_nbytes(nbytes)
    assert nbytes <= inbox or inbox // SLOT_NBYTES // geometry.threads >= FEWEST_LAPS
    assert (nbytes <= inbox) == (nbytes <= layout.most_inbox_nbytes)


@given(nbytes=st.integers(1, 1 << 30), multiprocessors=st.sampled_from([1, 16, 60, 100, 132]), hops=st.integers(2, 3))
def test_a_slot_of_a_chain_holds_the_batch_of_a_channel(nbytes: int, multiprocessors: int, hops: int) -> None:
    node = replace(node_of(0, 3), multiprocessors=multiprocessors)
    layout = layout_of(nbytes, hops, node)
    slot_nbytes = layout.channel_nbytes // CHAIN_SLOTS
    assert slot_nbytes in (BATCH_NBYTES, 4 * BATCH_NBYTES, 32 * KIB)
    blocks, batch_nbytes = cut(nbytes, hops, node)
    carried = -(-nbytes // (blocks * CHAIN_THREADS // LANES * batch_nbytes)) * BATCH_NBYTES
    assert slot_nbytes >= min(carried, 32 * KIB)
    assert slot_nbytes < 4 * carried


def test_an_arena_takes_no_more_than_it_says() -> None:
    for size in range(2, 5):
        assert ArenaLayout(size, 64).nbytes <= 64 * MIB


def node_of(rank: int, size: int, *, link_speed: float = 1.0) -> Domain:
    return Domain(Team(size=size, rank=rank), Arena(size, regions=True), 132, link_speed, most_staged_nbytes=1 << 30)


class CallOf:
    """One rank's part of a call between ``len(counts)`` ranks; rank r has a block of ``counts[r]``."""

    def __init__(
        self,
        operation: Operation,
        rank: int,
        counts: Sequence[int],
        *,
        op: str = "sum",
        root: int = 1,
        dtype: str = "int32",
        symmetric: bool = False,
    ) -> None:
        element, received = dtype_named(dtype), 1 << 51
        self.buffers = patterns.buffers_of(operation, rank, counts, element, 1 << 50, received, op=op, root=root)
        self.form = Form.of_buffers(operation, self.buffers)
        self.longest = max(counts) * element.itemsize
        """The bytes of the longest message, as all ranks know them."""
        self.memory = Mapped(1, 0, tuple(received for _ in counts)) if symmetric and operation.into_all else None

    def chosen(self, asked: str, node: Domain, tuning: Tuning = BUILT_IN) -> Chosen:
        return self._decision(asked, node, tuning).at(self.longest, symmetric=self.memory is not None)

    def launches(self, asked: str, node: Domain) -> list[Launch]:
        decision = self._decision(asked, node, BUILT_IN)
        steps = decision.steps(self.chosen(asked, node), self.buffers, 0, self.memory)
        assert steps is not None
        return [step for step in steps if isinstance(step, Launch)]

    def _decision(self, asked: str, node: Domain, tuning: Tuning) -> Decision:
        nowhere: Any = None
        return Decision(self.form, asked, tuning, node, nowhere)


def choice(call: CallOf, asked: str, node: Domain) -> tuple[Any, ...]:
    """The launcher of a call, its memory, and its launches if every rank has the same."""
    chosen, operation = call.chosen(asked, node), call.form.operation
    # By copy engines, in a ring and in chunks a rank without a part launches less.
    alike = chosen.choice.algorithm in ("one_shot", "two_shot") and operation.to_all and operation.is_even
    launches = call.launches(asked, node) if alike else []
    same = [(step.variant.source.name, step.blocks, step.threads) for step in launches]
    memory = chosen.launcher.memory(call.longest, symmetric=call.memory is not None)
    return type(chosen.launcher), chosen.choice, memory, same


NAMED = [(operation, name) for operation in OPERATIONS.values() for name in ("auto", *names_for(operation))]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("operation", "asked"), NAMED, ids=str)
@pytest.mark.parametrize("count", [1, 1000, 100_000, 10_000_000, 200_000_000])
def test_all_ranks_choose_alike(operation: Operation, asked: str, symmetric: bool, count: int) -> None:
    uneven = operation.counts != "same" or operation.send == "by_recvcounts"
    counts = [count, 0, 5, count] if uneven else [count] * 4
    root = 3 if asked == "chain" and operation.reduces else 1
    chosen = [
        choice(CallOf(operation, rank, counts, root=root, symmetric=symmetric), asked, node_of(rank, 4))
        for rank in range(4)
    ]
    assert chosen == [chosen[0]] * 4
    if operation is operations.ALLGATHER and asked == "one_shot":
        assert (chosen[0][0] is DirectLauncher) == (symmetric and 4 * count > 4 * MIB)


@pytest.mark.parametrize("wire", [None, Wire("int8"), Wire("int8", quantizes_result=False)], ids=str)
@pytest.mark.parametrize("operation", [row for row in OPERATIONS.values() if row.counts != "private"], ids=str)
def test_a_call_without_elements_needs_neither_launches_nor_memory(operation: Operation, wire: Wire | None) -> None:
    for size in (1, 3):
        call, node = CallOf(operation, 0, [0] * size, root=0, dtype="float32"), node_of(0, size)
        call.form = replace(call.form, wire=(wire, dtype_named("float32")) if wire and size > 1 else None)
        assert call.launches("auto", node) == []
        assert call.chosen("auto", node).launcher.memory(0, symmetric=False) == ()


UNEVEN = [row for row in OPERATIONS.values() if row.counts == "private"]
UNEVEN += [operations.REDUCE_SCATTER, operations.ALLGATHERV]


@pytest.mark.parametrize("counts", [[5, 2 * MIB, 6 * MIB], [MIB, 60 * MIB, 300 * MIB], [100 * MIB, 0, 0], [MIB, 5, 5]])
@pytest.mark.parametrize("operation", UNEVEN, ids=str)
def test_messages_of_any_lengths_go_in_packets(counts: list[int], operation: Operation) -> None:
    """In one kernel. If only two ranks know a length, its launch does not depend on the lengths of the messages."""
    for rank in range(3):
        call, node = CallOf(operation, rank, counts), node_of(rank, 3)
        (launch,) = call.launches("auto", node)
        assert launch.variant.source.name == "packets.cu" and "-DMPICOMM_SENTINEL" in launch.variant.options
        if operation.counts == "private":
            assert call.chosen("auto", node).launcher.memory(call.longest, symmetric=False) == ()


@pytest.mark.parametrize("link_speed", [0.1, 1, 1.5])
def test_sizes_are_scaled_by_the_speed_of_the_links(link_speed: float) -> None:
    def way(nbytes: float) -> tuple[str, bool]:
        call = CallOf(operations.ALLGATHER, 0, [int(nbytes)] * 4, dtype="uint8", symmetric=True)
        (launch,) = call.launches("one_shot", node_of(0, 4, link_speed=link_speed))
        return launch.variant.source.stem, "-DMPICOMM_SENTINEL" in launch.variant.options

    assert way(32 * KIB * link_speed) == ("packets", False)
    assert way(32 * KIB * link_speed + 8) == ("packets", True)
    assert way(4 * MIB * link_speed) == ("packets", True)
    assert way(4 * MIB * link_speed + 8) == ("direct", False)


@pytest.mark.parametrize("host_slots", [False, True])
def test_kernels_that_use_slots_again_know_whether_these_lie_in_memory_of_the_host(host_slots: bool) -> None:
    node = replace(node_of(0, 2), host_slots=host_slots)
    for operation, asked, nbytes, again in (
        (operations.ALLTOALL, "one_shot", KIB, False),
        (operations.ALLTOALL, "one_shot", 64 * MIB, True),
        (operations.BCAST, "chain", MIB, True),
    ):
        (launch,) = CallOf(operation, 0, [nbytes] * 2, dtype="uint8", root=0).launches(asked, node)
        assert (HOST_SLOTS[0] in launch.variant.options) == (host_slots and again)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_usual_kernels_are_those_of_calls_of_many_sizes(size: int) -> None:
    """Only they: each of them is compiled ahead, so a kernel that no call takes costs a second of a core."""
    taken = set()
    for operation in (operations.ALLREDUCE, operations.BCAST, operations.ALLGATHER):
        for exponent in range(1, 28):
            call = CallOf(operation, 0, [1 << exponent] * size, dtype="float32")
            taken |= {launch.variant for launch in call.launches("auto", node_of(0, size))}
    usual = usual_kernels(("float32", "sum"), size, host_slots=False)
    assert set(usual) <= taken
    moves = usual_kernels(None, size, host_slots=False)
    assert set(moves) <= set(usual)
    assert {each.source.stem for each in taken - set(usual)} <= {"packets", "exchange", "chain"}
    assert usual_kernels(("float32", "sum"), 1, host_slots=False) == ()


def can_chain(operation: Operation, dtype: str, op: str = "sum", root: int = 0) -> bool:
    call = CallOf(operation, 0, [8] * 4, op=op, root=root, dtype=dtype)
    return not isinstance(serve_chain(call.form, node_of(0, 4)), str)


def test_what_goes_along_a_chain() -> None:
    for root in range(4):
        assert can_chain(operations.BCAST, "float16", root=root)
        assert can_chain(operations.REDUCE, "float32", root=root) == (root in (0, 3))
    assert not can_chain(operations.REDUCE, "float32", "avg")
    rounded = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    for name in REDUCTIONS:
        assert can_chain(operations.REDUCE, name, "lor") == (name not in rounded)


def test_a_chain_is_chosen_if_it_is_possible() -> None:
    tuning = table(row("Reduce", 4, (100, "two_shot"), (1000, "chain"), (9000, "copy_engine")))

    def chosen(asked: str, nbytes: int, *, root: int) -> str:
        call = CallOf(operations.REDUCE, 0, [nbytes] * 4, dtype="uint8", op="max", root=root)
        return call.chosen(asked, node_of(0, 4), tuning).choice.algorithm

    for nbytes, expected in ((99, "one_shot"), (100, "two_shot"), (1000, "chain"), (9000, "copy_engine")):
        assert chosen("auto", nbytes, root=0) == expected
        assert chosen("auto", nbytes, root=1) == ("two_shot" if expected == "chain" else expected)
    assert chosen("chain", 1, root=3) == "chain"
    assert chosen("chain", 0, root=3) == "one_shot"
    with pytest.raises(InvalidUsageError, match=r'algorithm="chain" of Reduce: it needs .*: use "auto"'):
        chosen("chain", 1, root=1)
