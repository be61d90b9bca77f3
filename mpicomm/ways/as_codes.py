"""The way of calls on host arrays whose elements travel as codes of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives import wire
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.operations import ALLGATHER, ALLREDUCE, ALLTOALL, Operation
from mpicomm.devices.host import array_at
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.requests import DeferredRequest
from mpicomm.session import Session
from mpicomm.ways.on_host import Deferred, InMappedMemory
from mpicomm.ways.reader import Reader

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class AsCodes:
    """NumPy codes, adds and decodes, with the bits of the kernels. Codes of blocking calls go through mapped memory.

    In mapped memory, ranks with different calls notice it, and waits have a limit.
    """

    def __init__(self, session: Session, reader: Reader, mapped: InMappedMemory, deferred: Deferred) -> None:
        self._rank, self._size = session.placement.rank, len(session.placement.places)
        self._reader = reader
        self._mapped = mapped
        self._deferred = deferred

    def enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest | None:
        """See `Way.enqueue`."""
        if not blocking:
            return self._start(call)
        self._carry_out(call)
        return None

    def _start(self, call: Call) -> DeferredRequest:
        """Send the codes of all elements at once. Each rank computes all of its result from the codes of all ranks."""
        assert call.receive is not None and call.dtype is not None and call.wire is not None
        ranks, dtype, codes, again = range(self._size), call.dtype, call.wire.codes, call.wire.again
        whole, count = None if call.send is None else _view(call.send.whole(), dtype), call.receive.count
        outputs = [_view(Span(call.receive.pointer, count), dtype)]
        if not call.operation.reduces:
            outputs = [_view(call.receive.block(rank), dtype) for rank in ranks]
            operation, given = ALLGATHER, [outputs[self._rank] if whole is None else whole]
        elif call.operation.send == "blocks":
            assert call.send is not None
            operation, given = ALLTOALL, [_view(call.send.block(rank), dtype) for rank in ranks]
            outputs[0] = outputs[0][: given[0].size]
        else:
            assert whole is not None
            operation, given = ALLGATHER, [whole]
        sent = np.empty((len(given), wire.coded_nbytes(given[0].size)), np.uint8)
        for block, coded in zip(given, sent, strict=True):
            wire.encode(block, codes, coded)
        received = np.empty((self._size, sent.shape[1]), np.uint8)
        part = self._part(call, operation, sent.reshape(-1), received.reshape(-1))

        def finish() -> None:
            with np.errstate(all="ignore"):
                if call.operation.reduces:
                    total = self._total(call, received, given[0].size)
                    if call.operation is ALLREDUCE and again:
                        wire.encode(total, codes, received[0])
                        wire.decode(received[0], codes, total)
                    _convert(total, outputs[0])
                else:
                    self._decode(call, received, outputs)

        return self._deferred.add(self._deferred.enqueue(part, blocking=False).Test, finish)

    def _carry_out(self, call: Call) -> None:
        """Carry out a blocking call."""
        assert call.receive is not None and call.dtype is not None and call.wire is not None
        ranks, dtype = range(self._size), call.dtype
        if not call.operation.reduces:
            received = [_view(call.receive.block(rank), dtype) for rank in ranks]
            own = received[self._rank] if call.send is None else _view(call.send.whole(), dtype)
            self._gather(call, own, received)
        elif call.operation.send == "blocks":
            assert call.send is not None
            blocks = [_view(call.send.block(rank), dtype) for rank in ranks]
            total = self._reduce(call, blocks, blocks[0].size)
            _convert(total, _view(Span(call.receive.pointer, total.size), dtype))
        else:
            assert call.send is not None
            self._allreduce(call, _view(call.send.whole(), dtype), _view(call.receive.whole(), dtype))

    def _allreduce(self, call: Call, given: Array, output: Array) -> None:
        """Each rank reduces a shard, and sends it on."""
        assert call.wire is not None
        # Shards are whole blocks, so the result does not depend on the number of shards.
        count = -(-wire.blocks_of(given.size) // self._size) * wire.BLOCK
        starts = [min(rank * count, given.size) for rank in range(self._size + 1)]
        parts = [slice(start, stop) for start, stop in pairwise(starts)]
        total = self._reduce(call, [given[part] for part in parts], count)
        results = [output[part] for part in parts]
        if call.wire.again:
            self._gather(call, total, results)
        else:
            made = np.empty(count, output.dtype)
            _convert(total, made)
            gathered = self._exchange(call, ALLGATHER, made.view(np.uint8), made.nbytes * self._size)
            for result, of_rank in zip(results, gathered.reshape(self._size, -1), strict=True):
                result[:] = of_rank.view(output.dtype)[: result.size]

    def _reduce(self, call: Call, blocks: Sequence[Array], count: int) -> npt.NDArray[np.float32]:
        """Return the reduction of this rank's block of all ranks. ``count`` are the most elements of a block."""
        assert call.wire is not None
        codes, nbytes = call.wire.codes, wire.coded_nbytes(count)
        sent = np.zeros((self._size, nbytes), np.uint8)
        for block, coded in zip(blocks, sent, strict=True):
            padded = np.zeros(count, block.dtype)
            padded[: block.size] = block
            wire.encode(padded, codes, coded)
        received = self._exchange(call, ALLTOALL, sent.reshape(-1), sent.nbytes).reshape(self._size, nbytes)
        return self._total(call, received, count)

    def _total(self, call: Call, received: Bytes, count: int) -> npt.NDArray[np.float32]:
        """Return the reduction of the codes of all ranks."""
        assert call.wire is not None
        codes, total = call.wire.codes, np.empty(count, np.float32)
        wire.decode(received[0], codes, total)
        for coded in received[1:]:
            wire.add(coded, codes, total)
        if call.op == "avg":
            with np.errstate(all="ignore"):
                total /= np.float32(self._size)
        return total

    def _gather(self, call: Call, own: Array, outputs: Sequence[Array]) -> None:
        """Decode the codes of all ranks into ``outputs``. ``own`` has as many elements as the largest of them."""
        assert call.wire is not None
        coded = np.empty(wire.coded_nbytes(own.size), np.uint8)
        wire.encode(own, call.wire.codes, coded)
        gathered = self._exchange(call, ALLGATHER, coded, coded.nbytes * self._size)
        self._decode(call, gathered.reshape(self._size, -1), outputs)

    def _decode(self, call: Call, received: Bytes, outputs: Sequence[Array]) -> None:
        """Decode the codes of each rank into an output."""
        assert call.wire is not None
        decoded = np.empty(max(output.size for output in outputs), np.float32)
        for output, of_rank in zip(outputs, received, strict=True):
            wire.decode(of_rank, call.wire.codes, decoded)
            _convert(decoded[: output.size], output)

    def _exchange(self, call: Call, operation: Operation, sent: Bytes, nbytes: int) -> Bytes:
        """Return ``nbytes`` that this part of the call brings. Collective."""
        received = np.empty(nbytes, np.uint8)
        self._mapped.enqueue(self._part(call, operation, sent, received), blocking=True)
        return received

    def _part(self, call: Call, operation: Operation, sent: Bytes, received: Bytes) -> Call:
        """Return a collective on codes, as a part of a call."""
        part = self._reader.read(operation, Arguments(sent, received), "auto", None)
        part.of_call = call.signature
        return part


def _view(span: Span, dtype: np.dtype[Any]) -> Array:
    return array_at(span.pointer, span.count, dtype)


def _convert(values: npt.NDArray[np.float32], output: Array) -> None:
    with np.errstate(all="ignore"):
        np.copyto(output, values, casting="unsafe")
