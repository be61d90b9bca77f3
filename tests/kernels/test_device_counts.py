"""Messages with counts on the device: between processes, and under ThreadSanitizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig
from mpicomm.collectives.gpu.device_counts_template import DeviceCountsTemplate
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import ABSENT, COUNTS, MISMATCH, OF_RECEIVE, RECEIVE_OVERFLOW
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.buffers import ArrayMemory
from mpicomm.mpi.device_counts import DeviceCounts, DeviceCountsBuffer
from tests.helpers.references.reductions import require_same
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import Calls
from tests.kernels.late_resets import LATE
from tests.kernels.machine import Array, Machine, Place, RunFailedError, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import INBOX_NBYTES, SMALL, STARTS, Rig, packet_rig

UNTOUCHED = 0xAB


@dataclass(frozen=True)
class DeviceCountsCall:
    """The call of all ranks: rank a sends ``counts[a][b]`` elements to rank b."""

    counts: Array
    send_displs: Array | None = None
    """The displacements of each rank's blocks; None if each block follows the block before."""
    receive_displs: Array | None = None
    room: int | None = None
    """The elements of each output; None for as many as come."""
    dtype: npt.DTypeLike = np.float32
    wide: tuple[bool, bool] = (False, True)
    """Whether the counts to send, and the counts that come, have 64 bits."""
    host_displs: bool = False
    escaped: bool = False
    """Whether all words of the messages are `ABSENT`, so that every packet needs an escape."""
    tag: int = 5


