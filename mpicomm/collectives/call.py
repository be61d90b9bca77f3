"""Call: one rank's collective call, with its arguments read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicomm.collectives import checks, patterns
from mpicomm.collectives.call_log import CallLocation
from mpicomm.collectives.neighborhood import Neighborhood, blocks_for_ranks
from mpicomm.collectives.operations import ALLTOALLV, Operation
from mpicomm.collectives.packed import CallBlocks, blocks_of
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.signature import Signature
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import Epilogue
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, Span, parse, require_disjoint
from mpicomm.mpi.buffers import ArrayMemory, array_of, read
from mpicomm.mpi.device_counts import DeviceCounts, read_device_counts
from mpicomm.mpi.host_calls import for_mpi
from mpicomm.mpi.layout import Elements
from mpicomm.mpi.ops import Op, check_legal, op_name
from mpicomm.mpi.spec import Shape

_BYTE = np.dtype(np.uint8)


class Arguments(NamedTuple):
    """The arguments of a collective call, as the user passed them.

    Methods pass them as a plain tuple, because making this one takes a tenth of a known call.
    """

    send: Any = None
    receive: Any = None
    op: MPI.Op | None = None
    root: int = 0
    counts: Sequence[int] | None = None
    """``recvcounts``."""
    epilogue: Epilogue | None = None
    wire: Wire | None = None


class Call:
    """One collective call of one rank: read and checked. Local.

    ``location`` is the location on which the ranks have agreed; by default `is_on_gpus` decides.

    ``dtype`` is None if only MPI can carry out the call: with a derived datatype, with ``MPI.BOTTOM``, or with an
    operation or element type that the engines do not know. It is also None in a collective of neighbours on host
    arrays. A collective of neighbours needs ``neighborhood``.

    Data that is only moved counts as bytes. So the two buffers of a rank, and the buffers of two ranks, may name
    different types. MPI carries such data, too, although its standard allows that for few types. Raises
    `InvalidUsageError` if mpi4py raises ValueError, `TypeError` if mpi4py raises TypeError, and `RefusedByMpiError` if
    MPI raises.
    """

    def __init__(
        self,
        operation: Operation,
        arguments: Arguments,
        rank: int,
        size: int,
        algorithm: str = "auto",
        neighborhood: Neighborhood | None = None,
        *,
        location: CallLocation | None = None,
    ) -> None:
        self.operation = operation
        self.arguments = self.given = arguments
        self.stream: Any = None
        self.algorithm = algorithm
        self._rank = rank
        self._size = size
        self.neighborhood = neighborhood
        if operation.rooted:
            checks.require_root(operation, arguments.root, size)
        self._only_sends = operation.rooted == "bcast" and rank == arguments.root
        """Whether this rank only reads its receive buffer."""
        self.device_counts: DeviceCounts | None = None
        """The buffers if counts lie on the device; else None. `send` and `receive` are the whole buffers then."""
        self.send, self.receive = self._read_buffers()
        has_device_arrays = checks.is_on_gpus(operation, self.send, self.receive)
        self.on_device = has_device_arrays if location is None else location == "gpu"
        self.joins = self.on_device and not has_device_arrays
        """Whether this rank takes part with host memory in a call on GPUs of other ranks."""
        self.has_voted = False
        """Whether this rank has voted on the location of the call: see `mpicomm.dispatch.location_votes`."""
        on_device = [operand for operand in (self.send, self.receive) if operand is not None and operand.on_device]
        self.device_array = array_of(on_device[0].spec) if on_device else None
        """The first array on the GPU. A call without a stream uses the current stream of this array's library."""
        self.synchronizes = False
        """Whether a blocking call synchronizes the stream before it returns."""
        self.host_operands: list[tuple[Operand, bool]] = []
        """The host arrays with elements in a call on GPUs, as if in device memory, and whether each receives."""
        self._neighbor_blocks: tuple[Sequence[Elements], Sequence[Elements]] | None = None
        """The blocks to all ranks and from all ranks, if the call is one of neighbours on GPUs."""
        self._block_hashes: tuple[tuple[int, int], ...] = ()
        if self.on_device:
            self._read_for_kernels()
        self.operands = [operand for operand in (self.send, self.receive) if operand is not None]
        self.op = op_name(arguments.op) if arguments.op is not None else None
        self.dtype = self._common_dtype()
        self._recvcounts: list[int] = []
        self._require_agreeing_counts()
        finish = None if self.host_operands else arguments.epilogue  # kernels apply it to other memory
        self.epilogue = checks.bind_epilogue(operation, finish, self.dtype, self.send, self.receive)
        self.wire = arguments.wire
        """How elements travel quantized; None if they travel as they are."""
        if self.wire is not None:
            plain = self.epilogue is None and not any(operand.derived for operand in self.operands)
            self.wire.require(operation.name, self.dtype, self.op, self.operands, plain=plain)
            if size == 1:
                self.wire = None  # one rank sends nothing
        self.whole_call: Signature | None = None
        """The facts of the whole call if this call is a part of it. All ranks must agree in them."""

    @property
    def needs_mpi(self) -> bool:
        """Whether MPI carries the call out wherever the arrays of the ranks lie, as all ranks know."""
        return self.algorithm == "mpi" or (self.operation.reduces and self.dtype is None)

    @property
    def in_place(self) -> bool:
        """Whether the receive buffer holds this rank's input of a reduction."""
        return self.send is not None and self.send is self.receive

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole call, the same number on every rank; None if ranks may know different numbers."""
        operation = self.operation
        if operation.counts == "private":
            return None
        assert self.dtype is not None
        unit = self.dtype.itemsize if operation.reduces else 1
        per_rank = unit * self._length
        return per_rank * self._size if "blocks" in (operation.send, operation.receive) else per_rank

    @property
    def common_output(self) -> Operand | None:
        """The buffer that all ranks have in the same form and receive into; None if their buffers may differ.

        It is None for an all-to-all in place, because its buffer is input too, and no rank knows when the peers have
        read it. It is None if a derived datatype describes the buffer, because no rank knows whether the peers pack
        theirs.
        """
        input_too = self.operation.send == "blocks" and self.send is None
        elsewhere = self.receive is None or self.receive.derived or (self.epilogue and self.epilogue.converts)
        return self.receive if self.operation.into_all and not input_too and not elsewhere else None

    @property
    def signature(self) -> Signature:
        """The facts in which all ranks must agree."""
        if self.whole_call is not None:
            return self.whole_call
        operation, count = self.operation, None
        dtype = str(self.dtype) if operation.reduces else "bytes"
        if self.device_counts is not None:  # the numbers of elements travel as bytes
            dtype = f"elements of {self.device_counts.itemsize} bytes, counts on the GPU"
        if operation.counts == "same":
            count = self._length
        root = self.arguments.root if operation.rooted else None
        asked = None if self.algorithm == "auto" else self.algorithm  # ranks with different algorithms never meet
        epilogue = None if self.epilogue is None else self.epilogue.text
        wire = None if self.wire is None else str(self.wire)
        if wire is not None and not operation.reduces:
            dtype = str(self.dtype)  # blocks with scales are of elements, not of bytes
        return Signature(operation.name, dtype, count, self.op, root, asked, epilogue, wire)

    @cached_property
    def blocks(self) -> CallBlocks:
        """The blocks of this rank's buffers; blocks with `Gaps` stay in place. ``dtype`` must not be None."""
        return self._blocks(strided=True)

    @property
    def packed_blocks(self) -> CallBlocks:
        """Like `blocks`, for kernels that move only blocks without gaps."""
        return self._blocks(strided=False)

    def _blocks(self, *, strided: bool) -> CallBlocks:
        operation, send, receive, size = self.operation, self.send, self.receive, self._size
        if not operation.reduces:
            sides = self._neighbor_blocks or [
                () if operand is None else blocks_of(operand, 1 if shape == "one" else size)
                for operand, shape in ((send, operation.send), (receive, operation.receive))
            ]
            in_receive = self._only_sends or (send is None and operation.rooted in ("", "receive"))
            return CallBlocks.of(*sides, unpacks=not self._only_sends, packs_receives=in_receive, strided=strided)
        assert send is not None and self.dtype is not None
        if operation.send == "one":
            sends = [send.whole()]
        elif operation.send == "blocks":
            sends = [send.block(peer) for peer in range(size)]
        else:
            displs = [*accumulate(self._recvcounts[:-1], initial=0)]
            sends = patterns.blocks(send.pointer, self._recvcounts, displs, self.dtype.itemsize)
        if receive is None:
            return CallBlocks(sends, ())
        count = sends[self._rank if len(sends) > 1 else 0].count  # in place the buffer has the whole input
        nbytes = max(1, count * self.dtype.itemsize)
        if self.epilogue is not None and self.epilogue.converts:  # a byte may hold several elements of the result
            return CallBlocks(sends, [Span(0, count)], (False, True), nbytes)
        # If blocks are equal, kernels send a part of each before they overwrite it.
        moves = self.in_place and (
            operation.send == "by_recvcounts" or (operation.send == "blocks" and not self.on_device)
        )
        return CallBlocks(sends, [Span(receive.pointer, count)], nbytes=nbytes if moves else 0)

    def buffers(self, scratch: int = 0, blocks: CallBlocks | None = None) -> Buffers:
        """Return this rank's memory for the patterns. ``scratch`` is the address of scratch memory for the blocks."""
        assert self.dtype is not None
        blocks = blocks or self.blocks
        sends, receives = blocks.at(scratch)
        dtype = self.dtype if self.operation.reduces else _BYTE
        root, op = self.arguments.root, self.op or ""
        for_result = 0 if any(blocks.in_scratch) or not blocks.nbytes else scratch
        return Buffers(self._rank, self._size, dtype, sends, receives, op, root, self._block_hashes, for_result)

    @property
    def _length(self) -> int:
        """The bytes of an equal block, or of all blocks if they may differ; in a reduction the elements."""
        sides = (self.blocks.sends, self.operation.send), (self.blocks.receives, self.operation.receive)
        return max(
            spans[0].count if shape in ("one", "blocks") else sum(span.count for span in spans)
            for spans, shape in sides
            if spans
        )

    def _read_buffers(self) -> tuple[Operand | None, Operand | None]:
        arguments, operation = self.arguments, self.operation
        if operation is ALLTOALLV:
            self.device_counts = read_device_counts(
                arguments.send, arguments.receive, size=self._size, algorithm=self.algorithm
            )
            if self.device_counts is not None:
                return self.device_counts.send.operand, self.device_counts.receive.operand
        rooted, at_root = operation.rooted, self._rank == arguments.root
        has_receive = rooted != "receive" or at_root
        may_be_in_place = rooted in ("", "receive") and not operation.of_neighbors
        send_in_place = may_be_in_place and checks.is_in_place(arguments.send)
        receive_in_place = rooted == "send" and at_root and checks.is_in_place(arguments.receive)
        if send_in_place and not has_receive:
            raise InvalidUsageError(f"{operation}: sendbuf=MPI.IN_PLACE is only for the root: pass a buffer")
        send = receive = None
        if has_receive and not receive_in_place:
            # In place, the receive buffer of a reduction holds the input.
            shape = operation.send if send_in_place and operation.reduces else operation.receive
            name = "buf" if rooted == "bcast" else "recvbuf"
            receive = self._read(arguments.receive, shape, writable=not self._only_sends, name=name)
        if not send_in_place and (rooted in ("", "receive") or (rooted == "send" and at_root)):
            send = self._read(arguments.send, operation.send, writable=False, name="sendbuf")
        # MPI gets the memory that an object has exported, and bytes for moved data, which needs no MPI type.
        of = attrgetter("spec") if operation.reduces else for_mpi
        sent = arguments.send if send is None else of(send)
        received = arguments.receive if receive is None else of(receive)
        if sent is not arguments.send or received is not arguments.receive:
            self.arguments = arguments._replace(send=sent, receive=received)
        if send is not None and receive is not None:
            require_disjoint(send, receive, reduction=operation.reduces)
            same = operation.reduces and send.pointer == receive.pointer
            # The caller passed the same memory twice, or two empty buffers. Open MPI refuses these in Reduce_init.
            if same and bool(send.total) == bool(receive.total):
                send_in_place, self.arguments = True, self.arguments._replace(send=MPI.IN_PLACE)
        if send_in_place and operation.reduces:
            send = receive
        return send, receive

    def _read_for_kernels(self) -> None:
        """Read host arrays beside device arrays as if they were in device memory; find the blocks of neighbours."""
        operation, in_place, receive = self.operation, self.in_place, self.receive

        def on_device(operand: Operand | None) -> Operand | None:
            if operand is None or operand.on_device:
                return operand
            receives = operand is receive and not self._only_sends
            if operand.dtype is not None:
                made = replace(operand, on_device=True)
            else:
                shape = operation.receive if receives else operation.send
                memory = _as_device_memory(operand, writable=receives)
                made = self._read(operand.spec, shape, writable=receives, name=operand.name, memory=memory)
            if made.extents:
                self.host_operands.append((made, receives))
            return made

        self.receive = on_device(receive)
        self.send = self.receive if in_place else on_device(self.send)
        if self.neighborhood is not None:
            assert self.send is not None and self.receive is not None
            to_ranks, from_ranks, self._block_hashes = blocks_for_ranks(
                operation, self.send, self.receive, self.neighborhood, self._rank, self._size
            )
            self._neighbor_blocks = to_ranks, from_ranks

    def _read(
        self, spec: Any, shape: Shape, *, writable: bool, name: str, memory: ArrayMemory | None = None
    ) -> Operand:
        if spec is None:
            raise TypeError(f"{self.operation}: {name} is None: pass a buffer")
        size, peer = self._size, "rank"
        if self.neighborhood is not None:
            if spec is MPI.IN_PLACE:
                raise InvalidUsageError(
                    f"{self.operation}: {name}=MPI.IN_PLACE: neighbours exchange no data in place: pass a buffer"
                )
            neighbors = self.neighborhood.sources if writable else self.neighborhood.destinations
            size, peer = len(neighbors), "neighbour"
        return parse(spec, shape=shape, blocks=size, writable=writable, name=name, peer=peer, memory=memory)

    def _common_dtype(self) -> np.dtype[Any] | None:
        if self.operation.of_neighbors and not self.on_device:
            return None
        # A buffer without elements does not count. If only MPI knows the elements, this rank does not know their
        # number.
        having = [operand for operand in self.operands if operand.total or operand.dtype is None]
        dtypes = [operand.dtype for operand in having or self.operands]
        if self.on_device and not self.operation.reduces:  # kernels move elements of derived datatypes as bytes
            return next((dtype for dtype in dtypes if dtype is not None), types.BYTE)
        if any(dtype is None for dtype in dtypes):  # `in` compares, and NumPy takes None for float64
            if isinstance(self.arguments.op, Op):  # an error of NumPy inside MPI would end the program
                raise InvalidUsageError(
                    f"{self.operation}: {self.arguments.op!r} is for plain element types, not for derived datatypes "
                    "or types that NumPy lacks: use MPI.Op.Create"
                )
            return None
        first = dtypes[0]
        if not self.operation.reduces:
            return first
        if self.arguments.epilogue is not None:
            dtypes = dtypes[:1]  # an epilogue may convert
        if any(dtype != first for dtype in dtypes):
            names = " and ".join(f"{operand.name} {operand.dtype}" for operand in self.operands)
            raise InvalidUsageError(f"{self.operation}: the element types differ: {names}; convert one")
        if self.op is None:
            return None
        assert first is not None
        check_legal(self.op, first)
        return first if types.is_covered(first) else None

    def _require_agreeing_counts(self) -> None:
        """Raise if this rank's two buffers contradict each other. The engines compare the counts of different ranks."""
        send, receive, operation = self.send, self.receive, self.operation
        if operation.send == "by_recvcounts" and self.arguments.counts is None:
            raise InvalidUsageError(f"{operation}: recvcounts is needed with MPI.IN_PLACE: pass a count for each rank")
        if operation.of_neighbors or self.device_counts is not None:
            return
        if self.dtype is None or send is None or receive is None:
            return
        if operation.send == "by_recvcounts":
            counts = self.arguments.counts
            self._recvcounts = checks.read_recvcounts(operation, counts, send, receive, self._rank, self._size)
        elif not self.in_place:
            checks.require_room(operation, send, receive, self._rank, self.arguments.epilogue)


def _as_device_memory(operand: Operand, *, writable: bool) -> ArrayMemory:
    """Return the memory of a host operand as if it were device memory. Refuses ``MPI.BOTTOM``."""
    array = array_of(operand.spec)
    if array is MPI.BOTTOM:
        raise InvalidUsageError(
            f"{operand.name}: MPI.BOTTOM with addresses of the host, beside an array on a GPU: pass the array itself, "
            "and displacements from its start"
        )
    memory = ArrayMemory(0, 0, None, False, None, None) if array is None else read(array, writable, operand.name)
    return replace(memory, on_device=True)
