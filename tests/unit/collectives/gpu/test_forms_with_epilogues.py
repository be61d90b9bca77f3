"""A call with an epilogue that is filled into a template has the same launches as a call that is read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.call_templates import CollectiveTemplate, has_template
from mpicomm.collectives.operations import ALLREDUCE
from mpicomm.epilogues import Elementwise, Epilogue, fp8, layer_norm, rms_norm
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.filled_calls import Device, Kind, plan_of

pytest.importorskip("ml_dtypes")

BF16 = "bfloat16"
Make = Callable[[str, int, str], DeviceArray]
"""Makes an array of this name, with so many elements of a type."""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def rms(make: Make, rows: int, hidden: int) -> Epilogue:
    return rms_norm(make("residual", rows * hidden, BF16), make("weight", hidden, BF16))


def rms_with_bias(make: Make, rows: int, hidden: int) -> Epilogue:
    linear_bias = make("linear_bias", hidden, BF16)
    return rms_norm(make("residual", rows * hidden, BF16), make("weight", hidden, "f4"), linear_bias=linear_bias)


def layer(make: Make, rows: int, hidden: int) -> Epilogue:
    return layer_norm(make("residual", rows * hidden, BF16), make("weight", hidden, BF16), make("bias", hidden, BF16))


def to_scaled_rows(make: Make, rows: int, hidden: int) -> Epilogue:
    scales = make("scales", rows * (hidden // 64), "f4")
    return rms_norm(make("residual", rows * hidden, BF16), make("weight", hidden, BF16), scales=scales)


def to_tiles(make: Make, rows: int, hidden: int) -> Epilogue:
    """Codes of 4 bits."""
    arrays = make("residual", rows * hidden, BF16), make("weight", hidden, BF16)
    scales = make("scales", -(-rows // 128) * 128 * -(-hidden // 64) * 4, "float8_e4m3fn")
    return rms_norm(*arrays, scales=scales, scale=make("scale", 1, "f4"), scale_layout="128x4")


def to_codes(make: Make, rows: int, hidden: int) -> Epilogue:
    return rms_norm(make("residual", rows * hidden, BF16), make("weight", hidden, BF16), scale=0.5)


def by_element(make: Make, rows: int, hidden: int) -> Epilogue:
    return Elementwise("v * factor + bias[i % n]", factor=0.5, n=hidden, bias=make("bias", hidden, BF16))


def converting(make: Make, rows: int, hidden: int) -> Epilogue:
    return fp8(make("scale", 1, "f4"))


RESULTS = {
    rms: BF16,
    rms_with_bias: BF16,
    layer: BF16,
    to_scaled_rows: "float8_e4m3fn",
    to_tiles: "u1",
    to_codes: "float8_e5m2",
    by_element: BF16,
    converting: "float8_e4m3fn",
}
"""Epilogues, and the types of their results."""


class CallAt:
    """A call of ``rows`` rows with its arrays at addresses that begin at ``at``, or ``moved`` from there by name."""

    def __init__(
        self,
        of: Any,
        rows: int,
        hidden: int,
        at: int,
        *,
        in_place: bool = False,
        moved: dict[str, int] | None = None,
        more: dict[str, int] | None = None,
        size: int = 3,
        rank: int = 1,
    ) -> None:
        self._moved, self._more, self._at, self._arrays = moved or {}, more or {}, at, 0
        count, result = rows * hidden, RESULTS[of]
        send: Any = self._make("send", count, BF16)
        receive = self._make("receive", count // (2 if result == "u1" else 1), result)
        self.given = MPI.IN_PLACE if in_place and result == BF16 else send, receive
        self.epilogue = of(self._make, rows, hidden)
        self._ranks = rank, size

    def _make(self, name: str, count: int, dtype: str) -> DeviceArray:
        self._arrays += 1
        begin = (self._arrays << 45) + self._at + self._moved.get(name, 0)
        return DeviceArray(begin, count + self._more.get(name, 0), dtype_named(dtype))

    def read(self) -> Call:
        return Call(ALLREDUCE, Arguments(*self.given, MPI.SUM, epilogue=self.epilogue), *self._ranks)

    def key(self) -> Any:
        return self.epilogue.key()

    def fill(self, plan: CollectiveTemplate) -> bool:
        """Fill the call into a plan as `PlanCache` does."""
        assert plan.takes(*self.plain())
        return plan.fill(*self.plain())

    def plain(self) -> list[Any]:
        return [*map(plain_array, self.given), *self.key()[1]]


@given(data=st.data())
def test_a_filled_call_is_launched_as_if_it_had_been_read(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 8), "size")
    rank = data.draw(st.integers(0, size - 1), "rank")
    asked = data.draw(st.sampled_from(["auto", "auto", "one_shot", "two_shot", "ring", "copy_engine"]), "asked")
    of = data.draw(st.sampled_from([*RESULTS]), "epilogue")
    # Rows of whole packets or not, and rows that one group of threads takes only if there are many.
    hidden = 64 * data.draw(st.sampled_from([1, 3, 64, 257, 300]), "hidden")
    if of not in (to_scaled_rows, to_tiles):
        hidden += data.draw(st.sampled_from([0, 0, 4]), "more")
    counts = st.integers(1, 40) | st.integers(1, 3000) | st.sampled_from([15, 16, 17, 131, 132, 133])
    in_place = data.draw(st.booleans(), "in place")
    device = Device(
        regions=data.draw(st.booleans(), "regions"),
        size=size,
        rank=rank,
        blocks=data.draw(st.sampled_from([16, 132]), "blocks"),
        link_speed=1.0,
    )
    symmetric, mappings = data.draw(st.booleans(), "symmetric"), Mappings()
    if symmetric:
        mappings.add([(2 << 45) + (abs(each - rank) << 55) for each in range(size)], rank, 1 << 44)
    key, kind = None, Kind(device, asked, mappings)
    for number in range(4):
        rows = data.draw(counts, f"rows of call {number}")
        names = data.draw(st.sets(st.sampled_from(["residual", "weight", "bias", "receive", "send"])), "odd")
        moved = dict.fromkeys(names, 4)  # so they are not aligned
        call = CallAt(of, rows, hidden, number << 12, in_place=in_place, moved=moved, size=size, rank=rank)
        read = call.read()
        assert has_template(read)
        key = key or call.key()[0]
        assert call.key()[0] == key  # `PlanCache` finds the form of the first call
        kind.require_alike(read, *call.plain())


NAMES = ("send", "receive", "residual", "weight", "scales", "scale")


@pytest.mark.parametrize("asked", ["one_shot", "two_shot"])
@pytest.mark.parametrize("rows", [5, 800])
def test_the_launches_of_another_call_are_others(asked: str, rows: int) -> None:
    """A stale address or number of rows would be noticed above."""
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)
    plan = plan_of(CallAt(to_tiles, 7, 128, 0).read(), device, asked)
    device.scratch.of(1 << 20)
    launched = []
    for number, more in [(rows, {}), (rows + 1, {}), *((rows, {name: 16}) for name in NAMES)]:
        assert CallAt(to_tiles, number, 128, 0, moved=more).fill(plan)
        device.launch(plan)
        launched.append(device.launched)
    assert len({*map(str, launched)}) == len(launched) == 2 + len(NAMES)


def test_a_wrong_call_is_left_to_the_reader_which_refuses_it() -> None:
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)
    plans = {of: plan_of(CallAt(of, 7, 128, 0).read(), device, "auto") for of in RESULTS}
    device.scratch.of(1 << 20)
    onto = 1 << 45  # the distance of two arrays
    wrong: list[tuple[Any, dict[str, Any]]] = [
        *(
            (of, {"more": {"residual": more}})
            for of in RESULTS
            for more in (1, -1)
            if of not in (by_element, converting)
        ),
        *((of, {"more": {"receive": more}}) for of in RESULTS for more in (1, -1)),
        *((of, {"more": {"send": more}}) for of in RESULTS for more in (1, -1)),
        *((of, {"more": {"send": 1, "receive": 1, "residual": 1}}) for of in (rms, to_codes)),  # no whole rows
        *((of, {"more": {"scales": more}}) for of in (to_scaled_rows, to_tiles) for more in (1, -1)),
        (rms, {"moved": {"residual": -onto}}),
        (rms, {"moved": {"residual": -2 * onto}}),
        (rms, {"moved": {"weight": -onto + 9 * 128 * 2 - 2}}),
        (rms, {"moved": {"weight": -2 * onto}}),
        (rms, {"moved": {"send": onto + 16}}),
        (to_tiles, {"moved": {"scales": -4 * onto}}),
        (to_tiles, {"moved": {"scale": -onto}}),
        (converting, {"moved": {"receive": -onto}}),
        (converting, {"moved": {"scale": -onto}}),
    ]
    for of, change in wrong:
        call = CallAt(of, 9, 128, 0, **change)
        assert not call.fill(plans[of]), (of, change)
        with pytest.raises((InvalidUsageError, MPI.Exception)):
            call.read()
        assert CallAt(of, 9, 128, 0).fill(plans[of])


def test_a_converting_call_that_exceeds_the_scratch_memory_is_left_to_the_reader() -> None:
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)
    plan = plan_of(CallAt(converting, 7, 64, 0).read(), device, "auto")
    device.scratch.of(8 * 64 * 2)
    assert CallAt(converting, 8, 64, 0).fill(plan)
    assert not CallAt(converting, 9, 64, 0).fill(plan)
    assert device.scratch.nbytes == 8 * 64 * 2


def test_an_index_beyond_an_array_is_left_to_the_reader() -> None:
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)

    def arrays(count: int) -> list[DeviceArray]:
        return [DeviceArray(at << 40, many, np.dtype("f4")) for at, many in ((1, count), (2, count), (3, 9))]

    def read(count: int) -> Call:
        send, receive, bias = arrays(count)
        return Call(ALLREDUCE, Arguments(send, receive, MPI.SUM, epilogue=Elementwise("v + bias[i]", bias=bias)), 1, 3)

    plan = plan_of(read(5), device, "auto")
    for count in (9, 10, 9):
        *buffers, bias = map(plain_array, arrays(count))
        fill: Any = plan.fill
        assert bias is not None and fill(*buffers, bias[:2]) == (count == 9)
    with pytest.raises(InvalidUsageError):
        read(10)


def test_calls_of_different_kinds_have_different_forms() -> None:
    epilogues = [CallAt(of, 7, 128, 0).epilogue for of in RESULTS] + [CallAt(rms, 7, 256, 0).epilogue]
    residual, weight = (DeviceArray(at << 40, 128, np.dtype("f4")) for at in (1, 2))
    facts: list[dict[str, Any]] = [{}, {"eps": 0.5}, {"scale": 2.0}, {"scale": 3.0}, {"linear_bias": weight}]
    facts += [{"scales": weight, "scale_layout": layout} for layout in ("linear", "128x4")]
    epilogues += [make(residual, weight, **more) for make in (rms_norm, layer_norm) for more in facts]
    epilogues += [Elementwise("v * n", n=number) for number in (1, 1.0, 2.0)]
    keys = [epilogue.key()[0] for epilogue in epilogues]
    assert None not in keys and len({*map(repr, keys)}) == len(keys)


@pytest.mark.parametrize("of", [layer, by_element])
def test_a_plan_keeps_no_array_of_a_call_alive(of: Any) -> None:
    device = Device(regions=True, size=3, rank=1, blocks=132, link_speed=1.0)
    call = CallAt(of, 5, 64, 0)
    arrays = [weakref.ref(array) for array in (*call.given, *call.epilogue.arrays.values())]
    plan = plan_of(call.read(), device, "auto")
    del call
    gc.collect()
    assert [array() for array in arrays] == [None] * len(arrays)
    assert CallAt(of, 7, 64, 4096).fill(plan)


def test_an_epilogue_with_an_array_that_is_not_plain_has_no_key() -> None:
    weight = DeviceArray(1 << 40, 4, np.dtype("f4"))
    assert rms_norm(np.zeros(4, np.float32), weight).key() == (None, ())
