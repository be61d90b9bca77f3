"""Form: a collective call without its addresses and lengths. All calls of one kind share a form.

The patterns of `patterns.py` know addresses and counts. A form gets from them the exchange of one unit. In this
exchange an address encodes the buffer and the number of a unit in the buffer. So a `Piece` says where any call of the
form has its data.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Chain, Exchange, TwoShot
from mpicomm.collectives.operations import Operation, Shape
from mpicomm.collectives.patterns import Buffers
from mpicomm.kernels.reductions import Reduction, reduction_of
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.span import Span

# A unit of 128 bytes is a whole cache line. So patterns that begin shards at whole lines never cut a unit.
_UNIT = np.dtype("V128")
_BYTE = np.dtype(np.uint8)
_BUFFER = 1 << 40
"""The distance between the two buffers of a form, in bytes."""


class Piece(NamedTuple):
    """A piece of memory in a form."""

    buffer: int
    """1 for the send buffer, 2 for the receive buffer, 0 for no buffer: no data, or data that the rank does not
    store."""
    part: int
    """The number of the block or of the shard; -1 for no data."""


NO_PIECE = Piece(0, -1)


def has_form(call: Call) -> bool:
    """Return whether calls like this call differ only in addresses, counts and displacements."""
    shapes, neighborhood = {call.operation.send, call.operation.receive}, call.neighborhood
    typed = shapes == {"typed"} and neighborhood is None and call.scratch_nbytes == 0  # each block is a run of bytes
    readable = typed or shapes <= {"one", "blocks", "vector", "counted"}
    if neighborhood is not None and readable:
        # A datatype gives the size of elements at an address. If a rank is a neighbour twice, its message has two
        # blocks.
        readable = neighborhood.names_ranks_once and not any(operand.by_address for operand in call.operands)
    return readable and (typed or call.packed is None) and call.counted is None


class Form:
    """The form of a call between several ranks of a node."""

    def __init__(self, call: Call, rank: int, size: int) -> None:
        assert call.dtype is not None and has_form(call)
        operation: Operation = call.operation
        self.operation = operation
        self.size = size
        self.itemsize = call.dtype.itemsize if operation.reduces else 1
        """The bytes of the elements that `Call.buffers` counts. Calls that only move data count bytes."""
        self.epilogue = None if call.epilogue is None else call.epilogue.without_owners()
        """The epilogue that the algorithm's kernel applies, else None. Each call gives it memory by `place`."""
        self.element_nbytes = tuple(_element_nbytes(operand) for operand in (call.send, call.receive))
        """The bytes of an element of the send buffer and of the receive buffer."""
        self.neighborhood = call.neighborhood
        """The neighbours, to which the blocks of the buffers belong; None if the blocks belong to all ranks."""
        self.dtype = call.dtype
        self.op = call.op or ""
        self.wire = (call.wire, call.dtype) if call.wire is not None else None
        """See `GpuCall.wire`."""
        self.reduction: Reduction | None = reduction_of(call.dtype, self.op) if operation.reduces else None
        self.rank = rank
        self.root = call.arguments.root
        self.has_common_output = call.common_output is not None
        """Whether all ranks have output of the same form: see `Call.common_output`."""
        self.moves = call.in_place and operation.send == "counted"
        """Whether the result goes to scratch memory, and then to its place: if recvcounts cut an input in place."""
        self._in_place = call.in_place and not self.moves
        # In place, the receive buffer holds the input of a reduction and has the shape of the input.
        self.sends: Shape | None = operation.send if call.send is not None and not self._in_place else None
        self.receives: Shape | None = None
        if call.receive is not None:
            self.receives = operation.send if self._in_place else operation.receive
        if operation.of_neighbors:  # a call has a block for each rank, with no data for most of them
            self.sends = self.receives = "vector"
            given = call.given.send, call.given.receive
            self.element_nbytes = tuple(int(array_of(spec).itemsize) for spec in given)

    @property
    def is_even(self) -> bool:
        """Whether all blocks have one length, the same on all ranks."""
        return self.operation.is_even

    @property
    def blocks_sent(self) -> int:
        """The number of equal blocks in the send buffer; 0 if this rank has no send buffer, or is in place."""
        return self._blocks_in(self.sends)

    @property
    def blocks_received(self) -> int:
        """The number of equal blocks in the receive buffer; 0 if this rank has no receive buffer."""
        return self._blocks_in(self.receives)

    @property
    def parts(self) -> tuple[int, int]:
        """The number of blocks in the send buffer and in the receive buffer, if blocks have any lengths."""
        send, receive = (
            0 if shape is None else 1 if shape == "one" else self.size for shape in (self.sends, self.receives)
        )
        return send, receive

    @property
    def shards(self) -> int:
        """The number of shards of a call in two exchanges; a root has no shard."""
        return self.size - bool(self.operation.rooted)

    @property
    def blocks_counted(self) -> int:
        """The number of blocks that `Call.nbytes` counts. A table chooses by these bytes."""
        return self.size if "blocks" in (self.operation.send, self.operation.receive) else 1

    @cached_property
    def one_shot(self) -> Exchange:
        """The call as one exchange, with one unit in each block."""
        return self.operation.one_shot(self._units(1))

    @cached_property
    def two_shot(self) -> TwoShot:
        """The call as two exchanges, with whole units in each shard for any number of shards."""
        assert self.operation.two_shot is not None
        return self.operation.two_shot(self._units(self.size * (self.size - 1)))

    @cached_property
    def chain(self) -> Chain:
        """The call as a chain of one unit."""
        assert self.operation.chain is not None
        return self.operation.chain(self._units(1))

    def piece(self, span: Span | None, alike: Span | None = None) -> Piece:
        """Return the piece for which a span of `one_shot` or `two_shot` stands.

        A span without an address has only a length. For such a span, ``alike`` is a span of the same part with an
        address.
        """
        if span is None or span.count == 0:
            return NO_PIECE
        if span.pointer == 0:
            return Piece(0, self.piece(alike).part)
        buffer, offset = divmod(span.pointer, _BUFFER)
        return Piece(buffer, offset // (_UNIT.itemsize * span.count))

    def buffers(self, send: int, receive: int, nbytes: int) -> Buffers:
        """Return this rank's memory in a call: the addresses of both buffers, and the bytes of each block."""
        dtype = self.dtype if self.operation.reduces else _BYTE
        return self._buffers(dtype, send, receive, nbytes // self.itemsize)

    def _units(self, count: int) -> Buffers:
        """Return this rank's memory with ``count`` units in each block."""
        return self._buffers(_UNIT, _BUFFER, 2 * _BUFFER, count)

    def _buffers(self, dtype: np.dtype[Any], send_pointer: int, receive_pointer: int, count: int) -> Buffers:
        operation, nbytes = self.operation, count * dtype.itemsize
        given = receive_pointer if self._in_place else send_pointer
        send = send_blocks = output = blocks = None
        if self.sends is not None or self._in_place:
            if (self.sends or operation.send) == "one":
                send = Span(given, count)
            else:
                send_blocks = self._blocks(given, count, nbytes)
        if self.receives is not None:
            if operation.receive == "one":
                output = Span(receive_pointer, count)
            else:
                blocks = self._blocks(receive_pointer, count, nbytes)
        return Buffers(self.rank, self.size, dtype, send, send_blocks, output, blocks, self.op, self.root)

    def _blocks_in(self, shape: Shape | None) -> int:
        return 0 if shape is None else self.size if shape == "blocks" else 1

    def _blocks(self, pointer: int, count: int, nbytes: int) -> list[Span]:
        return [Span(pointer + rank * nbytes, count) for rank in range(self.size)]


def _element_nbytes(operand: Operand | None) -> int:
    return 0 if operand is None or operand.dtype is None else operand.dtype.itemsize
