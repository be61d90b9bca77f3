"""A call with counts on the device that is filled into a template has the same launch as a call that is read."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.counted_template import CountedTemplate
from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import plain_arrays
from mpicomm.mpi.plain_arrays import has_template_kind, known_buffer, plain_array
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.rigs.filled_calls import Device, as_enqueued


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def array(pointer: int, count: int, dtype: str = "i8") -> DeviceArray:
    return DeviceArray(pointer, count, np.dtype(dtype))


plain_or_counted = partial(known_buffer, counts_on_device=True)


def device_of(size: int, rank: int = 0) -> Device:
    return Device(regions=False, size=size, rank=rank, blocks=132, link_speed=1.0)


def plan_of(call: Call, device: Device) -> CountedTemplate:
    assert call.counted is not None
    return CountedTemplate(call.signature, call.counted, device.domain, cast(Any, device))


def require_read_alike(plan: CountedTemplate, call: Call, device: Device) -> None:
    """Require that the call in ``plan`` is the call as the engine reads it."""
    assert call.counted is not None
    read = plan_of(call, device)
    steps = read.read(call.counted)
    device.launch(plan)
    assert device.launched == [*map(as_enqueued, steps)]
    assert plan.text == plan.words == read.text


@given(data=st.data())
def test_a_filled_call_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    device = device_of(size, data.draw(st.integers(0, size - 1), "rank"))
    dtype = np.dtype(data.draw(st.sampled_from(["f4", "i2", "u1", "c16"])))
    kinds = [data.draw(st.sampled_from(["i4", "i8"]), "counts") for _ in range(2)]
    places = [data.draw(st.sampled_from(["", "i4", "i8", "host", "distance"]), "displacements") for _ in range(2)]
    rooms = st.integers(0, 9) | st.integers(0, 90_000) | st.integers(0, 1 << 29)
    plan = None
    for number in range(4):
        slots = data.draw(st.permutations(range(1, 7)), "order")
        specs: list[Any] = []
        for side, kind, place in zip(range(2), kinds, places, strict=True):
            room = data.draw(rooms, f"room of call {number}")
            buffer = array(slots[side] << 50, room, dtype.str)
            counts = array((slots[2 + side] << 50) + 64 * number, size, kind)
            displs: Any = None
            if place == "host":
                numbers = st.lists(st.integers(-3, 1 << 40), min_size=size, max_size=size)
                makers: list[Any] = [list, tuple, np.array]
                displs = data.draw(st.sampled_from(makers))(data.draw(numbers))
            elif place == "distance":
                displs = data.draw(st.integers(-3, 1 << 40))
            elif place:
                displs = array((slots[4 + side] << 50) + 128 * number, size, place)
            forms: list[Any] = [[buffer, (counts, displs)], (buffer, counts, displs, None)]
            forms += [[buffer, counts]] * (displs is None)
            specs.append(data.draw(st.sampled_from(forms)))
        call = Call(ALLTOALLV, Arguments(*specs), device.domain.rank, size)
        sent, received = map(plain_or_counted, specs)
        plan = plan or plan_of(call, device)
        assert sent is not None and received is not None and plan.takes(sent, received)
        assert plan.fill(sent, received)
        require_read_alike(plan, call, device)


@given(data=st.data())
def test_calls_that_the_reader_refuses_are_left_to_the_reader(data: st.DataObject) -> None:
    """All arrays lie near each other, so that many calls write into memory that they read."""
    device, kind = device_of(2), data.draw(st.sampled_from(["i4", "i8"]))
    places = [data.draw(st.booleans(), "displacements") for _ in range(2)]

    def spec(address: Any, room: int, has_places: bool) -> Any:
        counts = array(address(), 2, kind)
        return [array(address(), room, "f4"), (counts, array(address(), 2, kind) if has_places else None)]

    apart = iter(range(1 << 20, 1 << 30, 4096))
    first = [spec(lambda: next(apart), 4, place) for place in places]
    plan = plan_of(Call(ALLTOALLV, Arguments(*first), 0, 2), device)
    for _ in range(5):
        near = st.integers(0, 60).map(lambda words: 4096 + 4 * words)
        rooms = [data.draw(st.integers(0, 9), "room") for _ in range(2)]
        specs = [spec(partial(data.draw, near), *of_side) for of_side in zip(rooms, places, strict=True)]
        sent, received = map(plain_or_counted, specs)
        fills = plan.fill(sent, received)
        try:
            call = Call(ALLTOALLV, Arguments(*specs), 0, 2)
        except InvalidUsageError as error:
            assert "overlap" in str(error)
            assert not fills
        else:
            assert fills or 0 in rooms
            if fills:
                require_read_alike(plan, call, device)


X, Y = array(1 << 50, 20, "f4"), array(2 << 50, 30, "f4")
COUNTS, CAME, DISPLS = array(3 << 50, 2), array(4 << 50, 2), array(5 << 50, 2)


def test_more_elements_than_received_counts_can_say_are_left_to_the_reader() -> None:
    for kind, fits in (("i4", False), ("i8", True)):
        came = array(4 << 50, 2, kind)
        plan = plan_of(Call(ALLTOALLV, Arguments([X, COUNTS], [Y, came]), 0, 2), device_of(2))
        for room, filled in (((1 << 31) - 1, True), (1 << 31, fits)):
            received = plain_or_counted([array(2 << 50, room, "f4"), came])
            assert plan.fill(plain_or_counted([X, COUNTS]), received) == filled


def test_calls_that_one_plan_cannot_take_alike_are_of_different_kinds() -> None:
    specs = [
        [X, [1, 2]],
        [X, MPI.FLOAT],
        X,
        *([X, counts] for counts in (COUNTS, array(3 << 50, 2, "i4"), array(3 << 50, 3), array(3 << 50, 2, "u8"))),
        *([X, (COUNTS, displs)] for displs in (DISPLS, array(5 << 50, 2, "i4"), array(5 << 50, 1), [0, 1], [0])),
        [X, COUNTS, MPI.FLOAT],
        [array(1 << 50, 20), COUNTS],
    ]
    kinds = [read[2] for read in map(plain_or_counted, specs) if read is not None]
    assert len(kinds) == len(specs) == len({*kinds})
    alike = plain_or_counted([array(7 << 50, 5, "f4"), array(8 << 50, 2)])
    assert alike is not None and alike[2] == kinds[3]


@pytest.mark.parametrize(
    "spec",
    [
        [X, ([1, 2], DISPLS)],
        [X, (None, DISPLS)],
        [X, (COUNTS, [0, 1 << 63])],
        [X, (COUNTS, -(1 << 63) - 1)],
        [X, (COUNTS, 1 << 63)],
        [X, (COUNTS, [])],
        [X, (COUNTS, True)],
        [X, (COUNTS, [0, 0.5])],
        [X, COUNTS, MPI.DOUBLE],
        [X, [COUNTS, 2]],
        [X, ([COUNTS, 2], None)],
        [MPI.IN_PLACE, COUNTS],
        [None, COUNTS, MPI.FLOAT],
        [np.zeros(4), COUNTS],
    ],
)
def test_other_lists_have_no_form(spec: Any) -> None:
    read = plain_or_counted(spec)
    assert read is None or not has_template_kind(read)


def test_an_address_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """With counts of the host an address may have more elements than it says. Such a call takes only those."""
    place = SimpleNamespace(managed=False, nbytes=1 << 20, device=0)
    monkeypatch.setattr(plain_arrays, "place_of", lambda address: place)
    address = MPI.memory.fromaddress(1 << 50, 80)
    assert plain_or_counted([address, [1, 2], MPI.FLOAT]) is not None
    assert plain_or_counted([address, COUNTS, MPI.FLOAT]) is None


def test_only_an_alltoallv_takes_counts_on_the_device() -> None:
    """The host reads them in all other calls, and they may have changed."""
    assert plain_array([X, COUNTS]) is None
    assert plain_array([X, (COUNTS, DISPLS)]) is None