class DeviceCountsRig(Rig):
    """A rig of packets, on which each rank fills its calls into the templates of their kinds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.results: Sequence[Place] = ()
        """The outputs of the last call."""
        self._templates: dict[Hashable, DeviceCountsTemplate] = {}

    def call(
        self, call: DeviceCountsCall, rng: np.random.Generator, *, nap_us: int = 0, without: Sequence[int] = ()
    ) -> Callable[[], None]:
        """Enqueue a call on all ranks, except the ranks ``without``; return a check of its results."""
        ranks, counts = range(self.size), call.counts
        dtype = np.dtype(call.dtype)
        checks = []

        def content(count: int) -> Array:
            nbytes = count * dtype.itemsize
            if call.escaped:
                return np.full(-(-nbytes // 4), ABSENT, np.uint32).view(np.uint8)[:nbytes].view(dtype)
            return np.frombuffer(rng.bytes(nbytes), dtype)

        blocks = [[content(int(max(0, counts[a][b]))) for b in ranks] for a in ranks]
        for rank in ranks:
            starts = _starts(counts[rank]) if call.send_displs is None else call.send_displs[rank]
            size = max([0, *(int(s + max(0, n)) for s, n in zip(starts, counts[rank], strict=True))])
            data = np.zeros(size, dtype)
            for start, block in zip(starts, blocks[rank], strict=True):
                data[start : start + len(block)] = block
            coming = counts[:, rank]
            places = _starts(coming) if call.receive_displs is None else call.receive_displs[rank]
            end = max([0, *(int(s + n) for s, n in zip(places, coming, strict=True))])
            room = end if call.room is None else call.room
            output = self.machine.place(rank, np.full(room * dtype.itemsize, UNTOUCHED, np.uint8), offset=4)
            said = self.machine.allocate(rank, self.size * (8 if call.wide[1] else 4))
            buffers = DeviceCounts(
                self._buffer(rank, self.machine.place(rank, data, offset=8).address, size, dtype,
                             self._indices(rank, counts[rank], wide=call.wide[0]), call, call.send_displs),
                self._buffer(rank, output.address, room, dtype,
                             _indices_at(said, wide=call.wide[1]), call, call.receive_displs),
            )  # fmt: skip
            if rank not in without:
                made = self._launch(rank, buffers, call)
                late = int(rng.integers(nap_us)) if nap_us else 0
                self.enqueue(rank, made, nap_us=late)
            expected = np.full(room * dtype.itemsize, UNTOUCHED, np.uint8).view(dtype)
            for source, start in enumerate(places if room >= end and min(places) >= 0 else ()):
                block = blocks[source][rank]
                expected[start : start + len(block)] = block
            checks.append((output, expected, said, coming))

        def check() -> None:
            for output, expected, said, coming in checks:
                require_same(output.view(np.uint8), expected.view(np.uint8))
                require_same(
                    said.view(np.int64 if call.wide[1] else np.int32).astype(np.int64), coming.astype(np.int64)
                )

        self.results = [output for output, *_ in checks]
        return check

    def _launch(self, rank: int, buffers: DeviceCounts, call: DeviceCountsCall) -> Launch:
        plain: list[tuple[Any, ...]] = []
        for side in (buffers.send, buffers.receive):
            displs = side.displs.pointer if isinstance(side.displs, ArrayMemory) else side.displs
            plain.append((side.operand.pointer, side.operand.total, None, side.counts.pointer, displs))
        key = rank, call.dtype, call.wide, call.tag, *(type(displs) for *_, displs in plain)
        if key not in self._templates:
            loader: Any = SimpleNamespace(enqueuers=lambda steps: [lambda stream, step=step: step for step in steps])
            signature = Signature("Alltoallv", f"elements of {buffers.itemsize} bytes", call.tag)
            domain = self.domains[rank]
            config = PacketConfig("sentinel", domain.arena.sentinels, SMALL)
            self._templates[key] = DeviceCountsTemplate(signature, buffers, domain, loader, config)
        template = self._templates[key]
        assert template.takes(*plain) and template.fill(*plain)
        launch: Any = template.launch
        return cast(Launch, launch(7))

    def _indices(self, rank: int, values: Array, *, wide: bool) -> ArrayMemory:
        return _indices_at(self.machine.place(rank, np.asarray(values, np.int64 if wide else np.int32)), wide=wide)

    def _buffer(
        self,
        rank: int,
        pointer: int,
        room: int,
        dtype: np.dtype[Any],
        counts: ArrayMemory,
        call: DeviceCountsCall,
        displs: Array | None,
    ) -> DeviceCountsBuffer:
        operand = SimpleNamespace(pointer=pointer, total=room, dtype=dtype)
        known: Any = None
        if displs is not None:
            known = tuple(map(int, displs[rank])) if call.host_displs else self._indices(rank, displs[rank], wide=True)
        return DeviceCountsBuffer(cast(Any, operand), counts, known)


def _indices_at(place: Any, *, wide: bool) -> ArrayMemory:
    return ArrayMemory(place.address, place.bytes.nbytes, np.dtype(np.int64 if wide else np.int32), True, 0, place)


def _starts(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(np.maximum(counts, 0))[:-1]])


_STEP = SMALL.threads * 16 // 4  # elements of float32
_INBOX = INBOX_NBYTES // 4
LENGTHS = (0, 0, 1, 3, _STEP - 1, _STEP + 1, _INBOX, _INBOX + 1, 3 * _INBOX + 5)


def rig_of(
    builds: Builds, size: int, changes: Changes = (), timeout_s: float | None = None, laps: int = 6
) -> DeviceCountsRig:
    options: dict[str, Any] = {"inbox_nbytes": laps * _STEP * 4, "changes": changes, "timeout_s": timeout_s}
    rig: DeviceCountsRig = packet_rig(Machine(builds, size), rig=DeviceCountsRig, **options)
    return rig


def random_call(rng: np.random.Generator, size: int, lengths: Sequence[int] = LENGTHS) -> DeviceCountsCall:
    """A call with random counts, and with displacements on either side, in one of three ways."""
    counts = rng.choice(lengths, (size, size))

    def displs(of_ranks: Array) -> Array:
        """Blocks in another order, with gaps."""
        of_all = []
        for of_rank in of_ranks:
            order, at, starts = rng.permutation(size), 0, np.zeros(size, np.int64)
            for block in order:
                at += int(rng.integers(3))
                starts[block] = at
                at += int(of_rank[block])
            of_all.append(starts)
        return np.array(of_all)

    return DeviceCountsCall(
        counts,
        displs(counts) if rng.integers(2) else None,
        displs(counts.T) if rng.integers(2) else None,
        dtype=rng.choice(["float32", "int16", "complex128"]),
        wide=(bool(rng.integers(2)), bool(rng.integers(2))),
        host_displs=bool(rng.integers(2)),
    )


def step_call(rng: np.random.Generator, size: int, *, most: int = 0) -> DeviceCountsCall:
    """A call whose messages take one step on all ranks, with ``most`` elements from a rank to another at most."""
    dtype = np.dtype(rng.choice(["float32", "int16", "complex128", "int8", "V12"]))
    room = SMALL.threads * 16 // dtype.itemsize
    counts = rng.integers(0, (most or room // size) + 1, (size, size)) * rng.integers(0, 2, (size, size))
    wide = bool(rng.integers(2)), bool(rng.integers(2))
    return DeviceCountsCall(counts, room=room, dtype=dtype, wide=wide, escaped=bool(rng.integers(2)))


def run(
    builds: Builds,
    size: int,
    *,
    seed: int = 0,
    changes: Changes = (),
    timeout_s: float | None = None,
    laps: int = 6,
    calls: int = 12,
    lengths: Sequence[int] = LENGTHS,
    start: int = 0,
    one_step: bool = False,
) -> None:
    """Random calls, one after the other. Between calls of one step are scans, in which rank 0 waits for no packet."""
    rig, rng = rig_of(builds, size, changes, timeout_s, laps), np.random.default_rng((size, seed))
    if start:
        rig.start_at(start)
        rig.fill_with_old_flags(rng)
    others, checks = Calls(rig, rng, nap_us=1000), []
    for number in range(calls):
        call = step_call(rng, size) if one_step else random_call(rng, size, lengths)
        checks.append(rig.call(call, rng, nap_us=1000))
        if one_step and size > 1 and number % 4 == 3:
            checks += [others.scan("float32", "sum", 100) for _ in range(2)]
    rig.machine.run(checks, seed=seed, jitter_us=300, limit_s=40)


run_steps = partial(run, one_step=True, calls=24)


@pytest.mark.parametrize(("size", "laps"), [(1, 6), (2, 7), (3, 6), (4, 10)])
@pytest.mark.parametrize("one_step", [False, True])
def test_every_rank_gets_its_blocks_and_their_counts(builds: Builds, size: int, laps: int, one_step: bool) -> None:
    for seed in range(3):
        run(builds, size, seed=seed, laps=laps, one_step=one_step)


def test_one_step_while_numbers_begin_again(builds: Builds) -> None:
    run_steps(builds, 3, start=STARTS["2^30"], calls=120)


def test_ranks_with_room_for_one_step_beside_ranks_with_more_room(builds: Builds) -> None:
    rig, rng = rig_of(builds, 3), np.random.default_rng(1)
    checks = []
    for _ in range(8):
        counts = rng.integers(0, _STEP // 4, (3, 3))
        counts[rng.integers(3)] += _STEP // 8  # this rank sends more than a step to all ranks together
        checks.append(rig.call(DeviceCountsCall(counts), rng, nap_us=1000))
    rig.machine.run(checks, jitter_us=300)


@pytest.mark.parametrize("start", STARTS)
def test_launches_while_numbers_begin_again(builds: Builds, start: str) -> None:
    run(builds, 3, start=STARTS[start], calls=120, lengths=(0, 1, _STEP + 1))


@pytest.mark.parametrize("one_step", [False, True])
def test_no_race(watched_builds: Builds, one_step: bool) -> None:
    run(watched_builds, 3, calls=10, one_step=one_step)


def _failed(builds: Builds, call: DeviceCountsCall, operation: int, sequence: int, changes: Changes = ()) -> None:
    """Run a call in which rank 1 is at fault, and expect its record on all ranks and no byte in its output."""
    rig, rng = rig_of(builds, len(call.counts), changes), np.random.default_rng(1)
    rig.call(call, rng)
    with pytest.raises(RunFailedError) as caught:
        rig.machine.run()
    said = str(caught.value).splitlines()
    assert len(said) == rig.size, said
    for line in said:
        assert f"operation={operation}, sequence={sequence}," in line and "peer=11," in line
    assert (rig.results[1].bytes == UNTOUCHED).all()


COUNTS_OF_THREE = np.array([[1, 2, 3], [4, 500, 6], [7, 8, 9]])


def counts_of_three(target: int, count: int) -> Array:
    """Return counts, of which rank 1 sends ``count`` elements to a rank."""
    counts: Array = COUNTS_OF_THREE.copy()
    counts[1][target] = count
    return counts


def displs(last: int) -> Array:
    return np.array([[0, 10, 20], [0, 10, last], [0, 10, 20]])


FAULTS = {
    "a negative count": (DeviceCountsCall(counts_of_three(2, -1)), COUNTS, 12),
    "too little room": (DeviceCountsCall(COUNTS_OF_THREE, room=509), RECEIVE_OVERFLOW, 510),
    "too little room for messages of one step": (
        DeviceCountsCall(counts_of_three(1, 50), room=59),
        RECEIVE_OVERFLOW,
        60,
    ),
    **{
        f"a negative count of messages of one step, {wide=}": (
            DeviceCountsCall(np.array([[1, 2], [-1, 3]]), room=9, wide=(wide, True)),
            COUNTS,
            10,
        )
        for wide in (False, True)
    },
    "a block outside of the output": (
        DeviceCountsCall(COUNTS_OF_THREE, receive_displs=displs(600), room=607),
        RECEIVE_OVERFLOW,
        608,
    ),
    "a block before the output": (
        DeviceCountsCall(COUNTS_OF_THREE, receive_displs=displs(-1), room=607),
        COUNTS,
        OF_RECEIVE | 12,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_an_error_on_all_ranks_and_nothing_is_written(builds: Builds, fault: str) -> None:
    _failed(builds, *FAULTS[fault])


def test_a_rank_with_counts_on_the_host_is_in_another_call(builds: Builds) -> None:
    rig, rng = rig_of(builds, 2), np.random.default_rng(1)
    call = DeviceCountsCall(np.array([[1, 2], [3, 4]]))
    rig.call(call, rng, without=[1])
    rig.call(DeviceCountsCall(call.counts, tag=6), rng, without=[0])
    with pytest.raises(RunFailedError, match=f"operation={MISMATCH},"):
        rig.machine.run()


def test_a_missing_rank_is_named(builds: Builds) -> None:
    rig, rng = rig_of(builds, 3, timeout_s=0.5), np.random.default_rng(1)
    rig.call(DeviceCountsCall(COUNTS_OF_THREE), rng, without=[2])
    with pytest.raises(RunFailedError, match=r"operation=2, .*peer=12"):
        rig.machine.run()


MISTAKES = {
    "places read before they are written": Change("packets.cu", "  ok = __syncthreads_and(ok);\n", ""),
    "lengths taken before they have come": Change(
        "device_counts.cuh",
        "return LLProtocol::has_arrived(packet, LLProtocol::flag(launch)) ? 0u : 1u << peer;",
        "return 0u;",
    ),
    "one set of lengths instead of two": Change(
        "device_counts.cuh", "launch % 2 * inboxes.nbytes", "0 * inboxes.nbytes"
    ),
    "lengths of other lanes read before they are written": Change(
        "device_counts.cuh",
        """    ok = __all_sync(kWarp, ok);
    // Orders the numbers of all lanes before the loads below.
    __syncwarp(kWarp);
