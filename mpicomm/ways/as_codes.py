"""The way of calls on host arrays whose elements travel as codes of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives import wire
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.operations import ALLGATHER, ALLREDUCE, ALLTOALL
from mpicomm.devices.host import array_at
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.requests import DeferredRequest
from mpicomm.session import Session
from mpicomm.ways.on_host import Deferred, InMappedMemory
from mpicomm.ways.reader import Reader


class AsCodes:
    """NumPy codes, adds and decodes, with the bits of the kernels. Codes of blocking calls go through mapped memory.

    In mapped memory, ranks with different calls notice it, and waits have a limit. Each rank computes all of its result
    from the codes of all ranks, so it needs memory for them.
    """

    def __init__(self, session: Session, reader: Reader, mapped: InMappedMemory, deferred: Deferred) -> None:
        self._rank, self._size = session.placement.rank, len(session.placement.places)
        self._reader = reader
        self._mapped = mapped
        self._deferred = deferred

    def enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest | None:
        """See `Way.enqueue`."""
        assert call.receive is not None and call.dtype is not None and call.wire is not None
        ranks, dtype, codes, again = range(self._size), call.dtype, call.wire.codes, call.wire.again

        def view(span: Span) -> npt.NDArray[Any]:
            return array_at(span.pointer, span.count, dtype)

        whole = None if call.send is None else view(call.send.whole())
        outputs = [view(Span(call.receive.pointer, call.receive.count))]
        if not call.operation.reduces:
            outputs = [view(call.receive.block(rank)) for rank in ranks]
            operation, given = ALLGATHER, [outputs[self._rank] if whole is None else whole]
        elif call.operation.send == "blocks":
            assert call.send is not None
            operation, given = ALLTOALL, [view(call.send.block(rank)) for rank in ranks]
            outputs[0] = outputs[0][: given[0].size]
        else:
            assert whole is not None
            operation, given = ALLGATHER, [whole]
        sent = np.empty((len(given), wire.coded_nbytes(given[0].size)), np.uint8)
        for block, coded in zip(given, sent, strict=True):
            wire.encode(block, codes, coded)
        received = np.empty((self._size, sent.shape[1]), np.uint8)
        part = self._reader.read(operation, Arguments(sent.reshape(-1), received.reshape(-1)), "auto", None)
        part.of_call = call.signature

        def finish() -> None:
            values = np.empty(given[0].size, np.float32)
            with np.errstate(all="ignore"):
                if not call.operation.reduces:
                    for output, coded in zip(outputs, received, strict=True):
                        wire.decode(coded, codes, values)
                        np.copyto(output, values, casting="unsafe")
                    return
                wire.decode(received[0], codes, values)
                for coded in received[1:]:
                    wire.add(coded, codes, values)
                if call.op == "avg":
                    values /= np.float32(self._size)
                if call.operation is ALLREDUCE and again:
                    wire.encode(values, codes, received[0])
                    wire.decode(received[0], codes, values)
                np.copyto(outputs[0], values, casting="unsafe")

        if not blocking:
            return self._deferred.add(self._deferred.enqueue(part, blocking=False).Test, finish)
        self._mapped.enqueue(part, blocking=True)
        finish()
        return None
