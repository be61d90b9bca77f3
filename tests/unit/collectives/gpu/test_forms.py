"""A call that is filled into a template has the same launch as a call that is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.gpu.call_templates import CollectiveTemplate, has_template
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.plain_arrays import has_template_kind, plain_array
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.rigs.filled_calls import Device, Kind, as_read, plan_of

FLOAT = np.dtype("f4")
HERE, THERE = (DeviceArray(at, 10, FLOAT) for at in (1 << 50, 1 << 51))
WITH_TEMPLATES = [row for row in OPERATIONS.values() if not (row.of_neighbors and row.send == "typed")]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def device_of(size: int, rank: int, *, regions: bool = True, blocks: int = 132, link_speed: float = 1.0) -> Device:
    return Device(regions=regions, size=size, rank=rank, blocks=blocks, link_speed=link_speed)


class Drawn:
    """Arguments of calls of one kind, with lengths from ``data`` and addresses that depend on the number of a call."""

    def __init__(self, data: st.DataObject, operation: Operation, rank: int, size: int) -> None:
        self._draw, self.operation, self.rank, self.size = data.draw, operation, rank, size
        self.root = data.draw(st.integers(0, size - 1), "root")
        self.own = self.root if operation.rooted else rank
        """The rank whose block has one length in both buffers."""
        types = ["f4", "f8", "i2", "u1", "c16", *["g"] * (not operation.reduces)]
        self.dtype = FLOAT if operation.send == "typed" else np.dtype(data.draw(st.sampled_from(types)))
        coded = operation.coded and self.dtype == FLOAT
        wires = [None, Wire("int8"), Wire("float8_e4m3fn", again=False)]
        self.wire = data.draw(st.sampled_from(wires if coded else wires[:1]), "wire")
        self.in_place = data.draw(st.booleans(), "in place") and "vector" not in (operation.send, operation.receive)
        self.neighborhood, self._peers = None, [tuple(range(size))] * 2
        if operation.of_neighbors:
            order = data.draw(st.permutations(range(size)))
            ranks = [order[: data.draw(st.integers(1, size))] for _ in range(2)]
            assume((rank in ranks[0]) == (rank in ranks[1]))
            self._peers = [(*each, *[MPI.PROC_NULL] * data.draw(st.integers(0, 1))) for each in ranks]
            self.neighborhood, self.in_place = Neighborhood(self._peers[1], self._peers[0]), False

    def call(self, number: int) -> tuple[Call, list[Any]]:
        """Return a call as it is read, and its buffers as `plain_array` reads them."""
        operation, count = self.operation, self._count()
        counts, send = self._argument(0, operation.send, number, count)
        _, receive = self._argument(1, operation.receive, number, count)
        plain_of: Any = plain_array
        if self.in_place and operation.rooted in ("", "receive") and self.own == self.rank:
            if operation.reduces:  # the receive buffer holds the input
                receive = DeviceArray(receive.pointer, send.size, self.dtype)
            send = MPI.IN_PLACE
        elif self.in_place and operation.rooted == "send" and self.own == self.rank:
            receive = MPI.IN_PLACE
        plain = [plain_of(send), plain_of(receive)]
        if operation.send == "counted":  # recvcounts cut the input
            plain = [*reversed(plain)] if send is MPI.IN_PLACE else plain
            plain[0] = (*plain[0], tuple(counts), None)
        op = MPI.SUM if operation.reduces else None
        shares = counts if operation.send == "counted" else None
        given = Arguments(send, receive, op, self.root, shares, wire=self.wire)
        return Call(operation, given, self.rank, self.size, "auto", self.neighborhood), plain

    def _count(self) -> int:
        few = int(self.operation.is_even)
        return self._draw(st.integers(few, 40) | st.integers(few, 40_000) | st.integers(few, 40_000_000), "count")

    def _argument(self, side: int, shape: str, number: int, count: int) -> tuple[list[int], Any]:
        """Return the counts of blocks, and a buffer argument with them; the own block has ``count`` elements."""
        ranks, at, draw = self._peers[side], (1 << 50 + side) + 128 * number, self._draw
        counts = [count if peer == self.own else self._count() for peer in ranks] if shape in _LISTS else []
        if shape not in _LISTS:
            return counts, DeviceArray(at, count * (len(ranks) if shape == "blocks" else 1), self.dtype)
        if shape == "counted":
            return counts, DeviceArray(at, sum(counts), self.dtype)
        others = [MPI.FLOAT, MPI.INT16_T, MPI.BYTE]
        types = [MPI.FLOAT if peer == self.own else draw(st.sampled_from(others)) for peer in ranks]
        units = [datatype.size for datatype in types] if shape == "typed" else [1] * len(ranks)
        displs, end = [], 0
        for each, unit in zip(counts, units, strict=True):
            displs.append(end + draw(st.integers(0, 3)))
            end = displs[-1] + each * unit
        if shape == "typed":
            return counts, [DeviceArray(at, end // 4 + 1, FLOAT), counts, displs, types]
        array = DeviceArray(at, end + 1, self.dtype)
        forms: list[Any] = [[array, (counts, displs)], [array, counts, displs, None], (array, (tuple(counts), displs))]
        return counts, draw(st.sampled_from(forms))


_LISTS = ("vector", "typed", "counted")


@pytest.mark.parametrize("operation", WITH_TEMPLATES, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_a_filled_call_is_launched_as_if_it_had_been_read(operation: Operation, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank = data.draw(st.integers(0, size - 1), "rank")
    asked = data.draw(st.sampled_from(["auto", *names_for(operation)]), "asked")
    drawn = Drawn(data, operation, rank, size)
    regions, blocks = data.draw(st.booleans(), "regions"), data.draw(st.sampled_from([16, 132]), "blocks")
    device = device_of(size, rank, regions=regions, blocks=blocks, link_speed=data.draw(st.sampled_from([0.5, 1.0])))
    symmetric, mappings = data.draw(st.booleans(), "symmetric"), Mappings()
    calls, (first, _) = Kind(device, asked, mappings), drawn.call(0)
    assume(has_template(first) and (first.given.send is MPI.IN_PLACE or not first.in_place))  # as `PlanCache.add`
    try:
        calls.template = plan_of(first, device, asked, mappings)
    except InvalidUsageError:
        return
    if symmetric:
        mappings.add([(1 << 51) + (abs(each - rank) << 48) for each in range(size)], rank, 1 << 45)
    for number in range(1, 4):  # later calls follow earlier ones in the same memory
        call, plain = drawn.call(number)
        calls.require_alike(call, *plain)


@pytest.mark.parametrize(
    ("name", "asked", "symmetric"),
    [
        ("Allreduce", "one_shot", False),
        ("Allreduce", "two_shot", False),
        ("Bcast", "chain", False),
        ("Alltoall", "one_shot", True),
        ("Gather", "one_shot", False),
        ("Allreduce", "ring", False),
        ("Allgather", "copy_engine", False),
        ("Bcast", "copy_engine", True),
    ],
)
def test_the_launch_of_another_call_is_another_one(name: str, asked: str, symmetric: bool) -> None:
    """A stale address or count would be noticed above."""
    operation, mappings, launched = OPERATIONS[name], Mappings(), set()
    if symmetric:
        mappings.add([1 << 52, 1 << 51, 1 << 53], 1, 1 << 45)
    device = device_of(3, 1)
    for count, at in ((4_000_000, 1), (4_000_000, 2), (4_400_000, 1), (40_000, 1)):
        blocks = {"one": count, "blocks": 3 * count}
        send = DeviceArray((1 << 50) + 4096 * at, blocks[operation.send], FLOAT)
        receive = DeviceArray((1 << 51) + 128 * at, blocks[operation.receive], FLOAT)
        op = MPI.SUM if operation.reduces else None
        plan = plan_of(Call(operation, Arguments(send, receive, op), 1, 3), device, asked, mappings)
        assert fits(plan, send, receive)
        device.launch(plan)
        launched.add(str([each[:2] if isinstance(each, tuple) else each for each in device.launched]))
    assert len(launched) == 4


def plan_for(name: str, send: Any, receive: Any, **others: Any) -> CollectiveTemplate:
    """Return the template of the calls of the first of two ranks like this one."""
    op = MPI.SUM if OPERATIONS[name].reduces else None
    return plan_of(Call(OPERATIONS[name], Arguments(send, receive, op, **others), 0, 2), device_of(2, 0), "auto")


def fits(plan: CollectiveTemplate, send: Any, receive: Any) -> bool:
    return plan.fill(plain_array(send), plain_array(receive))


def test_a_call_that_does_not_fit_its_form_is_left_to_the_reader() -> None:
    def array(pointer: int, count: int) -> DeviceArray:
        return DeviceArray(pointer, count, FLOAT)

    here, there = 1 << 50, 1 << 51
    for name, first, wrong in (
        ("Allreduce", (8, 8), (6, 7)),
        ("Allgather", (8, 16), (6, 13)),
        ("Alltoall", (8, 8), (7, 7)),
    ):
        plan = plan_for(name, *map(array, (here, there), first))
        assert fits(plan, *map(array, (here, there), first))
        assert not fits(plan, *map(array, (here, there), wrong))
        assert not fits(plan, array(here, 0), array(there, 0))
    assert not fits(plan_for("Allgather", MPI.IN_PLACE, array(there, 8)), MPI.IN_PLACE, array(there, 7))
    # Buffers that overlap in one byte.
    plan = plan_for("Allreduce", HERE, THERE)
    for begin, apart in ((here + 24, True), (here + 23, False), (here - 24, True), (here - 23, False), (here, False)):
        assert fits(plan, array(here, 6), array(begin, 6)) == apart
    plan = plan_for("Allgather", array(here, 5), THERE)
    assert fits(plan, array(here, 6), array(here - 48, 12)) and not fits(plan, array(here, 6), array(here - 44, 12))


def test_counts_of_a_buffer_that_is_cut_in_blocks_are_left_to_planning() -> None:
    """There a count says the elements of one block, and without a count the array has all blocks."""
    for name, counted in (("Allreduce", True), ("Bcast", True), ("Allgather", False), ("Alltoall", False)):
        send, receive = (None if name == "Bcast" else [HERE, 4, MPI.FLOAT]), [THERE, 4, MPI.FLOAT]
        plan = plan_for(name, send, receive)
        assert plan.takes(plain_array(send), plain_array(receive)) == counted
        assert plan.takes(plain_array(send and [HERE, MPI.FLOAT]), plain_array([THERE, MPI.FLOAT]))


def test_lists_that_one_plan_cannot_take_alike_are_of_different_kinds() -> None:
    """`PlanCache` takes buffers of one kind for calls of one form, and asks `takes` for the first call only."""
    plan = plan_for("Alltoallv", [HERE, [5, 5]], [THERE, [5, 5]])
    kinds: dict[bool, set[Any]] = {True: set(), False: set()}
    for datatype in ([], [MPI.FLOAT]):
        for counts in ([], [10], [[5, 5]], [([5, 5], [0, 5])]):
            sent, received = (plain_array([array, *counts, *datatype]) for array in (HERE, THERE))
            if sent is not None and received is not None:
                kinds[plan.takes(sent, received)].add((sent[2], received[2]))
    assert all(kinds.values())
    assert not kinds[True] & kinds[False]
    in_bytes = plain_array([HERE, [5, 5], [0, 20], [MPI.FLOAT] * 2])
    assert in_bytes is not None and (in_bytes[2], in_bytes[2]) not in kinds[True]


def test_blocks_that_do_not_fit_their_array_or_each_other_are_left_to_planning() -> None:
    plan = plan_for("Alltoallv", [HERE, [5, 5]], [THERE, [5, 5]])
    assert fits(plan, [HERE, [4, 6]], [THERE, [4, 6]])
    assert fits(plan, [HERE, ([4, 1], [6, 0])], [THERE, [4, 0]])
    for send, receive in (
        ([HERE, [4, 6]], [THERE, [5, 5]]),  # this rank sends itself 4, and takes 5
        ([HERE, [4, 7]], [THERE, [4, 6]]),
        ([HERE, ([4, 1], [7, 0])], [THERE, [4, 0]]),
        ([HERE, ([4, 1], [-1, 0])], [THERE, [4, 0]]),
        ([HERE, [4, -1]], [THERE, [4, 0]]),
        ([HERE, [4]], [THERE, [4]]),
        ([HERE, [4, 1]], [HERE, [4, 1]]),
        ([HERE, ([4, 1], [0, 5])], [HERE, ([4, 1], [6, 5])]),
        ([HERE, ([1, 3], [9, 3])], [HERE, ([1, 6], [8, 0])]),
    ):
        assert not fits(plan, send, receive)
    # Blocks that lie between each other, and some that are sent twice.
    assert fits(plan, [HERE, ([2, 1], [0, 5])], [HERE, ([2, 2], [3, 6])])
    assert fits(plan, [HERE, ([4, 3], [0, 1])], [HERE, ([4, 2], [6, 4])])
    for spec in (
        *([empty, counts, MPI.INT] for empty in (None, MPI.IN_PLACE) for counts in ([0, 0], 0)),
        *([HERE, counts] for counts in ([4, 1.5], [4, True], 11, -1)),
        [HERE, [4, 1], [0]],
        [HERE, [4, 1], [0, 4], "f"],
    ):
        assert plain_array(spec) is None


@pytest.mark.parametrize(
    "name", [row.name for row in WITH_TEMPLATES if "vector" in (row.send, row.receive) and not row.of_neighbors]
)
def test_a_kind_whose_first_call_is_empty_moves_the_own_block_of_later_calls(name: str) -> None:
    operation = OPERATIONS[name]

    def arguments(count: int) -> list[Any]:
        shapes = (operation.send, 1 << 50), (operation.receive, 1 << 51)
        arrays = [(shape, DeviceArray(at, count * (1 + (shape == "vector")), FLOAT)) for shape, at in shapes]
        return [[array, [count] * 2] if shape == "vector" else array for shape, array in arrays]

    device = device_of(2, 0)
    plan = plan_of(Call(operation, Arguments(*arguments(0)), 0, 2), device, "auto")
    _, launched, _ = as_read(Call(operation, Arguments(*arguments(100)), 0, 2), device)
    assert fits(plan, *arguments(100))
    device.launch(plan)
    assert device.launched == launched


def test_datatypes_of_each_block() -> None:
    pair = MPI.FLOAT.Create_contiguous(2)  # kernels need no committed datatype
    wide, shifted = pair.Create_resized(0, 12).Commit(), MPI.FLOAT.Create_hindexed([1], [4]).Commit()

    def blocks(*datatypes: Any, counts: Any = (1, 2), displs: Any = (0, 8), array: Any = HERE) -> Any:
        return [array, counts, displs, datatypes]

    def call(*datatypes: Any) -> Call:
        arguments = blocks(*datatypes), blocks(*datatypes, array=THERE)
        return Call(OPERATIONS["Alltoallw"], Arguments(*arguments), 0, 2)

    assert has_template(call(MPI.FLOAT, pair)) and has_template(call(pair, MPI.DOUBLE))
    read = plain_array(blocks(MPI.FLOAT, pair))
    assert read is not None and (read[:2], read[3:]) == ((1 << 50, 40), ((4, 16), (0, 8)))
    assert call(shifted, shifted).scratch_nbytes == 0
    for spec in (
        *(blocks(MPI.FLOAT, other) for other in (MPI.DATATYPE_NULL, "f")),
        blocks(MPI.FLOAT),
        *(blocks(pair, pair, **{name: wrong}) for name in ("counts", "displs") for wrong in (None, [1])),
        blocks(pair, pair, counts=[1, 1.5]),
        blocks(pair, pair, array=None),
    ):
        unknown = plain_array(spec)
        assert unknown is None or not has_template_kind(unknown)
    plan = plan_for("Alltoallw", blocks(MPI.FLOAT, pair), blocks(MPI.FLOAT, pair, array=THERE))
    other = blocks(MPI.BYTE, MPI.BYTE, counts=[4, 1], displs=[0, 39], array=THERE)
    assert fits(plan, blocks(MPI.FLOAT, pair), other)
    assert not fits(plan, blocks(pair, pair), other)  # this rank sends itself 8 bytes, and takes 4
    assert not fits(plan, blocks(MPI.FLOAT, pair, displs=[0, 25]), other)
    assert not fits(plan, blocks(MPI.FLOAT, pair, counts=[1, -1]), other)
    for datatype in (pair, wide, shifted):
        datatype.Free()


@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_with_gaps_at_other_places(in_place: bool) -> None:
    column = MPI.FLOAT.Create_vector(3, 1, 5)
    datatypes = [MPI.FLOAT.Create_indexed([2], [1]), MPI.SHORT_INT, column]
    calls = Kind(device_of(3, 1))
    for number in range(4):
        sent, received = ([3 - number + each, 100, 64 + 4 * number] for each in (1, 2))
        specs: list[Any] = [
            [DeviceArray((1 << 50 + side) + 128 * number, 64, FLOAT), [1, 2, 1], displs, datatypes]
            for side, displs in enumerate((sent, received))
        ]
        plain = [plain_array(spec) for spec in specs]
        assert all(each is not None and has_template_kind(each) for each in plain)
        if in_place:
            specs[0], plain[0] = MPI.IN_PLACE, plain_array(MPI.IN_PLACE)
        call = Call(OPERATIONS["Alltoallw"], Arguments(*specs), 1, 3)
        assert has_template(call)
        calls.require_alike(call, *plain)
    array, counts, _, _ = specs[1]
    others = [[array, counts, [displ, 100, 64], datatypes] for displ in range(-9, 300)]
    assert [each[2][0] for each in others if fits(calls.template, specs[0], each)] == [*range(-4, 245)]
    for datatype in (column, datatypes[0]):
        datatype.Free()


def test_a_result_longer_than_the_scratch_memory_is_left_to_the_reader() -> None:
    """Only a call that is read may take more memory."""
    device, array = device_of(2, 1), DeviceArray(1 << 50, 9, FLOAT)
    arguments = Arguments(MPI.IN_PLACE, array, MPI.SUM, 0, [9, 0])
    plan = plan_of(Call(OPERATIONS["Reduce_scatter"], arguments, 1, 2), device, "auto")

    def fits(*counts: int) -> bool:
        return plan.fill((1 << 50, 9, None, counts, None), plain_array(MPI.IN_PLACE))

    assert fits(9, 0)
    assert not fits(8, 1)
    device.scratch.of(32)
    assert fits(1, 8)
    for wrong in ((0, 9), (1, 1 << 60), (2, 8), (1, 7), (10, -1), (9,)):  # recvcounts must cut all of the input
        assert not fits(*wrong)
    assert device.scratch.largest.nbytes == 32


def test_a_rank_that_is_a_neighbour_twice_has_no_template() -> None:
    for ranks, form in (((0, 1), True), ((1, 1), False)):
        neighborhood = Neighborhood(ranks, ranks)
        call = Call(OPERATIONS["Neighbor_alltoall"], Arguments(HERE, THERE), 0, 2, "auto", neighborhood)
        assert has_template(call) == form
