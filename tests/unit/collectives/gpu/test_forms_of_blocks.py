"""A call with blocks of any lengths that is filled into a template has the same launch as a call that is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.call_templates import has_template
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.mpi.plain_arrays import has_template_kind, plain_array
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.rigs.filled_calls import Device, Kind, as_read, plan_of

OPERATIONS_OF_BLOCKS = [
    row for row in OPERATIONS.values() if "vector" in (row.send, row.receive) and not row.of_neighbors
]

OPERATIONS_OF_NEIGHBORS = [row for row in OPERATIONS.values() if row.of_neighbors and row.send != "typed"]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def blocks_of(counts: list[int], gaps: list[int]) -> tuple[list[int], list[int]]:
    """Counts, and displacements of blocks with gaps before them."""
    displs, end = [], 0
    for count, gap in zip(counts, gaps, strict=True):
        displs.append(end + gap)
        end += gap + count
    return counts, displs


@given(data=st.data())
def test_a_filled_call_with_blocks_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank, root = data.draw(st.integers(0, size - 1), "rank"), data.draw(st.integers(0, size - 1), "root")
    operation = data.draw(st.sampled_from(OPERATIONS_OF_BLOCKS), "operation")
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "i2", "u1", "c16", "g"])))
    regions = data.draw(st.booleans(), "regions")
    device = Device(regions=regions, size=size, rank=rank, blocks=data.draw(st.sampled_from([16, 132])), link_speed=1.0)
    own = rank if operation.rooted == "" else root
    counts_of = st.lists(
        st.integers(0, 9) | st.integers(0, 90_000) | st.integers(0, 9_000_000), min_size=size, max_size=size
    )
    gaps_of = st.lists(st.integers(0, 3), min_size=size, max_size=size)

    def draw(number: int) -> tuple[Any, Any]:
        """Two arguments with blocks, at addresses that depend on the number of the call."""
        counts = {name: data.draw(counts_of, f"{name} of call {number}") for name in ("send", "receive")}
        counts["send"][own] = counts["receive"][own]
        arguments = []
        for name, shape, base in (("send", operation.send, 1 << 50), ("receive", operation.receive, 1 << 51)):
            single = counts["receive" if name == "send" else "send"][own if rank == own or not operation.rooted else 0]
            each, displs = blocks_of(counts[name], data.draw(gaps_of))
            total = displs[-1] + each[-1] + 1 if shape == "vector" else single
            array = DeviceArray(base + 128 * number, total, dtype)
            forms: list[Any] = [[array, (each, displs)], [array, each, displs, None], (array, (tuple(each), displs))]
            arguments.append(data.draw(st.sampled_from(forms)) if shape == "vector" else array)
        send, receive = arguments
        return send, receive

    def call(arguments: tuple[Any, Any]) -> Call:
        return Call(operation, Arguments(*arguments, None, root), rank, size)

    kind = Kind(device)
    for number in range(4):
        arguments = draw(number)
        kind.require_alike(call(arguments), *map(plain_array, arguments))


@pytest.mark.parametrize("operation", OPERATIONS_OF_BLOCKS, ids=str)
def test_a_kind_whose_first_call_is_empty_moves_the_own_block_of_later_calls(operation: Operation) -> None:
    device = Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0)

    def arguments(count: int) -> list[Any]:
        shapes = (operation.send, 1 << 50), (operation.receive, 1 << 51)
        arrays = [(shape, DeviceArray(at, count * (1 + (shape == "vector")), np.dtype("f4"))) for shape, at in shapes]
        return [[array, [count] * 2] if shape == "vector" else array for shape, array in arrays]

    def call(count: int) -> Call:
        return Call(operation, Arguments(*arguments(count)), 0, 2)

    plan = plan_of(call(0), device, "auto")
    _, launched, _ = as_read(call(100), device)
    sent, received = map(plain_array, arguments(100))
    assert sent is not None and received is not None and plan.fill(sent, received)
    device.launch(plan)
    assert device.launched == launched


@given(data=st.data())
def test_a_filled_call_with_datatypes_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank, operation = data.draw(st.integers(0, size - 1), "rank"), OPERATIONS["Alltoallw"]
    device = Device(regions=data.draw(st.booleans()), size=size, rank=rank, blocks=132, link_speed=1.0)
    in_place, kind = data.draw(st.booleans(), "in place"), Kind(device)
    pair = MPI.FLOAT.Create_contiguous(2).Commit()
    blocks_of_rank = st.lists(
        st.tuples(
            st.sampled_from([MPI.FLOAT, MPI.INT16_T, MPI.BYTE, pair]),
            st.integers(0, 9) | st.integers(0, 90_000) | st.integers(0, 9_000_000),
            st.integers(0, 30),  # the bytes before the block
        ),
        min_size=size,
        max_size=size,
    )
    for number in range(4):
        arguments: list[Any] = [MPI.IN_PLACE, None]
        own = None
        for index in range(in_place, 2):
            blocks = data.draw(blocks_of_rank, f"blocks of call {number}")
            blocks[rank] = own = own or blocks[rank]
            displs, end = [], 0
            for datatype, count, gap in blocks:
                displs.append(end + gap)
                end += gap + count * datatype.size
            array = DeviceArray((1 << 50 + index) + 128 * number, end // 4 + 1, np.dtype("f4"))
            datatypes, counts, _ = zip(*blocks, strict=True)
            arguments[index] = [array, counts, displs, [*datatypes]]
        kind.require_alike(Call(operation, Arguments(*arguments), rank, size), *map(plain_array, arguments))
    pair.Free()


def test_datatypes_with_gaps_are_left_to_the_reader() -> None:
    here, there = (DeviceArray(at, 10, np.dtype("f4")) for at in (1 << 50, 1 << 51))
    pair = MPI.FLOAT.Create_contiguous(2)  # kernels need no committed datatype
    wide, shifted = pair.Create_resized(0, 12).Commit(), MPI.FLOAT.Create_hindexed([1], [4]).Commit()

    def blocks(*datatypes: Any, counts: Any = (1, 2), displs: Any = (0, 8), array: Any = here) -> Any:
        return [array, counts, displs, datatypes]

    def call(*datatypes: Any) -> Call:
        arguments = blocks(*datatypes), blocks(*datatypes, array=there)
        return Call(OPERATIONS["Alltoallw"], Arguments(*arguments), 0, 2)

    assert has_template(call(MPI.FLOAT, pair)) and has_template(call(pair, MPI.DOUBLE))
    assert not has_template(call(MPI.FLOAT, wide))
    read = plain_array(blocks(MPI.FLOAT, pair))
    assert read is not None and (read[:2], read[3:]) == ((1 << 50, 40), ((4, 16), (0, 8)))
    assert call(shifted, shifted).scratch_nbytes == 0
    for spec in (
        blocks(MPI.FLOAT, wide),
        blocks(MPI.FLOAT, shifted),
        blocks(MPI.FLOAT, MPI.SHORT_INT),
        blocks(MPI.FLOAT, MPI.DATATYPE_NULL),
        blocks(MPI.FLOAT, "f"),
        blocks(MPI.FLOAT),
        blocks(pair, pair, counts=[1, 1.5]),
        blocks(pair, pair, counts=None),
        blocks(pair, pair, displs=None),
        blocks(pair, pair, counts=[1]),
        blocks(pair, pair, displs=[0]),
        blocks(pair, pair, array=None),
    ):
        unknown = plain_array(spec)
        assert unknown is None or not has_template_kind(unknown)
    plan = plan_of(call(MPI.FLOAT, pair), Device(regions=True, size=2, rank=0, blocks=132, link_speed=1.0), "auto")

    def fits(send: Any, receive: Any) -> bool:
        return plan.fill(plain_array(send), plain_array(receive))

    other = blocks(MPI.BYTE, MPI.BYTE, counts=[4, 1], displs=[0, 39], array=there)
    assert fits(blocks(MPI.FLOAT, pair), other)
    assert not fits(blocks(pair, pair), other)  # this rank sends itself 8 bytes, and takes 4
    assert not fits(blocks(MPI.FLOAT, pair, displs=[0, 25]), other)
    assert not fits(blocks(MPI.FLOAT, pair, counts=[1, -1]), other)
    for datatype in (pair, wide, shifted):
        datatype.Free()


@given(data=st.data())
def test_a_filled_call_with_recvcounts_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank, operation = data.draw(st.integers(0, size - 1), "rank"), OPERATIONS["Reduce_scatter"]
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "i2", "c16"])))
    device = Device(regions=data.draw(st.booleans()), size=size, rank=rank, blocks=132, link_speed=1.0)
    in_place, kind = data.draw(st.booleans(), "in place"), Kind(device)
    for number in range(4):
        counts_of = st.lists(st.integers(0, 9) | st.integers(0, 9_000_000), min_size=size, max_size=size)
        counts = data.draw(counts_of.filter(any), f"counts of call {number}")
        send = DeviceArray((1 << 50) + 128 * number, sum(counts), dtype)
        receive = DeviceArray((1 << 51) + 128 * number, counts[rank], dtype)
        given: tuple[Any, Any] = (MPI.IN_PLACE, send) if in_place else (send, receive)
        sent: Any = (*plain_array(send), tuple(counts), None)  # type: ignore[misc]
        received = plain_array(MPI.IN_PLACE if in_place else receive)
        kind.require_alike(Call(operation, Arguments(*given, MPI.SUM, 0, counts), rank, size), sent, received)
        # Recvcounts must cut all of the input.
        assert not kind.template.fill((sent[0], sent[1] + 1, *sent[2:]), received)


def test_a_result_longer_than_the_scratch_memory_is_left_to_the_reader() -> None:
    """Only a call that is read may take more memory."""
    device, dtype = Device(regions=True, size=2, rank=1, blocks=132, link_speed=1.0), np.dtype("f4")
    arguments = Arguments(MPI.IN_PLACE, DeviceArray(1 << 50, 9, dtype), MPI.SUM, 0, [9, 0])
    plan = plan_of(Call(OPERATIONS["Reduce_scatter"], arguments, 1, 2), device, "auto")

    def fits(*counts: int) -> bool:
        return plan.fill((1 << 50, 9, None, counts, None), plain_array(MPI.IN_PLACE))

    assert fits(9, 0)
    assert not fits(8, 1)
    device.scratch.of(32)
    assert fits(1, 8)
    assert not fits(0, 9)
    for wrong in ((1, 1 << 60), (2, 8), (1, 7), (10, -1), (9,)):
        assert not fits(*wrong)
    assert device.scratch.largest.nbytes == 32


@given(data=st.data())
def test_a_filled_call_of_neighbours_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank = data.draw(st.integers(0, size - 1), "rank")
    operation = data.draw(st.sampled_from(OPERATIONS_OF_NEIGHBORS), "operation")
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "i2", "c16"])))
    device = Device(regions=False, size=size, rank=rank, blocks=132, link_speed=1.0)
    order = data.draw(st.permutations(range(size)))
    peers = [order[: data.draw(st.integers(1, size))] for _ in range(2)]
    sources, destinations = ((*ranks, *[MPI.PROC_NULL] * data.draw(st.integers(0, 1))) for ranks in peers)
    own = rank in sources
    assume(own == (rank in destinations))
    neighborhood, kind = Neighborhood(sources, destinations), Kind(device)
    for number in range(4):
        count = data.draw(st.integers(0, 9_000), f"count of call {number}")
        arguments: list[Any] = []
        for shape, ranks, base in ((operation.send, destinations, 1 << 50), (operation.receive, sources, 1 << 51)):
            at = base + 128 * number
            if shape == "vector":
                drawn = data.draw(st.lists(st.integers(0, 900), min_size=len(ranks), max_size=len(ranks)))
                counts = [count if own and peer == rank else each for peer, each in zip(ranks, drawn, strict=True)]
                counts, displs = blocks_of(counts, [number] * len(ranks))
                total = displs[-1] + counts[-1] + 1
                arguments.append([DeviceArray(at, total, dtype), (counts, displs)])
            else:
                arguments.append(DeviceArray(at, count * (len(ranks) if shape == "blocks" else 1), dtype))
        read = Call(operation, Arguments(*arguments), rank, size, "auto", neighborhood)
        assert has_template(read)
        kind.require_alike(read, *map(plain_array, arguments))


def test_a_rank_that_is_a_neighbour_twice_has_no_template() -> None:
    here, there = (DeviceArray(at, 8, np.dtype("f4")) for at in (1 << 50, 1 << 51))
    for ranks, form in (((0, 1), True), ((1, 1), False)):
        neighborhood = Neighborhood(ranks, ranks)
        call = Call(OPERATIONS["Neighbor_alltoall"], Arguments(here, there), 0, 2, "auto", neighborhood)
        assert has_template(call) == form
