"""Calls on device arrays, also of neighbours, carried out in one process, without devices.

Memory of the host stands for memory of GPUs. NumPy packs in the place of the kernel, and bytes are copied from rank to
rank as the exchanges say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.packed import Gaps, PackJob
from mpicomm.devices.host import array_at
from mpicomm.mpi.arguments import Span
from tests.helpers.fakes.fake_driver import OnGpu
from tests.helpers.references.reference_packing import pack, unpack


class OnDevice(OnGpu):
    """A device array with a copy of the content."""

    def __init__(self, content: npt.NDArray[Any]) -> None:
        super().__init__(np.array(content))


class Part:
    """One rank's part of a call that was read. With ``strided`` blocks with gaps stay in place if kernels allow it.

    The exchange has none of these gaps: `pack` and `unpack` bring such blocks from their places and to them.
    """

    def __init__(self, call: Call, *, strided: bool = False) -> None:
        self.call, self.blocks = call, call.blocks if strided else call.packed_blocks
        nbytes = self.blocks.nbytes
        self._scratch = np.full(max(1, nbytes), 0xDB, np.uint8)
        buffers = call.buffers(self._scratch.ctypes.data if nbytes else 0, self.blocks)
        self.exchange: Exchange = call.operation.one_shot(buffers)
        self._of_gaps: tuple[list[_Block], list[_Block]] = [], []
        if self.blocks.gaps:
            form, sides = Form.of_call(call, buffers, self.blocks.gaps), list[tuple[Span | None, ...]]()
            for blocks, side in zip(self._of_gaps, ("sends", "receives"), strict=True):
                spans: list[Span | None] = list(getattr(self.exchange, side))
                for peer, of_form in enumerate(getattr(form.one_shot, side)):
                    gaps, span = form.gaps_of(of_form), spans[peer]
                    if gaps is not None and span is not None:
                        blocks.append(_Block(span, gaps))
                        spans[peer] = Span(blocks[-1].packed.ctypes.data, span.count)
                sides.append(tuple(spans))
            self.exchange = replace(self.exchange, sends=sides[0], receives=sides[1])

    @classmethod
    def of(cls, operation: str, buffers: Sequence[Any], rank: int, size: int, neighbors: Neighborhood) -> Part:
        """Read a call of the operation of that name."""
        return cls(Call(OPERATIONS[operation], Arguments(*buffers), rank, size, neighborhood=neighbors))

    def pack(self) -> None:
        """Bring data that has to be packed to scratch memory."""
        for job in self.blocks.before:
            packed = pack(job.layout, *_memory_of(job))
            self._scratch[job.packed : job.packed + packed.size] = packed
        for block in self._of_gaps[0]:
            block.packed[:] = block.memory[block.places]

    def unpack(self) -> None:
        """Bring packed data to its places."""
        for job in self.blocks.after:
            unpack(job.layout, self._scratch[job.packed : job.packed + job.layout.nbytes], *_memory_of(job))
        for block in self._of_gaps[1]:
            block.memory[block.places] = block.packed


def _memory_of(job: PackJob) -> tuple[npt.NDArray[np.uint8], int]:
    """Return the memory that a job touches, and the index of its address there."""
    begin, end = job.layout.begin, job.layout.end
    return array_at(job.memory + begin, end - begin, np.dtype(np.uint8)), -begin


class _Block:
    """Memory around a block with gaps, the places of its bytes there, and memory for the bytes without the gaps."""

    def __init__(self, span: Span, gaps: Gaps) -> None:
        found = []
        for region in gaps.regions:
            places = region.offset + np.arange(region.run_nbytes)
            for count, stride in zip(region.counts, region.strides, strict=True):
                places = np.add.outer(np.arange(count) * stride, places).ravel()
            assert places.size == region.nbytes
            found.append(places)
        places = np.concatenate(found)
        assert places.size == span.count
        first = int(places.min())
        self.memory = array_at(span.pointer + first, int(places.max()) + 1 - first, np.dtype(np.uint8))
        self.places, self.packed = places - first, np.zeros(span.count, np.uint8)


def exchange(parts: Sequence[Part]) -> None:
    """Bring each rank's data to the others; raise AssertionError if two ranks disagree on lengths."""
    for part in parts:
        part.pack()
    found: list[tuple[Span | None, npt.NDArray[np.uint8]]] = []
    hashes = [part.exchange.block_hashes or ((0, 0),) * len(parts) for part in parts]
    for rank, part in enumerate(parts):
        for peer, other in enumerate(parts):
            (sent, _), (_, received) = part.exchange.nbytes_with(peer), other.exchange.nbytes_with(rank)
            (sent_hash, _), (_, expected_hash) = hashes[rank][peer], hashes[peer][rank]
            assert sent == received, f"rank {rank} sends {sent} bytes where rank {peer} expects {received}"
            assert sent_hash == expected_hash, f"rank {rank} sends other blocks than rank {peer} expects"
            source = part.exchange.sends[peer]
            if sent and source is not None:
                data = array_at(source.pointer, sent, np.dtype(np.uint8)).copy()
                found.append((other.exchange.receives[rank], data))
    for target, data in found:
        assert target is not None
        array_at(target.pointer, data.size, np.dtype(np.uint8))[:] = data
    for part in parts:
        part.unpack()
