"""Calls with an epilogue that are filled into the plans of their forms have NumPy's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.operations import ALLREDUCE
from mpicomm.epilogues import Elementwise, Epilogue, fp8, layer_norm, rms_norm
from mpicomm.epilogues.norm import BoundNorm
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.references.reductions import Array, dtype_named, reduced, require_same
from tests.kernels.build import Builds
from tests.kernels.epilogue_rig import bound, finished
from tests.kernels.machine import Machine, Place, RunFailedError
from tests.kernels.test_filled_calls import FilledRig

BF16, FP8 = "bfloat16", "float8_e4m3fn"
HIDDEN = 256 + 32
ROWS = (5, 1, 13, 6, 40)
"""For one step and for several, and for fewer rows than a kernel normalises in two hops."""
Arrays = dict[str, Any]


def rms(arrays: Arrays) -> Epilogue:
    return rms_norm(arrays["residual"], arrays["weight"], 1e-3)


def to_groups(arrays: Arrays) -> Epilogue:
    return rms_norm(arrays["residual"], arrays["weight"], 1e-3, scales=arrays["scales"])


def to_codes(arrays: Arrays) -> Epilogue:
    return layer_norm(arrays["residual"], arrays["weight"], arrays["bias"], 1e-3, scale=arrays["scale"])


def by_element(arrays: Arrays) -> Epilogue:
    return Elementwise("v * 0.5 + bias[i % n]", bias=arrays["bias"], n=HIDDEN)


def by_scale(arrays: Arrays) -> Epilogue:
    return fp8(arrays["scale"])


RESULTS = {rms: BF16, to_groups: FP8, to_codes: FP8, by_element: BF16, by_scale: FP8}


class FinishedCalls:
    """All-reduces between the ranks of a machine, each of other data in other memory."""

    def __init__(self, builds: Builds, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        read_device_arrays(monkeypatch)
        self.rig = FilledRig(Machine(builds, size))
        self.rig.keep_scratch(max(ROWS) * HIDDEN * 2)
        self._rng = np.random.default_rng(size)
        self._checks: list[tuple[Place, Array]] = []
        self._number = 0

    def enqueue(self, of: Any, rows: int, algorithm: str, *, in_place: bool = False, offset: int = 0) -> None:
        """Enqueue a call; its arrays lie ``offset`` bytes after a multiple of 16."""
        rig, rng, result = self.rig, self._rng, RESULTS[of]
        count = rows * HIDDEN
        self._number += 1
        for rank in range(rig.size):  # so that no call has the addresses of the call before
            rig.machine.allocate(rank, 4096 * self._number)

        def numbers(many: int, dtype: str) -> Array:
            return rng.standard_normal(many).astype(dtype_named(dtype))

        arrays = {
            "residual": numbers(count, BF16),
            "weight": numbers(HIDDEN, BF16),
            "bias": numbers(HIDDEN, BF16),
            "scale": np.array([rng.integers(1, 9)], np.float32),
            "scales": np.zeros(rows * HIDDEN // 32, np.float32),
        }
        parts = [numbers(count, BF16) for _ in range(rig.size)]

        def put(rank: int, array: Array) -> tuple[Place, DeviceArray]:
            place = rig.machine.place(rank, array, offset=offset)
            return place, DeviceArray(place.address, array.size, array.dtype)

        placed = [{name: put(rank, array) for name, array in arrays.items()} for rank in range(rig.size)]
        expected = finished(bound(of(arrays), BF16, result, count), reduced("sum", parts))  # it changes the arrays, too
        for rank, part in enumerate(parts):
            source = target = put(rank, part)
            if not in_place:
                target = put(rank, np.zeros(count, dtype_named(result)))
            epilogue = of({name: array for name, (_, array) in placed[rank].items()})
            given: Any = MPI.IN_PLACE if in_place else source[1], target[1]
            arguments = Arguments(given[0], given[1], MPI.SUM, epilogue=epilogue)
            call = Call(ALLREDUCE, arguments, rank, rig.size, algorithm)
            kinds, memory = epilogue.key()
            rig.launch(rank, call, algorithm, (in_place, kinds), *memory)
            self._checks.append((target[0], expected))
            self._checks += [(placed[rank][name][0], array) for name, array in arrays.items()]

    def run(self, seed: int = 0) -> None:
        """Run all that was enqueued, and compare with NumPy."""
        self.rig.machine.run(seed=seed, jitter_us=100)
        for place, expected in self._checks:
            require_same(place.view(expected.dtype).copy(), expected)
        self._checks.clear()
        self.rig.machine.clear()


@pytest.mark.parametrize(
    ("size", "of", "algorithm", "in_place", "kernels"),
    [
        (2, rms, "one_shot", True, {"mpicomm_packets"}),
        (3, rms, "two_shot", True, {"mpicomm_packets", "mpicomm_norm"}),
        (3, to_groups, "one_shot", False, {"mpicomm_packets"}),
        (2, to_groups, "two_shot", False, {"mpicomm_packets", "mpicomm_norm"}),
        (2, to_codes, "ring", False, {"mpicomm_norm"}),  # after several other launches
        (2, by_element, "two_shot", False, {"mpicomm_packets"}),
        (2, by_scale, "one_shot", False, {"mpicomm_packets"}),
    ],
)
def test_filled_calls_with_any_number_of_rows(
    builds: Builds,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    of: Any,
    algorithm: str,
    in_place: bool,
    kernels: set[str],
) -> None:
    calls = FinishedCalls(builds, monkeypatch, size)
    for number, rows in enumerate(ROWS):
        calls.enqueue(of, rows, algorithm, in_place=in_place, offset=4 * (number == 3))
        if number != 1:  # the second call and the third run one after the other
            calls.run(seed=rows)
    assert {*calls.rig.launched} == {algorithm}
    assert calls.rig.kernels == kernels


FIELDS = ("", "output", "residual", "weight", "scales", "rows")


@pytest.mark.parametrize(
    ("stale", "after"), [*((field, after) for field in FIELDS for after in (False, True)), ("rows_of_shard", False)]
)
def test_a_stale_value_of_an_epilogue_is_noticed(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, stale: str, after: bool
) -> None:
    """The negative control of the test above."""
    first: dict[int, Any] = {}

    def keep(epilogue: Any, norm: Any) -> None:
        kept = first.setdefault(id(epilogue), type(norm).from_buffer_copy(norm))
        if stale:
            setattr(norm, stale, getattr(kept, stale))

    fused, following = BoundNorm.fused, BoundNorm.following_kernel

    def fused_stale(self: Any, *given: Any) -> Any:
        made = fused(self, *given)
        keep(self, made.arguments)
        return made

    def following_stale(self: Any, *given: Any) -> Any:
        made = following(self, *given)
        keep(self, made.arguments.norm)
        return made

    calls = FinishedCalls(builds, monkeypatch, 2)
    calls.enqueue(to_groups, 1 if after else 5, "two_shot")  # it makes the template
    calls.run()
    monkeypatch.setattr(BoundNorm, "fused", fused_stale)
    monkeypatch.setattr(BoundNorm, "following_kernel", following_stale)
    calls.enqueue(to_groups, 1 if after else 5, "two_shot")
    calls.run()
    calls.enqueue(to_groups, 2 if after else 13, "two_shot")
    if stale:
        with pytest.raises((AssertionError, RunFailedError)):
            calls.run()
    else:
        calls.run()


@pytest.mark.parametrize("stale", [False, True])
def test_an_epilogue_that_stays_as_it_was_is_noticed(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    calls = FinishedCalls(builds, monkeypatch, 2)
    calls.enqueue(rms, 5, "one_shot")
    calls.run()
    if stale:
        monkeypatch.setattr(PacketTemplate, "apply", lambda *_: None)
    calls.enqueue(rms, 5, "one_shot")
    if stale:
        with pytest.raises((AssertionError, RunFailedError)):
            calls.run()
    else:
        calls.run()
