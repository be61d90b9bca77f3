"""Collectives by each of their kernels: every size at which something changes, every class of types, ranks that differ.

A `ProgramRig` takes the kernels that the package chooses, for calls as the package carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chain.plan import BATCH_NBYTES, CHAIN_SLOTS
from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.gpu.algorithms.memory import CHUNK_SLOTS, ArenaLayout
from mpicomm.collectives.gpu.algorithms.packets.arguments import carried_nbytes
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues import rms_norm
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.epilogue_rig import FusedCalls, normal
from tests.kernels.kernel_calls import SUM, Calls, QuantizedCalls, elements_of_step, play, random_counts, sizes_around
from tests.kernels.machine import Machine, RunFailedError
from tests.kernels.rig import INBOX_NBYTES, SMALL, ProgramRig, Rig, chain_rig, direct_rig, exchange_rig, packet_rig
from tests.kernels.rig import LARGE_INBOX_NBYTES as LARGE

Make = Callable[[Machine], Rig]


@dataclass(frozen=True)
class Row:
    """Calls of these ``kinds`` and ``sizes`` between ``size`` ranks: see `play`, of which ``options`` are."""

    make: Make
    size: int
    kinds: str
    sizes: Sequence[int]
    start: int = 0
    """The number of the last launch or chunk before the calls."""
    options: Mapping[str, Any] = field(default_factory=dict)


def of_chunks(size: int, channels: int) -> list[int]:
    """Return sizes around which a message gets a further block, a further chunk, or chunks that reuse a slot."""
    slots_nbytes = channels * ArenaLayout(size, channels).slot_nbytes
    return sizes_around(16, CHANNEL_NBYTES, channels * CHANNEL_NBYTES, slots_nbytes, slots_nbytes * CHUNK_SLOTS)


def of_ring(size: int) -> list[int]:
    """Return sizes around those of the whole array, and of a shard, for two channels."""
    limits = (128, CHANNEL_NBYTES, 2 * CHANNEL_NBYTES, 2 * ArenaLayout(size, 2).slot_nbytes)
    return sizes_around(4 * size, *limits, *(size * limit for limit in limits))


WARPS, UNIT_NBYTES = 8, 512  # of a block of chain.cu, which are its channels, and of a batch
LARGEST_SLOTS = WARPS * 32 * 1024  # one of each channel
AGAIN = 2**32 - 3
STEP = SMALL.threads * 16
LL_NBYTES = carried_nbytes(INBOX_NBYTES, "ll") - 4


def of_chain(blocks: int) -> list[int]:
    limits = (16, UNIT_NBYTES, WARPS * UNIT_NBYTES, WARPS * BATCH_NBYTES, blocks * WARPS * BATCH_NBYTES)
    return sizes_around(*limits)[1:]


def of_slots(slots_nbytes: int) -> list[int]:
    """Return sizes around those of the slots of a chain, and one for which every slot is used again."""
    return [slots_nbytes - 4, slots_nbytes, slots_nbytes + 4, 5, (CHAIN_SLOTS + 1) * slots_nbytes + 12, 5]


def of_packets(most: int) -> list[int]:
    limits = (8, 16, STEP // 2, STEP, INBOX_NBYTES, most)
    return [nbytes for nbytes in sizes_around(*(each for each in limits if each <= most)) if 0 < nbytes <= most]


LENGTHS = (4, 4 * 4096, LARGE - 4, LARGE + 4)
OF_TREES = (4, 4 * 4096, LARGE + 4)  # which take all of their kernels
STRAIGHT = (4, 2800, 4 * 4096, LARGE - 4, LARGE + 4, 3 * LARGE)
INTO_OUTPUTS = {"symmetric_at": 0, "one_by_one": True}
BY_CHUNKS = "alltoallv bcast allreduce allreduce:two_shot"
BY_CHAIN = "bcast:chain reduce:chain"
IN_PACKETS = "allreduce allreduce:two_shot reduce:two_shot scan allgather bcast bcast:two_shot"
WHOLE = "allreduce allreduce:two_shot bcast bcast:two_shot bcast:chain reduce:two_shot reduce:chain"
IN_BLOCKS = "allgather alltoallv scan reduce_scatter reduce_scatter_of_parts"
BARE = "allreduce scan bcast alltoallv reduce reduce_scatter_of_parts"


def every_size() -> Iterator[tuple[str, Row]]:
    for size, channels in ((1, 2), (3, 1), (4, 2)):
        make: Make = partial(exchange_rig, channels=channels, threads=(None, 64, 96, 512))
        yield f"exchange-{size}-{channels}", Row(make, size, BY_CHUNKS, of_chunks(size, channels))
    for size in (2, 3):
        yield f"ring-{size}", Row(partial(exchange_rig, channels=2), size, "allreduce:ring", of_ring(size))
    for size, blocks in ((2, 2), (3, 1), (4, 2)):
        yield f"chain-{size}-{blocks}", Row(partial(chain_rig, blocks=blocks), size, BY_CHAIN, of_chain(blocks), AGAIN)
    for nbytes in (WARPS * BATCH_NBYTES, 4 * WARPS * BATCH_NBYTES, LARGEST_SLOTS):
        yield f"slots of a chain-{nbytes}", Row(partial(chain_rig, nbytes=nbytes), 3, BY_CHAIN, of_slots(nbytes), AGAIN)
    # Each number of ranks is another kernel of packets. Five ranks have room for six steps at most.
    yield "LL packets", Row(partial(packet_rig, protocol="ll"), 4, IN_PACKETS, of_packets(LL_NBYTES))
    yield "sentinel packets", Row(packet_rig, 5, f"{IN_PACKETS} reduce_scatter", of_packets(4 * INBOX_NBYTES))
    for size in (2, 3, 4):
        sizes = [1, 15, 16, 1000, 3071, 3072, 3073, 12287, 49152, 65536]
        make = partial(direct_rig, nbytes=size << 16)
        yield f"direct-{size}", Row(make, size, "allgather alltoall bcast", sizes, options=INTO_OUTPUTS)
    yield "programs", Row(ProgramRig, 3, WHOLE, LENGTHS)
    yield "programs with blocks", Row(ProgramRig, 3, IN_BLOCKS, (*LENGTHS, 5 * LARGE))
    tree = {"reduction": ("float32", "tree")}
    yield "programs of trees", Row(ProgramRig, 4, "allreduce allreduce:two_shot reduce_scatter", OF_TREES, options=tree)
    # Also messages that inboxes do not hold; more of them go one way.
    yield "programs without other memory", Row(partial(ProgramRig, bare=True), 3, BARE, (4, LARGE + 4, 3 * LARGE))
    for size, algorithm, kinds, into in (
        (2, "one_shot", "allreduce allgather bcast", INTO_OUTPUTS),
        (3, "two_shot", "allreduce bcast:chain bcast", INTO_OUTPUTS),
        (3, "ring", "allreduce", INTO_OUTPUTS),
        (2, "copy_engine", "allreduce allgather bcast", INTO_OUTPUTS),
        (3, "copy_engine", "allreduce allgather bcast", {"one_by_one": True}),
    ):
        make = partial(ProgramRig, nbytes=3 * LARGE * size)
        options = {"reduction": ("int32", "sum"), "algorithm": algorithm, **into}
        yield f"straight into memory-{size}-{algorithm}", Row(make, size, kinds, STRAIGHT, options=options)


EVERY_SIZE = dict(every_size())


@pytest.mark.parametrize("name", EVERY_SIZE)
def test_every_size_at_which_something_changes(builds: Builds, name: str) -> None:
    row = EVERY_SIZE[name]
    rig: Any = row.make(Machine(builds, row.size))
    if row.start:
        rig.start_at(row.start)
    play(rig, row.kinds, row.sizes, seed=row.size, **row.options)
    assert name != "programs without other memory" or not rig.requests


REDUCED, RING = "allreduce allreduce allreduce:two_shot scan", " allreduce:ring allreduce:ring"
CHAINED = "reduce:chain reduce:chain reduce:chain"
COUNTS = (1, 2, 15, 1021, 9001)
# Types of each size, of each kind of state of a reduction, and of each way to read an element.
TYPES: list[tuple[str, tuple[str, str], str, Sequence[int]]] = [
    ("exchange", ("bool", "land"), REDUCED + RING, COUNTS),
    ("exchange", ("float8_e4m3fn", "avg"), REDUCED, COUNTS),
    ("exchange", ("bfloat16", "sum"), RING, COUNTS),
    ("exchange", ("complex128", "prod"), REDUCED + RING, COUNTS),
    ("exchange", ("float32", "a * 2 - b"), REDUCED + RING, COUNTS),
    ("chain", ("int8", "sum"), CHAINED, COUNTS),
    ("chain", ("uint16", "max"), CHAINED, COUNTS),
    ("chain", ("float64", "sum"), CHAINED, COUNTS),
    ("chain", ("complex128", "prod"), CHAINED, COUNTS),
    ("chain", ("float32", "a * 2 - b"), CHAINED, COUNTS),
    ("packets", ("float8_e4m3fn", "max"), "allreduce", (5,)),
    ("packets", ("bfloat16", "avg"), "allreduce:two_shot", (3001,)),
    ("packets", ("float32", "min"), "allreduce", (5,)),
    ("packets", ("complex64", "sum"), "allreduce:two_shot", (3001,)),
    ("packets", ("complex128", "sum"), "allreduce", (5,)),
    ("packets", ("int16", "sum"), "allreduce:two_shot", (3001,)),
    ("packets", ("float16", "a * 2 - b"), "allreduce", (5,)),
    ("packets", ("int64", "a * 2 - b"), "allreduce:two_shot", (3001,)),
]
RIGS: dict[str, Make] = {
    "exchange": partial(exchange_rig, channels=2, threads=(None, 160)),
    "chain": chain_rig,
    "packets": packet_rig,
}


@pytest.mark.parametrize(("make", "reduction", "kinds", "counts"), TYPES, ids=str)
def test_every_class_of_types(
    builds: Builds, make: str, reduction: tuple[str, str], kinds: str, counts: Sequence[int]
) -> None:
    itemsize = dtype_named(reduction[0]).itemsize
    play(RIGS[make](Machine(builds, 3)), kinds, [count * itemsize for count in counts], reduction=reduction)


# Ranks that are missing, and ranks whose calls differ.

Of = Callable[..., Calls]
QUANTIZED_INBOX = 6 * elements_of_step(3)


def quantized_as(wire: str, dtype: str = "bfloat16") -> Of:
    return partial(QuantizedCalls, wire=Wire(wire), dtype=dtype)


@pytest.mark.parametrize(
    ("inbox_nbytes", "of", "given"),
    [
        (INBOX_NBYTES, Calls, (*SUM, 700)),
        (QUANTIZED_INBOX, quantized_as("int8", "float32"), ("float32", "avg", 9 * elements_of_step(3), "two_shot")),
    ],
    ids=["plain", "quantized"],
)
def test_rank_that_is_missing_in_packets_is_named(builds: Builds, inbox_nbytes: int, of: Of, given: Any) -> None:
    rig = packet_rig(Machine(builds, 3), inbox_nbytes=inbox_nbytes, timeout_s=0.3)
    of(rig, np.random.default_rng(0), ranks=(0, 1)).allreduce(*given)
    with pytest.raises(RunFailedError, match=r"operation=2, sequence=1, block=\d, peer=12"):
        rig.machine.run(limit_s=20)


@pytest.mark.parametrize(
    ("size", "count", "rank", "peer"), [(3, 100, 1, 10), (2, 1 << 18, 0, 11)], ids=["is missing", "does not take"]
)
def test_rank_that_is_missing_in_a_chain_is_named(builds: Builds, size: int, count: int, rank: int, peer: int) -> None:
    rig = chain_rig(Machine(builds, size), timeout_s=0.2)
    # 2^18 elements are more than the slots of a block hold.
    Calls(rig, np.random.default_rng(0), ranks=(rank,), root=size - 1).reduce(*SUM, count, "chain")
    said = rf"fault on rank {rank}: state=2, operation=2, sequence=1, block=\d, peer={peer}"
    with pytest.raises(RunFailedError, match=said):
        rig.machine.run(limit_s=10)


@dataclass(frozen=True)
class Different:
    """A method of `Calls`, with the arguments of each rank. ``of`` makes the calls of each, or of all ranks."""

    make: Make
    method: str
    given: Sequence[tuple[Any, ...]]
    of: Sequence[Of] = (Calls,) * 3
    later: bool = False
    """Whether no rank waits for what differs. The next launch tells then."""


def lengths(nbytes: int, size: int = 3) -> tuple[Any, ...]:
    """Return the lengths of messages of rank 0 to the ranks 1 and, if there is one, 2."""
    counts = np.zeros((size, size), np.int64)
    counts[0, 1:] = (nbytes, 5)[: size - 1]
    return (counts,)


def different() -> Iterator[tuple[str, Different]]:
    for counts in ((100, 99), (1, 100)):
        given = [(*SUM, count, "chain") for count in counts]
        yield f"lengths in a chain-{counts}", Different(chain_rig, "reduce", given, [partial(Calls, root=1)] * 2)
    packets: Make = partial(packet_rig, timeout_s=5)
    for taken in (0, 99, 101):
        each = [lengths(nbytes) for nbytes in (100, taken, 100)]
        yield f"lengths of a message-{taken}", Different(packets, "alltoallv", each, later=taken == 0)
    both_ways = np.array([[0, 100], [100, 0]])
    calls = [(both_ways, (hashes, hashes)) for hashes in ((0, 7), (8, 0))]
    yield "blocks of a message", Different(packets, "alltoallv", calls)
    packets, given = (
        partial(packet_rig, timeout_s=5, inbox_nbytes=QUANTIZED_INBOX),
        [("bfloat16", "sum", 700, "two_shot")],
    )
    quantized = [quantized_as(wire) for wire in ("int8", "float8_e4m3fn")]
    yield "quantized", Different(packets, "allreduce", given * 2, quantized)
    # Rank 2 takes from rank 1, which agrees with it. No rank takes from rank 0.
    packets, roots = partial(packet_rig, protocol="ll"), [partial(Calls, root=root) for root in (0, 1, 1)]
    yield "roots", Different(packets, "bcast", [(8,)] * 3, roots, later=True)
    for long in ((0, 400_000), (100, 400_000), (400_000, 0), (400_000, 100)):
        each = [lengths(nbytes, 2) for nbytes in long]
        yield f"lengths of a long message-{long}", Different(partial(ProgramRig, timeout_s=5), "alltoallv", each)
    # Their sum is the same. Data that is sent and not taken would be left for a later call.
    for first in (100, 6000):
        parts = [("int32", "sum", counts) for counts in ([first, 6100 - first], [6100 - first, first])]
        yield f"counts of a reduce-scatter-{first}", Different(ProgramRig, "reduce_scatter", parts)


DIFFERENT = dict(different())


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_whose_calls_differ_notice(builds: Builds, name: str) -> None:
    row = DIFFERENT[name]
    rig = row.make(Machine(builds, len(row.given)))
    for rank, (given, of) in enumerate(zip(row.given, row.of, strict=False)):
        getattr(of(rig, np.random.default_rng(0), ranks=[rank]), row.method)(*given)
    if row.later:
        rig.machine.run(limit_s=20)
        Calls(rig, np.random.default_rng(0)).allreduce(*SUM, 100)
    with pytest.raises(RunFailedError, match="operation=3, sequence=1"):
        rig.machine.run(limit_s=20)


def run_with_new_memory(builds: Builds, ranks: list[int], timeout_s: float = 20) -> None:
    """Run calls of all kernels, let the memory of these ranks be as at first, and run calls again."""
    rig = ProgramRig(Machine(builds, 2), timeout_s=timeout_s)
    calls = Calls(rig, np.random.default_rng(2), nap_us=100)
    for turn in range(2):
        checks = calls.of("allreduce", (4, 2800, 2 * LARGE)) + calls.of("allreduce:two_shot", [160_000])
        checks += calls.of("allgather bcast:chain", [2 * LARGE]) + calls.of("bcast", [LARGE])
        checks.append(calls.alltoallv(random_counts(np.random.default_rng(turn), 2, (0, 1, LARGE))))
        rig.machine.run(checks, seed=turn, jitter_us=100)
        rig.machine.clear()
        rig.renew(ranks)


def test_calls_go_on_only_if_the_memory_of_all_ranks_is_as_at_first(builds: Builds) -> None:
    run_with_new_memory(builds, [0, 1])
    with pytest.raises((RunFailedError, AssertionError)):
        run_with_new_memory(builds, [0], 1)


@pytest.mark.parametrize("count", [5, 3 * LARGE // 4])
def test_only_some_ranks_are_in_place_in_a_reduce_scatter(builds: Builds, count: int) -> None:
    rig = ProgramRig(Machine(builds, 3))
    dtype, counts = np.dtype(np.int32), [0, count, 0]
    parts = [samples(dtype, count, np.random.default_rng(rank)) for rank in range(3)]
    sources = [rig.machine.place(rank, part) for rank, part in enumerate(parts)]
    for rank, source in enumerate(sources):
        blocks = patterns.blocks(source.address, counts, [0, 0, count], 4)
        scratch = rig.machine.allocate(rank, 4 * count).address if rank == 1 else 0
        output = Span(source.address, counts[rank])
        rig.run(rank, patterns.reduce_scatter(rank, 3, dtype, blocks, output, "sum", scratch=scratch))
    rig.machine.run()
    for rank, source in enumerate(sources):
        require_same(source.view(dtype), reduced("sum", parts) if rank == 1 else parts[rank])


def test_an_epilogue_follows_an_algorithm_that_does_not_apply_it(builds: Builds) -> None:
    rng, float32 = np.random.default_rng(2), np.dtype(np.float32)
    calls = FusedCalls(ProgramRig(Machine(builds, 2)), rng)
    for rows in (1, 6):
        residual, weight = (normal(float32, count, rng) for count in (288 * rows, 288))
        epilogue, written = rms_norm(residual, weight, 1e-3), {"residual": residual}
        more: dict[str, Any] = {"algorithm": "ring", "written": written, "values": normal}
        calls.allreduce(epilogue, SUM, "float32", 288 * rows, **more)
    calls.run()
