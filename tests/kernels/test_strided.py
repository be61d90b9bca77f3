"""Messages with gaps, which kernels move without packing: every byte comes, and no byte of a gap changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.collectives.packed import Gaps
from mpicomm.collectives.patterns import Buffers
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.mpi.regions import Region
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.reference_packing import layout, pack, region, unpack
from tests.kernels.build import Builds
from tests.kernels.machine import Machine, Place, controls
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import LARGE_INBOX_NBYTES, ProgramRig

RUNS = (1, 2, 4, 6, 8, 12, 16, 24, 64, 1536)
LENGTHS = (50, 1548, 3 * LARGE_INBOX_NBYTES // 2 // 1536 * 1536, 27648)
BYTE = np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class StridedPattern(Pattern):
    """A call with gaps in its blocks."""

    gaps: tuple[Gaps | None, ...] = ()

    @property
    def form(self) -> Form:
        return replace(super().form, gaps=self.gaps)


def random_region(rng: np.random.Generator, nbytes: int, begin: int) -> Region:
    """Return a region of so many bytes, whose lowest byte is ``begin``."""
    if rng.random() < 0.2:
        return region(begin, [], nbytes)
    run = int(rng.choice([each for each in RUNS if nbytes % each == 0]))
    rest, extent, loops, offset = nbytes // run, run, list[tuple[int, int]](), begin
    while rest > 1:
        divisors = [each for each in range(2, min(rest, 64) + 1) if rest % each == 0]
        rounds = rest if len(loops) == 3 or not divisors else int(rng.choice(divisors))
        stride = extent + int(rng.choice([0, 1, 4, 8, 16, 16 * extent if extent < 64 else 16]))
        if rng.random() < 0.2:
            offset, stride = offset + (rounds - 1) * stride, -stride
        loops.insert(0, (rounds, stride))
        extent, rest = abs(stride) * rounds, rest // rounds
    return region(offset, loops, run)


def random_layout(rng: np.random.Generator, nbytes: int) -> DatatypeLayout:
    """Return a layout of so many bytes in up to four regions. The order of packed memory is not that of memory."""
    pieces, end = list[Region](), 0
    while nbytes:
        piece = (
            nbytes if len(pieces) == 3 else int(rng.choice([each for each in (nbytes, 24, 16, 7) if each <= nbytes]))
        )
        pieces.append(random_region(rng, piece, end))
        end, nbytes = pieces[-1].ends[1] + int(rng.choice([1, 16])), nbytes - piece
    return layout(*(pieces[number] for number in rng.permutation(len(pieces))))


class Blocks:
    """Random memory of a rank with a block of each layout; the gaps keep their bytes."""

    def __init__(
        self, machine: Machine, rank: int, rng: np.random.Generator, layouts: Sequence[DatatypeLayout]
    ) -> None:
        self._layouts = layouts
        self._starts = np.cumsum([0, *(each.end + int(rng.integers(40)) for each in layouts)]).tolist()
        self.memory: Place = machine.place(rank, rng.integers(0, 256, self._starts[-1] + 16, np.uint8))
        self.expected = self.memory.bytes.copy()
        self.gaps = tuple(None if each.is_contiguous else Gaps.of(each) for each in layouts)
        assert all(each or layout.is_contiguous for each, layout in zip(self.gaps, layouts, strict=True))
        firsts = [each.regions[0].offset if each.regions else 0 for each in layouts]
        self.spans = [
            Span(self.memory.address + start + first if each.nbytes else 0, each.nbytes)
            for start, first, each in zip(self._starts, firsts, layouts, strict=False)
        ]

    def packed(self, block: int) -> np.ndarray:
        return pack(self._layouts[block], self.memory.bytes, self._starts[block])

    def expect(self, block: int, packed: np.ndarray) -> None:
        unpack(self._layouts[block], packed, self.expected, self._starts[block])


def exchange(
    rig: ProgramRig, rng: np.random.Generator, lengths: np.ndarray, turn: int, *, in_place: bool = False
) -> None:
    """Send ``lengths[source, target]`` bytes, an all-to-all."""
    machine, ranks = rig.machine, range(rig.size)
    receives = [Blocks(machine, rank, rng, [random_layout(rng, int(n)) for n in lengths[:, rank]]) for rank in ranks]
    sends = receives
    if not in_place:
        sends = [Blocks(machine, rank, rng, [random_layout(rng, int(n)) for n in lengths[rank]]) for rank in ranks]
    for rank in ranks:
        for peer in ranks:
            receives[rank].expect(peer, sends[peer].packed(rank))
        given = ((), ()) if in_place else (sends[rank].spans, sends[rank].gaps)
        buffers = Buffers(rank, rig.size, BYTE, sends=given[0], receives=receives[rank].spans)
        rig.run(rank, StridedPattern(ALLTOALLV, buffers, gaps=(*given[1], *receives[rank].gaps)))
    machine.run(seed=turn, jitter_us=200)
    for each in receives:
        np.testing.assert_array_equal(each.memory.bytes, each.expected)
    machine.clear()


@pytest.mark.parametrize(("size", "in_place"), [(2, True), (3, False)])
def test_messages_keep_their_bytes_and_gaps(builds: Builds, size: int, in_place: bool) -> None:
    rng, rig = np.random.default_rng(size), ProgramRig(Machine(builds, size))
    for turn in range(6):
        lengths = rng.choice([0, 50, 1548], (size, size))
        lengths[0, 1] = LENGTHS[turn % len(LENGTHS)]
        exchange(rig, rng, np.maximum(lengths, lengths.T) if in_place else lengths, turn, in_place=in_place)


def gather_to_all(rig: ProgramRig, rng: np.random.Generator, nbytes: int, turn: int) -> None:
    """Bring blocks of one length to all ranks. The last rank has no gaps, so it runs a kernel that knows none."""
    machine, ranks, plain = rig.machine, range(rig.size), layout(region(0, [], nbytes))

    def one(rank: int) -> DatatypeLayout:
        return plain if rank == rig.size - 1 else random_layout(rng, nbytes)

    sends = [Blocks(machine, rank, rng, [one(rank)]) for rank in ranks]
    receives = [Blocks(machine, rank, rng, [one(rank) for _ in ranks]) for rank in ranks]
    for rank in ranks:
        for peer in ranks:
            receives[rank].expect(peer, sends[peer].packed(0))
        pattern = patterns.allgather(rank, rig.size, BYTE, sends[rank].spans[0], receives[rank].spans)
        gaps = (*sends[rank].gaps, *receives[rank].gaps)
        rig.run(rank, StridedPattern(pattern.operation, pattern.buffers, gaps=gaps))
    machine.run(seed=turn, jitter_us=200)
    for each in receives:
        np.testing.assert_array_equal(each.memory.bytes, each.expected)
    machine.clear()


def test_ranks_with_gaps_meet_ranks_without_in_calls_of_one_length(builds: Builds) -> None:
    rng, rig = np.random.default_rng(3), ProgramRig(Machine(builds, 3))
    for turn, nbytes in enumerate((1, 50, 1548, 27648, LENGTHS[2])):
        gather_to_all(rig, rng, nbytes, turn)


MISTAKES = {
    "all bytes in the first region": Change(
        "strided.cuh", "while (at >= region->nbytes) at -= region++->nbytes;", "at %= region->nbytes;"
    ),
    "offset of a later region forgotten": Change("strided.cuh", "first + region->offset + (at", "first + (at"),
    "a word as wide as the address allows": Change(
        "strided.cuh", "return width < gaps.grain ? width : gaps.grain;", "return width;"
    ),
    "gaps of the peer instead of this rank": Change(
        "packet_worker.cuh", "x.receive_gaps[of], m.receives[of]", "x.send_gaps[of], m.receives[of]"
    ),
}


def run_mistake(builds: Builds, *, seed: int = 0, changes: Changes = ()) -> None:
    rng, rig = np.random.default_rng(seed), ProgramRig(Machine(builds, 2), changes=changes)
    exchange(rig, rng, np.array([[50, 1548], [1548, 50]]), seed)


test_failure_is_seen = controls(run_mistake, MISTAKES, match=r"are not equal|wrote beside|exit codes \[.*-11")
