"""Calls that are filled into the templates and carried out by kernels have NumPy's results, also with an epilogue."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives import operations
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChunkTemplate
from mpicomm.collectives.gpu.algorithms.direct import plan as direct_plan
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectTemplate
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.steps import Copy, Step
from mpicomm.collectives.gpu.call_templates import CollectiveTemplate, template_of
from mpicomm.collectives.gpu.decision import Decision
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.collectives.operations import ALLREDUCE
from mpicomm.devices.base import GrowingScratch, Scratch
from mpicomm.epilogues import Elementwise, Epilogue, fp8, layer_norm, rms_norm
from mpicomm.epilogues.norm import BoundNorm
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.plain_arrays import plain_array
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reductions import Array, dtype_named, reduced, require_same
from tests.kernels.build import Builds
from tests.kernels.epilogue_rig import bound, finished
from tests.kernels.kernel_calls import BOTH, Calls, Check, random_counts
from tests.kernels.machine import Machine, Place, keep_first, noticed
from tests.kernels.rig import LARGE_INBOX_NBYTES as INBOX_NBYTES
from tests.kernels.rig import ProgramRig


@pytest.fixture(autouse=True)
def device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


class FilledRig(ProgramRig):
    """A rig on which each rank fills its calls into the templates, also calls into `outputs`."""

    def __init__(self, machine: Machine, nbytes: int = 16) -> None:
        super().__init__(machine, nbytes)
        self._mappings = [Mappings() for _ in range(self.size)]
        for rank, mappings in enumerate(self._mappings):
            mappings.add(machine.addresses(self.outputs, rank), rank, nbytes)
        self._plans: dict[Hashable, CollectiveTemplate] = {}
        backends: list[Any] = [SimpleNamespace(scratch=partial(self._allocate, rank)) for rank in range(self.size)]
        self._scratch = [GrowingScratch(backend) for backend in backends]
        self.launched: list[str] = []
        """The algorithms of the launches of filled calls."""
        self.kernels: set[str] = set()
        """The names of the kernels of calls that are one launch."""
        self._nap_us = 0

    def run(self, rank: int, pattern: Pattern, *, nap_us: int = 0, **more: Any) -> None:
        b, operation = pattern.buffers, pattern.operation
        send, receive = _argument(b.send, b.send_blocks, b.dtype), _argument(b.output, b.blocks, b.dtype)
        own = b.output or (b.blocks and b.blocks[rank])
        if b.send is not None and own and b.send.pointer == own.pointer:
            send = MPI.IN_PLACE
        elif operation.send not in ("vector", "typed") and isinstance(send, list):
            send = send[0]
        if operation.receive not in ("vector", "typed") and isinstance(receive, list):
            receive = receive[0]
        if operation.send == "typed":
            send, receive = _typed(send), _typed(receive)
        counts = [block.count for block in b.send_blocks or ()] if operation.send == "counted" else None
        if counts and send.pointer == receive.pointer:
            send, receive = MPI.IN_PLACE, send
        op = MPI.SUM if operation.reduces else None
        call = Call(operation, Arguments(send, receive, op, b.root, counts), rank, self.size)
        self._nap_us = nap_us
        self.launch(rank, call, pattern.algorithm, (operation, b.dtype, b.root, type(send), type(receive)))

    def launch(self, rank: int, call: Call, algorithm: str, kinds: Hashable, *arrays: Any) -> None:
        """Fill a call of these kinds into the template, and launch it; ``arrays`` are of its epilogue."""
        key = rank, algorithm, kinds
        if key not in self._plans:
            loader: Any = SimpleNamespace(enqueuers=partial(self._enqueuers, rank))
            form = Form.of_call(call, call.buffers(self._scratch[rank].of(call.scratch_nbytes)))
            decision = Decision(form, algorithm, BUILT_IN, self.domains[rank], loader)
            self._plans[key] = template_of(call, decision, self._mappings[rank], self._scratch[rank])
        self._scratch[rank].of(call.scratch_nbytes)  # as `prepare_call` does
        plan, given, counts = self._plans[key], call.given, call.given.counts
        buffers: Any = plain_array(given.send), plain_array(given.receive)
        if counts:  # they cut the input, which may be in place
            sent, received = reversed(buffers) if given.send is MPI.IN_PLACE else buffers
            buffers = (*sent, tuple(counts), None), received
        assert None not in buffers and plan.takes(*buffers, *arrays)
        assert plan.fill(*buffers, *arrays)
        assert plan.launch is not None
        plan.launch(7)
        self.launched.append(plan.choice.algorithm)

    def keep_scratch(self, nbytes: int) -> None:
        """Let each rank have scratch memory that stays if the machine is cleared."""
        for scratch in self._scratch:
            scratch.of(nbytes)
        self.machine.keep()

    def _allocate(self, rank: int, nbytes: int) -> Scratch:
        return Scratch(self.machine.allocate(rank, nbytes).address, nbytes, None)

    def _enqueuers(self, rank: int, steps: Sequence[Step]) -> list[Any]:
        is_one = len(steps) == 1
        if is_one and isinstance(steps[0], Launch):
            self.kernels.add(steps[0].variant.entry)
        return [lambda stream, step=step: self.enqueue(rank, step, nap_us=self._nap_us * is_one) for step in steps]


def _argument(span: Span | None, blocks: Sequence[Span] | None, dtype: np.dtype[Any]) -> Any:
    """Return the argument of a call for a buffer of a pattern."""
    if blocks is None:
        return None if span is None else DeviceArray(span.pointer, span.count, dtype)
    base = min(block.pointer for block in blocks)
    displs = [(block.pointer - base) // dtype.itemsize for block in blocks]
    counts = [block.count for block in blocks]
    return [DeviceArray(base, max(map(sum, zip(counts, displs, strict=True))), dtype), counts, displs, None]


def _typed(spec: list[Any]) -> list[Any]:
    """Return an argument with blocks of bytes as one with a datatype for each block."""
    array, counts, displs, _ = spec
    datatypes = [MPI.BYTE if count % 4 else MPI.FLOAT for count in counts]
    return [array, [count // each.size for count, each in zip(counts, datatypes, strict=True)], displs, datatypes]


def test_filled_calls_of_any_size(builds: Builds) -> None:
    size, name = 3, "float32"  # the controls are between two
    rig = FilledRig(Machine(builds, size))
    rng = np.random.default_rng(size)
    calls = Calls(rig, rng, nap_us=1000)
    for count in (700, 1, 4097, INBOX_NBYTES // 4 + 1, 699):
        checks = [calls.allreduce(name, "sum", count, way) for way in BOTH]
        checks += [calls.bcast(4 * count, algorithm) for algorithm in ("one_shot", "two_shot", "chain")]
        checks += [calls.reduce(name, "sum", count, algorithm) for algorithm in ("one_shot", "chain")]
        checks.append(calls.scan(name, "sum", count))
        checks.append(calls.allgather(4 * count))
        for operation in (operations.ALLTOALLV, operations.ALLTOALLW):
            checks.append(calls.alltoallv(random_counts(rng, size, (0, 1, 4 * count)), operation))
        checks.append(calls.allreduce(name, "sum", count))
        rig.machine.run(checks, seed=count, jitter_us=200)
        rig.machine.clear()
    assert {*rig.launched} == {"one_shot", "two_shot", "chain"}
    assert rig.kernels == {"mpicomm_packets", "mpicomm_chain", "mpicomm_exchange"}


def test_filled_calls_with_recvcounts(builds: Builds) -> None:
    """The scratch memory of the results in place grows meanwhile."""
    rig = FilledRig(Machine(builds, 3))
    calls = Calls(rig, np.random.default_rng(3), nap_us=1000)
    for count in (5, 700, 0, INBOX_NBYTES // 4 + 1, 699):
        checks = [
            calls.reduce_scatter("float32", "sum", counts, in_place=in_place)
            for counts in ([count, 1, 2], [2, count + 1, 0])
            for in_place in (True, False, True)
        ]
        rig.machine.run(checks, seed=count, jitter_us=200)
    assert {*rig.launched} == {"one_shot"}
    assert rig.kernels == {"mpicomm_packets"}


def straight(builds: Builds, monkeypatch: pytest.MonkeyPatch, size: int) -> FilledRig:
    """Return a rig with symmetric memory, into which messages go straight."""
    monkeypatch.setattr(direct_plan, "most_copied_nbytes", lambda *_: 15)  # longer messages go straight
    return FilledRig(Machine(builds, size), 256 << 10)


@pytest.mark.parametrize("algorithm", ["one_shot", "copy_engine"])
def test_filled_calls_straight_into_symmetric_memory(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    rig, rng = straight(builds, monkeypatch, 3), np.random.default_rng(3)
    for nbytes, offset in ((700, 0), (700, 4096), (16, 3), (40_000, 1), (701, 4096)):
        calls = Calls(rig, rng, symmetric_at=offset, algorithm=algorithm)
        for call in (calls.allgather, calls.alltoall, calls.bcast):
            rig.machine.run([call(nbytes)], seed=nbytes, jitter_us=200)
    assert {*rig.launched} == {algorithm}
    assert rig.kernels == ({"mpicomm_direct"} if algorithm == "one_shot" else set())


def require_noticed(rig: FilledRig, make: Callable[[int], Check], stale: object) -> None:
    """Make two calls, and require that the second call fails if a value is ``stale``."""
    rig.machine.run([make(1)], seed=1)
    with noticed(stale):
        rig.machine.run([make(2)], seed=2)


def keep_first_values(monkeypatch: pytest.MonkeyPatch, places: Sequence[str], stale: str | None) -> None:
    """Let `PacketTemplate.write` keep the values in the places named ``stale`` of the first call."""

    def mix(first: Sequence[Any], given: list[Any]) -> None:
        each = zip(places, first[0], given[0], strict=True)
        given[0] = [old if name == stale else new for name, old, new in each]

    keep_first(monkeypatch, PacketTemplate, "write", mix)


# Negative controls of the tests above.


@pytest.fixture
def two(builds: Builds) -> tuple[FilledRig, Calls]:
    rig = FilledRig(Machine(builds, 2))
    return rig, Calls(rig, np.random.default_rng(7))


@pytest.mark.parametrize("stale", [(), ("sends",), ("targets",), ("going", "coming")])
def test_a_stale_value_of_a_call_into_symmetric_memory_is_noticed(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, stale: Sequence[str]
) -> None:
    names = [*inspect.signature(DirectTemplate.write).parameters][1:]

    def mix(first: Sequence[Any], given: list[Any]) -> None:
        for place in map(names.index, stale):
            given[place] = first[place]

    keep_first(monkeypatch, DirectTemplate, "write", mix)
    rig, rng = straight(builds, monkeypatch, 2), np.random.default_rng(2)

    def make(number: int) -> Check:
        return Calls(rig, rng, symmetric_at=4096 * number).alltoall(500 + 200 * number)

    require_noticed(rig, make, stale)


@pytest.mark.parametrize("stale", [(), ("sends",), ("own",), ("output",), ("sends", "receives")])
def test_a_stale_value_of_a_call_in_chunks_is_noticed(
    two: tuple[FilledRig, Calls], monkeypatch: pytest.MonkeyPatch, stale: Sequence[str]
) -> None:
    rig, calls = two

    def mix(first: Sequence[Any], given: list[Any]) -> None:
        old, new = first[0].reduction, given[0].reduction
        pointer = (old if "output" in stale else new).output.pointer
        count = (old if "receives" in stale else new).output.count
        new = replace(new, own=(old if "own" in stale else new).own, output=Span(pointer, count))
        given[0] = replace(given[0], sends=(first if "sends" in stale else given)[0].sends, reduction=new)

    keep_first(monkeypatch, ChunkTemplate, "launch", mix)
    require_noticed(rig, lambda number: calls.scan("float32", "sum", INBOX_NBYTES // 4 + 100 * number), stale)
    assert rig.kernels == {"mpicomm_exchange"}


@pytest.mark.parametrize("stale", [None, "counts", "input", "result", "target", "source", "nbytes"])
def test_a_stale_value_of_a_call_in_scratch_memory_is_noticed(
    two: tuple[FilledRig, Calls], monkeypatch: pytest.MonkeyPatch, stale: str | None
) -> None:
    """Of the kernel, and of the copy after it."""
    rig, calls = two
    keep_first_values(monkeypatch, ("", *["counts"] * 3, *["input"] * 2, "result"), stale)  # see `PacketLauncher`
    first: dict[int, Copy] = {}

    def mix(_: Sequence[Any], given: list[Any]) -> None:
        rank, step = given
        if isinstance(step, Copy):
            kept = vars(first.setdefault(rank, step))
            given[1] = replace(step, **{name: kept[name] for name in kept if name == stale})

    keep_first(monkeypatch, FilledRig, "enqueue", mix)

    def make(number: int) -> Check:
        return calls.reduce_scatter("float32", "sum", [600 * number, 500 * number], in_place=True)

    require_noticed(rig, make, stale)
    assert {*first} == {0, 1}


COUNTS = np.array([[600, 500], [401, 300]])
# The kinds of the values of a template: see `PacketLauncher`.
OF_TYPES = ("", *["counts"] * 4, *["displacements sent"] * 2, *["displacements received"] * 2)
OF_PACKETS = ("", "length", "length", "send", "receive")


@pytest.mark.parametrize(
    ("places", "stale"), [(places, stale) for places in (OF_TYPES, OF_PACKETS) for stale in dict.fromkeys(places)]
)
def test_a_stale_value_of_a_call_in_packets_is_noticed(
    two: tuple[FilledRig, Calls], monkeypatch: pytest.MonkeyPatch, places: Sequence[str], stale: str
) -> None:
    rig, calls = two
    keep_first_values(monkeypatch, places, stale or None)

    def make(number: int) -> Check:
        if places is OF_TYPES:
            return calls.alltoallv(COUNTS * number, operations.ALLTOALLW)
        return calls.allreduce("float32", "sum", 600 + 100 * number, in_place=False)

    require_noticed(rig, make, stale)
    assert rig.kernels == {"mpicomm_packets"}


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

    def __init__(self, builds: Builds, size: int) -> None:
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
    builds: Builds, size: int, of: Any, algorithm: str, in_place: bool, kernels: set[str]
) -> None:
    calls = FinishedCalls(builds, size)
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

    calls = FinishedCalls(builds, 2)
    calls.enqueue(to_groups, 1 if after else 5, "two_shot")  # it makes the template
    calls.run()
    monkeypatch.setattr(BoundNorm, "fused", fused_stale)
    monkeypatch.setattr(BoundNorm, "following_kernel", following_stale)
    calls.enqueue(to_groups, 1 if after else 5, "two_shot")
    calls.run()
    calls.enqueue(to_groups, 2 if after else 13, "two_shot")
    with noticed(stale):
        calls.run()


@pytest.mark.parametrize("stale", [False, True])
def test_an_epilogue_that_stays_as_it_was_is_noticed(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    calls = FinishedCalls(builds, 2)
    calls.enqueue(rms, 5, "one_shot")
    calls.run()
    if stale:
        monkeypatch.setattr(PacketTemplate, "apply", lambda *_: None)
    calls.enqueue(rms, 5, "one_shot")
    with noticed(stale):
        calls.run()
