"""Messages with gaps, which kernels move without packing: every byte comes, and no byte of a gap changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.packed import Strides
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.layout import DatatypeLayout
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.inputs.regions import layout, region
from tests.helpers.references.reference_packing import pack, unpack
from tests.kernels.build import Builds
from tests.kernels.machine import Machine
from tests.kernels.rig import LARGE_INBOX_NBYTES, ProgramRig

RUNS = (1, 2, 4, 6, 8, 12, 16, 24, 64, 1536)
LENGTHS = (50, 1548, 3 * LARGE_INBOX_NBYTES // 2 // 1536 * 1536, 27648)


@dataclass(frozen=True, eq=False)
class StridedPattern(Pattern):
    """An all-to-all with gaps in its blocks."""

    strides: tuple[Strides | None, ...] = ()

    @property
    def form(self) -> Form:
        return replace(super().form, strides=self.strides)


def random_layout(rng: np.random.Generator, nbytes: int) -> DatatypeLayout:
    """Return a layout of so many bytes in one region, which begins at its lowest byte."""
    if not nbytes or rng.random() < 0.2:
        return layout(*[region(0, [], nbytes)] * bool(nbytes))
    run = int(rng.choice([each for each in RUNS if nbytes % each == 0]))
    rest, extent, loops, offset = nbytes // run, run, list[tuple[int, int]](), 0
    while rest > 1:
        divisors = [each for each in range(2, min(rest, 64) + 1) if rest % each == 0]
        rounds = rest if len(loops) == 3 or not divisors else int(rng.choice(divisors))
        stride = extent + int(rng.choice([0, 1, 4, 8, 16, 16 * extent if extent < 64 else 16]))
        if rng.random() < 0.2:
            offset, stride = offset + (rounds - 1) * stride, -stride
        loops.insert(0, (rounds, stride))
        extent, rest = abs(stride) * rounds, rest // rounds
    return layout(region(offset, loops, run))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_keep_their_bytes_and_gaps(builds: Builds, size: int) -> None:
    rng, rig = np.random.default_rng(size), ProgramRig(Machine(builds, size))
    machine = rig.machine
    for turn in range(8):
        lengths = rng.choice([0, 50, 1548], (size, size))
        lengths[0, 1] = LENGTHS[turn % len(LENGTHS)]
        made = [[[random_layout(rng, int(n)) for n in row] for row in each] for each in (lengths, lengths.T)]
        checks = []
        sent: dict[tuple[int, int], np.ndarray] = {}
        for rank in range(size):
            blocks: list[list[Span]] = []
            for number, receives in enumerate((False, True)):
                ends = np.cumsum([0, *(each.end + int(rng.integers(40)) for each in made[number][rank])])
                memory = machine.place(rank, rng.integers(0, 256, int(ends[-1]) + 16, np.uint8))
                before = memory.bytes.copy()
                spans = []
                for peer, (start, each) in enumerate(zip(ends[:-1], made[number][rank], strict=True)):
                    first = each.regions[0].offset if each.regions else 0
                    spans.append(Span(memory.address + int(start) + first if each.nbytes else 0, each.nbytes))
                    if not receives:
                        sent[rank, peer] = pack(each, before, int(start))
                blocks.append(spans)
                if receives:
                    checks.append((rank, memory, before, ends))
            strides = [None if each.is_run else Strides.of(each) for row in made for each in row[rank]]
            sends, received = blocks
            pattern = patterns.alltoall(rank, size, np.dtype(np.uint8), sends, received)
            strided = StridedPattern(pattern.operation, pattern.buffers, strides=tuple(strides))
            rig.run(rank, strided)
        machine.run(seed=turn, jitter_us=200)
        for rank, memory, expected, ends in checks:
            for peer, start in enumerate(ends[:-1]):
                unpack(made[1][rank][peer], sent[peer, rank], expected, int(start))
            np.testing.assert_array_equal(memory.bytes, expected)
        machine.clear()
