"""Rows: the blocks of a call as rows of bytes that lie equally far apart, which a copy engine carries in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.collectives.packed import Gaps
from mpicomm.kernels.team import PACKET_NBYTES

_LEAST_ROW_NBYTES = 256
"""Copy engines of H200s carry such rows as fast as one run of bytes, and rows of 64 bytes at half the speed."""
_MOST_ROWS = 8  # of a block, because an engine rests for some microseconds between two copies
_MOST_PITCH = (1 << 31) - 1  # of CUDA's copies


class Rows(NamedTuple):
    """Rows of ``nbytes`` bytes, ``pitch`` bytes from one to the next, which follow each other in a message."""

    place: int
    nbytes: int
    number: int
    pitch: int

    @property
    def total(self) -> int:
        """The bytes of all rows."""
        return self.nbytes * self.number

    def part(self, begin: int, end: int) -> Iterator[Rows]:
        """Yield the rows of the bytes from ``begin`` up to ``end``: the rest of a row, whole rows, the start of one."""
        while begin < end:
            row, offset = divmod(begin, self.nbytes)
            rest = end - begin
            number = rest // self.nbytes if offset == 0 else 0
            nbytes = self.nbytes if number else min(self.nbytes - offset, rest)
            yield Rows(self.place + row * self.pitch + offset, nbytes, max(number, 1), self.pitch)
            begin += nbytes * max(number, 1)

    def narrowed(self, nbytes: int) -> Rows:
        """Return as many first rows of ``nbytes`` bytes, at most those of a row, as lie equally far apart."""
        return self if nbytes == self.nbytes else Rows(self.place, nbytes, self.nbytes // nbytes, nbytes)


def has_rows(gaps: Gaps | None) -> bool:
    """Return whether copy engines carry a block with these gaps as fast as one without."""
    if gaps is None:
        return True
    number = sum(prod(region.counts[1:]) for region in gaps.regions)
    fits = all(
        region.run_nbytes >= _LEAST_ROW_NBYTES
        and (region.counts[0] == 1 or region.run_nbytes <= region.strides[0] <= _MOST_PITCH)
        for region in gaps.regions
    )
    return fits and number <= _MOST_ROWS and gaps.grain == PACKET_NBYTES


def match(gaps: Gaps | None, others: Gaps | None) -> bool:
    """Return whether a block with these gaps goes to a place with others in few copies, and not in one for each row."""
    rows = [region.run_nbytes for each in (gaps, others) if each for region in each.regions]
    return gaps is None or others is None or len({*rows}) == 1


def rows_of(place: int, nbytes: int, gaps: Gaps | None = None) -> list[Rows]:
    """Return the rows of a block at an address."""
    if gaps is None:
        return [Rows(place, nbytes, 1, nbytes)]
    found = []
    for region in gaps.regions:
        outer = list(zip(region.counts, region.strides, strict=True))[:0:-1]
        for rounds in itertools.product(*(range(count) for count, _ in outer)):
            offset = sum(each * stride for each, (_, stride) in zip(rounds, outer, strict=True))
            first = place + region.offset + offset
            found.append(Rows(first, region.run_nbytes, region.counts[0], region.strides[0]))
    return found


def cut(rows: list[Rows], begin: int, nbytes: int) -> list[Rows]:
    """Return the rows of ``nbytes`` bytes of a message, from byte ``begin`` on."""
    found, end = list[Rows](), begin + nbytes
    for each in rows:
        found += each.part(max(begin, 0), min(end, each.total))
        begin, end = begin - each.total, end - each.total
    return found


def copies_of(targets: list[Rows], sources: list[Rows], *, local: bool = False) -> Iterator[Copy]:
    """Yield the copies from rows to other rows of as many bytes."""
    while sources:
        nbytes = min(targets[0].nbytes, sources[0].nbytes)
        target, source = targets[0].narrowed(nbytes), sources[0].narrowed(nbytes)
        number = min(target.number, source.number)
        if number == 1 or target.pitch == source.pitch == nbytes:
            yield Copy(target.place, source.place, nbytes * number, local)
        else:
            yield Copy(target.place, source.place, nbytes, local, number, target.pitch, source.pitch)
        targets, sources = ([*rows[0].part(nbytes * number, rows[0].total), *rows[1:]] for rows in (targets, sources))
