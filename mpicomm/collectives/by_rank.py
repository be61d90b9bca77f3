"""Turns the buffers of a call with a block for each neighbour into buffers with a block for each rank.

So a collective of neighbours is an all-to-all among all ranks, in which most pairs of ranks have no data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import Operation
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.derived import Elements
from mpicomm.mpi.layout import DatatypeLayout, layout_of, run_of, together


def blocks_for_ranks(
    operation: Operation, send: Operand, receive: Operand, neighborhood: Neighborhood, rank: int, size: int
) -> tuple[Operand, Operand, list[tuple[int, int]]]:
    """Return both buffers with blocks for ranks, and how the data to each rank and from it is cut; see `_cut_of`.

    The blocks are bytes, because a rank knows only the element types of its neighbours. Raises `InvalidUsageError` if
    this rank is its own neighbour and its blocks to itself differ from its blocks from itself.
    """
    one = operation.send == "one"
    outgoing = _blocks_of_ranks(send, neighborhood.destinations, neighborhood.outgoing(size), one=one)
    incoming = _blocks_of_ranks(receive, neighborhood.sources, neighborhood.incoming(size))
    sent, room = ([block.layout.nbytes for block in blocks[rank]] for blocks in (outgoing, incoming))
    if sent != room:
        raise InvalidUsageError(
            f"{operation}: this rank is its own neighbour, and its blocks of {sent} bytes do not fit its blocks of "
            f"{room} bytes: they must be equal"
        )
    cuts = [(_cut_of(to), _cut_of(of)) for to, of in zip(outgoing, incoming, strict=True)]
    return _by_rank(send, outgoing), _by_rank(receive, incoming), cuts


def _blocks_of_ranks(
    operand: Operand, neighbors: Sequence[int], numbers: Sequence[Sequence[int]], *, one: bool = False
) -> list[list[Elements]]:
    """Return the blocks of each rank, as ``numbers`` lists them. With ``one`` all neighbours have the first block."""
    blocks = [_block_of_neighbor(operand, 0 if one else number) for number in range(len(neighbors))]
    return [[blocks[number] for number in each] for each in numbers]


def _block_of_neighbor(operand: Operand, number: int) -> Elements:
    """Return the elements of a block of a device buffer that kernels can read."""
    if operand.dtype is not None:
        span = operand.block(number)
        return Elements(span.pointer, run_of(span.count * operand.dtype.itemsize))
    assert operand.derived is not None
    if operand.counts is not None:
        return operand.derived[number]
    assert operand.mpi_type is not None
    element = layout_of(operand.mpi_type)
    assert element is not None
    return Elements(operand.pointer + number * operand.count * element.extent, element.repeated(operand.count))


def _by_rank(operand: Operand, blocks: Sequence[Sequence[Elements]]) -> Operand:
    """Return ``operand`` as bytes. The block of a rank consists of the ``blocks`` of that rank, one after the other.

    If the blocks of each rank are one run of bytes, they stay in place. Else they are elements of a derived datatype,
    which kernels pack.
    """
    base = operand.pointer
    # Ranks that get the same blocks, as in an all-gather, have one layout, so a kernel packs these blocks once.
    made = {tuple(of_rank): together((block.address - base, block.layout) for block in of_rank) for of_rank in blocks}
    layouts = [made[tuple(of_rank)] for of_rank in blocks]
    counts = tuple(layout.nbytes for layout in layouts)
    displs, derived = tuple(layout.begin for layout in layouts), None
    if not all(map(_is_run, layouts)):
        derived = tuple(Elements(base, layout) for layout in layouts)
    total = sum(counts)
    return replace(operand, dtype=types.BYTE, count=total, total=total, counts=counts, displs=displs, derived=derived)


def _cut_of(blocks: Sequence[Elements]) -> int:
    """Return a number that says how the data of these blocks is cut; 0 for one block.

    Two neighbours may agree in the bytes of a message and still differ in its blocks.
    """
    lengths = [block.layout.nbytes for block in blocks]
    return zlib.crc32(struct.pack(f"<{len(lengths)}Q", *lengths)) if len(lengths) > 1 else 0


def _is_run(layout: DatatypeLayout) -> bool:
    return not layout.regions or (len(layout.regions) == 1 and not layout.regions[0].loops)
