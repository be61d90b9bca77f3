"""Epilogues in memory of the ranks of a machine, and all-reduces with them in packets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol
from mpicomm.epilogues import Epilogue
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.mpi.arguments import Operand, Span, parse
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import Array, dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import BOTH
from tests.kernels.machine import Machine, Place
from tests.kernels.mistakes import Changes
from tests.kernels.rig import Rig, packet_rig


def bound(epilogue: Epilogue, dtype: str, result: str, count: int, output: int = 0) -> BoundEpilogue:
    """Return the epilogue of a call with a result at an address."""
    receive = parse(np.zeros(count, dtype_named(result)), writable=True, name="recvbuf")
    return epilogue.bind("Allreduce", dtype_named(dtype), replace(receive, pointer=output))


def on_rank(epilogue: Epilogue, machine: Machine, rank: int, offset: int = 0) -> tuple[Epilogue, dict[str, Place]]:
    """Return the epilogue with its arrays in memory of a rank, and their places by name."""
    moved, places = copy.copy(epilogue), {}

    def read(name: str, array: Any, result: Operand, *, writable: bool = False) -> Operand:
        operand = epilogue.read(name, array, result, writable=writable)
        places[name] = machine.place(rank, array, offset=offset)
        return replace(operand, pointer=places[name].address)

    vars(moved)["read"] = read
    return moved, places


def finished(epilogue: BoundEpilogue, values: Array) -> Array:
    two_in_byte = epilogue.result.name == "uint8"
    made = np.empty(values.size // (2 if two_in_byte else 1), epilogue.result)
    epilogue.apply_on_host(values, made)
    return made


def normal(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Return numbers whose sums of squares are finite."""
    return rng.standard_normal(count).astype(dtype)


def run_after(
    machine: Machine,
    epilogue: Epilogue,
    values: Array,
    result: str,
    *,
    in_place: bool = False,
    offset: int = 0,
    limit_s: float = 60,
    **how: Any,
) -> tuple[Place, dict[str, Place]]:
    """Let the kernel after a reduction finish ``values``; return the places of the result and of the epilogue's arrays.

    The result and the values lie ``offset`` elements after a multiple of 64 bytes. ``how`` is for `Machine.enqueue`.
    """
    moved, places = on_rank(epilogue, machine, 0)
    made = dtype_named(result)
    count = values.size // (2 if result == "uint8" else 1)  # two float4_e2m1fn lie in a byte
    source = target = machine.place(0, values, offset=offset * values.itemsize)
    if not in_place:
        target = machine.place(0, np.zeros(count, made), offset=offset * made.itemsize)
    finish = bound(moved, values.dtype.name, result, count, target.address)
    launch = finish.separate_launch(source.address, machine.faults[0].failed, 2)
    machine.enqueue(0, launch, **how)
    machine.run(limit_s=limit_s)
    return target, places


class FusedCalls:
    """All-reduces with epilogues in the kernels that reduce. Arrays lie at multiples of 16 bytes, or ``anywhere``."""

    def __init__(self, rig: Rig, rng: np.random.Generator, *, anywhere: bool = True) -> None:
        self._rig = rig
        self._rng = rng
        self._anywhere = anywhere
        self._checks: list[tuple[Place, Array, bool]] = []

    def run(self, *, seed: int = 0, limit_s: float = 60) -> None:
        """Run all that was enqueued, and compare the results with NumPy's."""
        self._rig.machine.run(seed=seed, jitter_us=100, limit_s=limit_s)
        for place, expected, exact in self._checks:
            require_same(place.view(expected.dtype).copy(), expected)
            if exact and place.bytes.tobytes() != expected.tobytes():
                raise AssertionError("words differ, first at any place")

    def allreduce(
        self,
        epilogue: Epilogue,
        reduction: tuple[str, str],
        result: str,
        count: int,
        *,
        algorithm: str = "one_shot",
        exact: bool = False,
        written: dict[str, Array] | None = None,
        values: Callable[[np.dtype[Any], int, np.random.Generator], Array] = samples,
    ) -> None:
        """Enqueue an all-reduce, in place if it may be; arrays lie anywhere, and a rank may be late.

        ``exact``: whether NaN has to have the same bits. ``written`` are the arrays that the epilogue changes on each
        rank, by name. ``values`` makes the ranks' inputs.
        """
        size, machine, rng, (name, op) = self._rig.size, self._rig.machine, self._rng, reduction
        # Two float4_e2m1fn lie in a byte.
        room = count // 2 if result == "uint8" else count
        whole = bound(epilogue, name, result, room)
        moved = [on_rank(epilogue, machine, rank, offset=self._offset(whole.dtype)) for rank in range(size)]
        on_ranks = [bound(each, name, result, room) for each, _ in moved]
        parts = [values(whole.dtype, count, rng) for _ in range(size)]
        expected = finished(whole, reduced(op, parts))  # it changes the residual, too
        for rank, part in enumerate(parts):
            source = machine.place(rank, part, offset=self._offset(whole.dtype))
            target = scratch = source
            if whole.converts or rng.integers(2):
                target = machine.place(rank, np.zeros(room, whole.result), offset=self._offset(whole.result))
                scratch = machine.place(rank, np.zeros_like(part)) if whole.converts else target
            send, output = Span(source.address, count), Span(scratch.address, count)
            pattern = patterns.allreduce(rank, size, whole.dtype, send, output, op)
            pattern = replace(pattern, algorithm=algorithm)
            nap_us = int(rng.integers(3000)) if rng.integers(4) == 0 else 0
            on_ranks[rank].output = target.address
            self._rig.run(rank, pattern, finish=on_ranks[rank], nap_us=nap_us)
            self._checks.append((target, expected, exact))
            if whole.converts:
                self._checks.append((scratch, np.zeros_like(part), True))
            for array, changed in (written or {}).items():
                self._checks.append((moved[rank][1][array], changed, False))

    def _offset(self, dtype: np.dtype[Any]) -> int:
        return int(self._rng.choice((0, 16, dtype.itemsize if self._anywhere else 32)))


def run_fused(
    builds: Builds,
    protocol: Protocol,
    epilogue: Epilogue,
    reduction: tuple[str, str],
    result: str = "",
    *,
    size: int = 3,
    exact: bool = False,
    seed: int = 0,
    changes: Changes = (),
) -> None:
    """All-reduces of one step in one hop, and of several in two, in two kernels; they fill no whole packet at the end.

    ``exact``: in both ways, and NaN has to have the same bits.
    """
    rig = packet_rig(Machine(builds, size), protocol, changes=changes)
    calls = FusedCalls(rig, np.random.default_rng(size))
    most = 2003 if protocol == "sentinel" else 301
    ways = {"one_shot": (1, 5), "two_shot": (most,)}
    if changes or exact:
        ways = dict.fromkeys(BOTH, (most,))
    for way, counts in ways.items():
        for count in counts:
            calls.allreduce(epilogue, reduction, result or reduction[0], count, algorithm=way, exact=exact)
    calls.run(seed=seed)