""",
        "",
    ),
    "no peer is paced": [*LATE, Change("device_counts.cuh", "messages.paced = paced;", "messages.paced = 0;")],
}
test_a_mistake_is_caught = controls(partial(run, size=3, laps=7), MISTAKES)


def test_resets_of_slots_as_late_as_fences_allow(builds: Builds) -> None:
    for seed in range(2):
        run(builds, 3, seed=seed, changes=without_mistake(MISTAKES, "no peer is paced"), timeout_s=20)


MISTAKES_OF_ONE_STEP = {
    "lengths taken before they have come": Change(
        "device_counts_step.cu", "if (!knows || (at < static_cast<u32>", "if ((at < static_cast<u32>"
    ),
    "packets taken before they have come": Change(
        "device_counts_step.cu", "!Protocol::has_arrived(packets[d], {})", "false"
    ),
    "one set of lengths instead of two": Change("device_counts_step.cu", "ll_set = launch % 2 *", "ll_set = 0 *"),
    "one set of slots instead of two": Change("device_counts_step.cu", "u64 set = launch % 2 ?", "u64 set = 0 ?"),
    "slots not put back": Change("device_counts_step.cu", "    Protocol::reset_slot(slot);\n", ""),
    "escapes not taken": Change(
        "device_counts_step.cu",
        "    if (Protocol::has_escape(packet)) {\n      const u32 code",
        "    if (false) {\n      const u32 code",
    ),
}


_ANNOUNCES = "if (blockIdx.x == 0 && has_peer) announce(team, overseer, launch);"
SLOW_SCANS = Change(
    "packets.cu",
    _ANNOUNCES,
    f"{_ANNOUNCES}\n  if (rank != 0) for (u32 turn = 0; turn < 400; ++turn) MPICOMM_YIELD();",
)
"""All ranks but the first begin a scan, and take its packets only much later. So the first rank, which waits for no
packet in a scan, could be two launches ahead."""
NO_WAIT = {"wait": [Change("device_counts_step.cu", "if (has_peer && is_behind()) {", "if (false) {"), SLOW_SCANS]}


def test_messages_of_one_step_after_slow_scans(builds: Builds) -> None:
    run_steps(builds, 3, changes=[SLOW_SCANS], timeout_s=20)


test_a_missing_wait_for_the_last_launch_is_caught = controls(partial(run_steps, size=3), NO_WAIT)
test_a_mistake_in_one_step_is_caught = controls(partial(run_steps, size=3), MISTAKES_OF_ONE_STEP)


NOT_LOOKED_AT = {
    "the room": Change("device_counts.cuh", "? total > room_nbytes() :", "? false :"),
    "the facts of other ranks": Change(
        "packets.cu", "if (blockIdx.x == 0 && has_lengths) lengths.compare_rooms();", ""
    ),
}


@pytest.mark.parametrize("name", NOT_LOOKED_AT)
def test_facts_that_are_not_looked_at_are_caught(builds: Builds, name: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        _failed(builds, *FAULTS["too little room"], changes=[NOT_LOOKED_AT[name]])
