"""A collective call as one rank makes it: its arguments read, checked, and turned into exchanges."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.operations import INTO_ALL
from mpicomm.collectives.signature import Signature
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse, parse_vector, require_separate
from mpicomm.mpi.ops import check_legal, op_name
from mpicomm.mpi.span import Span

Shape = Literal["one", "blocks", "vector"]


@dataclass(frozen=True)
class Form:
    """How an operation reads its buffers: one block, a block per rank, or a vector of blocks; and on which ranks."""

    send: Shape
    receive: Shape
    rooted: Literal["", "send", "receive", "bcast"] = ""
    """Which buffer only the root has."""
    reduces: bool = False
    counts_differ: bool = False
    """Whether ranks may know different counts, so that they cannot be compared."""


FORMS = {
    "Allgather": Form("one", "blocks"),
    "Allgatherv": Form("one", "vector", counts_differ=True),
    "Allreduce": Form("one", "one", reduces=True),
    "Alltoall": Form("blocks", "blocks"),
    "Alltoallv": Form("vector", "vector", counts_differ=True),
    "Bcast": Form("one", "one", rooted="bcast"),
    "Exscan": Form("one", "one", reduces=True),
    "Gather": Form("one", "blocks", rooted="receive"),
    "Gatherv": Form("one", "vector", rooted="receive", counts_differ=True),
    "Reduce": Form("one", "one", rooted="receive", reduces=True),
    "Reduce_scatter": Form("one", "one", reduces=True),
    "Reduce_scatter_block": Form("blocks", "one", reduces=True),
    "Scan": Form("one", "one", reduces=True),
    "Scatter": Form("blocks", "one", rooted="send"),
    "Scatterv": Form("vector", "one", rooted="send", counts_differ=True),
}


@dataclass(slots=True)  # not frozen, which would cost a device call a microsecond
class Arguments:
    """What the user passed to a collective."""

    send: Any = None
    receive: Any = None
    op: MPI.Op | None = None
    root: int = 0
    counts: Sequence[int] | None = None
    """``recvcounts`` of Reduce_scatter."""


class Call:
    """One collective call of one rank: read and checked. Local.

    ``dtype`` is None where only MPI can carry it out: a derived datatype, ``MPI.BOTTOM``, an operation or an element
    type that the engines do not know. Raises `InvalidUsageError` and `TypeError` as mpi4py raises ValueError and
    TypeError.
    """

    def __init__(self, operation: str, arguments: Arguments, rank: int, size: int, algorithm: str = "auto") -> None:
        self.operation = operation
        self._algorithm = algorithm
        self.arguments = arguments
        self._rank = rank
        self._size = size
        self._form = FORMS[operation]
        if self._form.rooted:
            _require_root(operation, arguments.root, size)
        self.send, self.receive = self._read_buffers()
        self.operands = [operand for operand in (self.send, self.receive) if operand is not None]
        self.op = op_name(arguments.op) if arguments.op is not None else None
        self.on_device = any(operand.on_device for operand in self.operands)
        if self.on_device and not all(operand.on_device or operand.total == 0 for operand in self.operands):
            raise InvalidUsageError(
                f"{operation}: one buffer is on a GPU, the other in host memory: move one of them, the call takes "
                "either"
            )
        self.dtype = self._common_dtype()
        self._require_agreeing_counts()

    @property
    def reduces(self) -> bool:
        """Whether the operation takes an ``op``."""
        return self._form.reduces

    @property
    def in_place(self) -> bool:
        """Whether this rank's input of a reduction is in its receive buffer."""
        return self.send is not None and self.send is self.receive

    @property
    def at_root(self) -> bool:
        """Whether this rank is the root; false where there is none."""
        return bool(self._form.rooted) and self._rank == self.arguments.root

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole call, the same number on every rank; None where ranks may know different ones."""
        if self._form.counts_differ and self.operation != "Allgatherv":
            return None
        assert self.dtype is not None
        per_rank = max((operand.count for operand in self.operands), default=0) * self.dtype.itemsize
        one_block = "blocks" not in (self._form.send, self._form.receive)
        return per_rank if one_block else per_rank * self._size

    @property
    def common_output(self) -> Operand | None:
        """The buffer that all ranks have, alike, and receive into; None where they may differ.

        In an all-to-all in place it is input too, of which a rank does not know when others have read it.
        """
        if self.operation not in INTO_ALL:
            return None
        return self.receive if self.operation != "Alltoall" or self.send is not None else None

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on."""
        count = None
        if not self._form.counts_differ:
            count = max((operand.count for operand in self.operands), default=0)
        root = self.arguments.root if self._form.rooted else None
        asked = None if self._algorithm == "auto" else self._algorithm  # others meet in other places, and in vain
        return Signature(self.operation, str(self.dtype), count, self.op, root, asked)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch memory that `exchanges` needs on this rank."""
        if not self.in_place or not self.operation.startswith("Reduce_scatter"):
            return 0
        if self.operation == "Reduce_scatter_block" and self.on_device:
            return 0  # equal blocks, of which the engine of GPUs sends parts: see `patterns.reduce_scatter`
        assert self.dtype is not None and self.send is not None
        return max(1, self._reduce_blocks(self.send)[self._rank].count * self.dtype.itemsize)

    def exchanges(
        self, piece_nbytes: int | None, scratch: Span | None = None, *, algorithm: str = ""
    ) -> list[Exchange]:
        """Return the call as exchanges; two-shot where ``piece_nbytes`` is given and the operation has one.

        With ``algorithm`` "ring" or "chain" each rank sends to the next alone.
        """
        assert self.dtype is not None
        rank, size, root = self._rank, self._size, self.arguments.root
        if not self._form.reduces:
            return self._movement(piece_nbytes, chained=algorithm == "chain")
        dtype, op = self.dtype, self.op
        assert op is not None
        send, receive = self.send, self.receive
        output = receive.whole() if receive is not None else None
        if self.operation in ("Reduce_scatter", "Reduce_scatter_block"):
            assert send is not None and output is not None
            blocks = self._reduce_blocks(send)
            result = Span(output.pointer, blocks[rank].count)
            return patterns.reduce_scatter(rank, size, dtype, blocks, result, op, scratch=scratch)
        assert send is not None
        if algorithm == "chain":
            return patterns.chained_reduce(rank, size, dtype, send.whole(), output, op, root)
        if self.operation == "Reduce" and piece_nbytes and self.on_device:
            return patterns.relayed_reduce(rank, size, dtype, send.whole(), output, op, root)
        if self.operation == "Reduce":
            return patterns.reduce(rank, size, dtype, send.whole(), output, op, root)
        assert output is not None
        if algorithm == "ring":
            return patterns.ring_allreduce(rank, size, dtype, send.whole(), output, op)
        if self.operation == "Allreduce":
            return patterns.allreduce(rank, size, dtype, send.whole(), output, op, piece_nbytes=piece_nbytes)
        scan = patterns.scan if self.operation == "Scan" else patterns.exscan
        return scan(rank, size, dtype, send.whole(), output, op)

    def _movement(self, piece_nbytes: int | None, *, chained: bool) -> list[Exchange]:
        """Return the exchanges of a call that only moves: bytes go as words of whatever size fits all buffers."""
        assert self.dtype is not None
        rank, size, root = self._rank, self._size, self.arguments.root
        dtype, factor = types.movement(self.dtype)

        def one(operand: Operand | None) -> Span:
            assert operand is not None
            return _scaled(operand.whole(), factor)

        def each(operand: Operand | None) -> list[Span] | None:
            return None if operand is None else [_scaled(operand.block(peer), factor) for peer in range(size)]

        send, receive = self.send, self.receive
        if chained:
            return patterns.chained_bcast(rank, size, dtype, one(receive), root)
        if self.operation == "Bcast" and piece_nbytes and self.on_device:
            return patterns.relayed_bcast(rank, size, dtype, one(receive), root)
        if self.operation == "Bcast":
            return patterns.bcast(rank, size, dtype, one(receive), root, piece_nbytes=piece_nbytes)
        if self._form.send == "one":
            blocks = each(receive)
            own = one(send) if send is not None else (blocks or [])[rank]
            if self._form.rooted:
                return patterns.gather(rank, size, dtype, own, blocks, root)
            assert blocks is not None
            return patterns.allgather(rank, size, dtype, own, blocks)
        if self._form.rooted:
            sends = each(send)
            output = one(receive) if receive is not None else (sends or [])[rank]
            return patterns.scatter(rank, size, dtype, sends, output, root)
        received = each(receive)
        assert received is not None
        return patterns.alltoall(rank, size, dtype, each(send) or received, received)

    def _read_buffers(self) -> tuple[Operand | None, Operand | None]:
        arguments, form = self.arguments, self._form
        at_root = self.at_root
        if form.rooted == "bcast":
            return None, parse(arguments.receive, writable=not at_root, name="buf")
        has_send = form.rooted != "send" or at_root
        has_receive = form.rooted != "receive" or at_root
        send_in_place = has_send and is_in_place(arguments.send)
        receive_in_place = has_receive and is_in_place(arguments.receive) and form.rooted == "send" and at_root
        if send_in_place and form.rooted == "receive" and not at_root:
            raise InvalidUsageError(f"{self.operation}: sendbuf=MPI.IN_PLACE is for the root alone: pass a buffer")
        send = receive = None
        if has_receive and not receive_in_place:
            shape = form.receive
            if send_in_place and self.operation == "Reduce_scatter_block":
                shape = "blocks"  # the input of all ranks' blocks lies in the receive buffer
            receive = self._read(arguments.receive, shape, writable=True, name="recvbuf")
        if has_send and not send_in_place:
            send = self._read(arguments.send, form.send, writable=False, name="sendbuf")
        if send is not None and receive is not None:
            require_separate(send, receive, reduction=form.reduces)
            same = form.reduces and send.pointer == receive.pointer
            if same and send.total and receive.total:  # the same memory given twice
                send_in_place, self.arguments = True, replace(arguments, send=MPI.IN_PLACE)
        if send_in_place and form.reduces:
            send = receive
        return send, receive

    def _read(self, spec: Any, shape: Shape, *, writable: bool, name: str) -> Operand:
        if spec is None:
            raise TypeError(f"{self.operation}: {name} is None: pass a buffer")
        if shape == "vector":
            return parse_vector(spec, size=self._size, writable=writable, name=name)
        return parse(spec, blocks=self._size if shape == "blocks" else None, writable=writable, name=name)

    def _common_dtype(self) -> np.dtype[Any] | None:
        dtypes = [operand.dtype for operand in self.operands]
        if any(dtype is None for dtype in dtypes):  # `in` compares, and to NumPy None is float64
            return None
        first = dtypes[0]
        if any(dtype != first for dtype in dtypes):
            names = " and ".join(f"{operand.name} {operand.dtype}" for operand in self.operands)
            raise InvalidUsageError(f"{self.operation}: the element types differ: {names}; convert one")
        if self._form.reduces:
            if self.op is None:
                return None
            assert first is not None
            check_legal(self.op, first)
            return first if types.is_covered(first) else None
        return first

    def _require_agreeing_counts(self) -> None:
        """Raise where this rank's own two buffers contradict each other; what others pass, the engines compare."""
        if self.dtype is None or self.send is None or self.receive is None:
            return
        if self.operation == "Reduce_scatter":
            self._require_recvcounts(self.send, self.receive)
            return
        if self.in_place:
            return
        if self.operation in ("Alltoall", "Alltoallv"):
            sent, room = self.send.block(self._rank).count, self.receive.block(self._rank).count
        elif self._form.send == "one" and self._form.receive != "one":
            sent, room = self.send.total, self.receive.block(self._rank).count
        else:
            sent, room = (
                self.send.block(self._rank).count if self._form.send != "one" else self.send.count,
                (self.receive.total),
            )
        if sent != room:
            raise InvalidUsageError(
                f"{self.operation}: sendbuf holds {sent} elements where recvbuf has room for {room}: they must be equal"
            )

    def _require_recvcounts(self, send: Operand, receive: Operand) -> None:
        if self.arguments.counts is None:
            raise InvalidUsageError("Reduce_scatter: recvcounts is needed with MPI.IN_PLACE")
        counts = _read_counts(self.arguments.counts)
        if len(counts) != self._size or sum(counts) != send.total or min(counts) < 0:
            raise InvalidUsageError(
                f"Reduce_scatter: recvcounts={counts} must be {self._size} counts that add up to the "
                f"{send.total} elements of the input"
            )
        if receive.total < counts[self._rank]:
            raise InvalidUsageError(
                f"Reduce_scatter: recvbuf has room for {receive.total} elements, this rank receives "
                f"{counts[self._rank]}"
            )

    def _reduce_blocks(self, send: Operand) -> list[Span]:
        assert self.dtype is not None
        if self.operation == "Reduce_scatter_block":
            return [send.block(peer) for peer in range(self._size)]
        assert self.arguments.counts is not None
        counts = _read_counts(self.arguments.counts)
        starts = [sum(counts[:peer]) for peer in range(self._size)]
        return patterns.blocks(send.pointer, counts, starts, self.dtype.itemsize)


def is_in_place(buffer: Any) -> bool:
    """Whether a buffer argument says that the data is in the other one."""
    return buffer is MPI.IN_PLACE or buffer is None  # None says the same in mpi4py


def _require_root(operation: str, root: Any, size: int) -> None:
    try:
        rank = operator.index(root)
    except TypeError:
        raise TypeError(f"{operation}: root={root!r} is no rank: pass an integer from 0 to {size - 1}") from None
    if not 0 <= rank < size:
        raise InvalidUsageError(f"{operation}: root={root} is no rank: use 0 to {size - 1}")


def _read_counts(counts: Any) -> list[int]:
    """Return ``recvcounts`` as Python's integers: NumPy's are of 64 bits at most, which addresses exceed."""
    try:
        return [operator.index(count) for count in counts]
    except TypeError:
        raise TypeError(f"Reduce_scatter: recvcounts={counts!r}: pass a sequence of integers, one per rank") from None


def _scaled(span: Span, factor: int) -> Span:
    return span if factor == 1 else Span(span.pointer, span.count * factor)
