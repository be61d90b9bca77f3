"""A call that is filled into a template has the same launch as a call that is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.registry import names_for
from mpicomm.collectives.gpu.call_templates import CollectiveTemplate, has_template
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.rigs.filled_calls import Device, Kind, call_of, fill, plain_of, plan_of

OPERATIONS_OF_FORMS = [row for row in OPERATIONS.values() if row.counts == "same" and row.send != "counted"]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


@given(data=st.data())
def test_a_filled_call_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank, root = data.draw(st.integers(0, size - 1), "rank"), data.draw(st.integers(0, size - 1), "root")
    asked = data.draw(st.sampled_from(["auto", "one_shot", "two_shot", "chain", "ring", "copy_engine"]), "asked")
    serving = [row for row in OPERATIONS_OF_FORMS if asked == "auto" or asked in names_for(row)]
    operation = data.draw(st.sampled_from(serving), "operation")
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "f8", "i2", "u1", "c16", *["g"] * (not operation.reduces)])))
    in_place = data.draw(st.booleans(), "in place")
    wires = [None, Wire("int8"), Wire("float8_e4m3fn", again=False)]
    wire = data.draw(st.sampled_from(wires if operation.coded and dtype == np.float32 else wires[:1]), "wire")
    counts = st.integers(1, 40) | st.integers(1, 40_000) | st.integers(1, 40_000_000)
    device = Device(
        regions=data.draw(st.booleans(), "regions"),
        size=size,
        rank=rank,
        blocks=data.draw(st.sampled_from([16, 132]), "blocks"),
        link_speed=data.draw(st.sampled_from([0.5, 1.0]), "link speed"),
    )
    facts: dict[str, Any] = {"in_place": in_place, "wire": wire}
    first = call_of(operation, rank, size, data.draw(counts, "first"), dtype, root, at=0, **facts)
    assume(has_template(first))
    symmetric, mappings = data.draw(st.booleans(), "symmetric"), Mappings()
    calls = Kind(device, asked, mappings)
    try:
        calls.template = plan_of(first, device, asked, mappings)
    except InvalidUsageError:
        return
    if symmetric:
        mappings.add([(1 << 51) + (abs(each - rank) << 48) for each in range(size)], rank, 1 << 45)
    for number in range(1, 4):  # later calls follow earlier ones in the same memory
        count = data.draw(counts, "count")
        call = call_of(operation, rank, size, count, dtype, root, at=number, **facts)
        calls.require_alike(call, *plain_of(call))


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
    operation, dtype, mappings = OPERATIONS[name], np.dtype("f4"), Mappings()
    if symmetric:
        mappings.add([1 << 52, 1 << 51, 1 << 53], 1, 1 << 45)
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)
    launched = set()
    for count, at in ((4_000_000, 1), (4_000_000, 2), (4_400_000, 1), (40_000, 1)):
        call = call_of(operation, 1, 3, count, dtype, 0, in_place=False, at=at)
        plan = plan_of(call, device, asked, mappings)
        assert fill(plan, call)
        device.launch(plan)
        launched.add(str([each[:2] if isinstance(each, tuple) else each for each in device.launched]))
    assert len(launched) == 4


def test_a_call_that_does_not_fit_its_form_is_left_to_the_reader() -> None:
    device = Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0)
    dtype = np.dtype("f4")

    def plan(name: str, *, in_place: bool = False) -> CollectiveTemplate:
        return plan_of(call_of(OPERATIONS[name], 0, 2, 8, dtype, 0, in_place=in_place, at=0), device, "auto")

    here, there = 1 << 50, 1 << 51
    assert plan("Allreduce").fill((here, 6, None), (there, 6, None))
    assert not plan("Allreduce").fill((here, 6, None), (there, 7, None))
    assert not plan("Allreduce").fill((here, 0, None), (there, 0, None))
    assert not plan("Allgather").fill((here, 6, None), (there, 13, None))
    assert plan("Allgather").fill((here, 6, None), (there, 12, None))
    assert not plan("Alltoall").fill((here, 7, None), (there, 7, None))
    assert not plan("Allgather", in_place=True).fill((0, 0, None), (there, 7, None))
    # Buffers that overlap in one byte.
    for begin, fits in ((here + 24, True), (here + 23, False), (here - 24, True), (here - 23, False), (here, False)):
        assert plan("Allreduce").fill((here, 6, None), (begin, 6, None)) == fits
    assert plan("Allgather").fill((here, 6, None), (here - 48, 12, None))
    assert not plan("Allgather").fill((here, 6, None), (here - 44, 12, None))


def test_counts_of_a_buffer_that_is_cut_in_blocks_are_left_to_planning() -> None:
    """There a count says the elements of one block, and without a count the array has all blocks."""
    device = Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0)
    here, there = (DeviceArray(at, 10, np.dtype("f4")) for at in (1 << 50, 1 << 51))
    for name, counted in (("Allreduce", True), ("Bcast", True), ("Allgather", False), ("Alltoall", False)):
        send, receive = (None if name == "Bcast" else [here, 4, MPI.FLOAT]), [there, 4, MPI.FLOAT]
        arguments = Arguments(send, receive, MPI.SUM if name == "Allreduce" else None)
        plan = plan_of(Call(OPERATIONS[name], arguments, 0, 2), device, "auto")
        assert plan.takes(plain_array(send), plain_array(receive)) == counted
        assert plan.takes(plain_array(send and [here, MPI.FLOAT]), plain_array([there, MPI.FLOAT]))


def test_lists_that_one_plan_cannot_take_alike_are_of_different_kinds() -> None:
    """`PlanCache` takes buffers of one kind for calls of one form, and asks `takes` for the first call only."""
    device = Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0)
    here, there = (DeviceArray(at, 10, np.dtype("f4")) for at in (1 << 50, 1 << 51))
    call = Call(OPERATIONS["Alltoallv"], Arguments([here, [5, 5]], [there, [5, 5]]), 0, 2)
    plan = plan_of(call, device, "auto")
    kinds: dict[bool, set[Any]] = {True: set(), False: set()}
    for datatype in ([], [MPI.FLOAT]):
        for counts in ([], [10], [[5, 5]], [([5, 5], [0, 5])]):
            sent, received = (plain_array([array, *counts, *datatype]) for array in (here, there))
            if sent is not None and received is not None:
                kinds[plan.takes(sent, received)].add((sent[2], received[2]))
    assert all(kinds.values())
    assert not kinds[True] & kinds[False]
    in_bytes = plain_array([here, [5, 5], [0, 20], [MPI.FLOAT] * 2])
    assert in_bytes is not None and (in_bytes[2], in_bytes[2]) not in kinds[True]


def test_blocks_that_do_not_fit_their_array_or_each_other_are_left_to_planning() -> None:
    device = Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0)
    here, there = (DeviceArray(at, 10, np.dtype("f4")) for at in (1 << 50, 1 << 51))
    call = Call(OPERATIONS["Alltoallv"], Arguments([here, [5, 5]], [there, [5, 5]]), 0, 2)
    plan = plan_of(call, device, "auto")

    def fits(send: Any, receive: Any) -> bool:
        return plan.fill(plain_array(send), plain_array(receive))

    assert fits([here, [4, 6]], [there, [4, 6]])
    assert fits([here, ([4, 1], [6, 0])], [there, [4, 0]])
    assert not fits([here, [4, 6]], [there, [5, 5]])  # this rank sends itself 4, and takes 5
    assert not fits([here, [4, 7]], [there, [4, 6]])
    assert not fits([here, ([4, 1], [7, 0])], [there, [4, 0]])
    assert not fits([here, ([4, 1], [-1, 0])], [there, [4, 0]])
    assert not fits([here, [4, -1]], [there, [4, 0]])
    assert not fits([here, [4]], [there, [4]])
    assert not fits([here, [4, 1]], [here, [4, 1]])
    for empty in (None, MPI.IN_PLACE):
        assert plain_array([empty, [0, 0], MPI.INT]) is None
        assert plain_array([empty, 0, MPI.INT]) is None
    for spec in (
        [here, [4, 1.5]],
        [here, [4, True]],
        [here, 11],
        [here, -1],
        [here, [4, 1], [0]],
        [here, [4, 1], [0, 4], "f"],
    ):
        assert plain_array(spec) is None
