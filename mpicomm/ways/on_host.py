"""Nonblocking calls on host arrays that MPI lacks, or that ``algorithm=`` takes from it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.activity.page import begin_by_mpi
from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.operations import EXSCAN, SCAN
from mpicomm.devices.host import array_at
from mpicomm.errors import PeerError
from mpicomm.mpi.arguments import Span
from mpicomm.session import Session

_BYTE = np.dtype(np.uint8)
_TEXT_NBYTES = 512  # longer calls differ by their hash
_left: list[Any] = []
"""The memory of exchanges that no rank completes."""


def start_exchange(call: Call, comm: MPI.Intracomm, session: Session) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Start a call; return whether its data has come, as a function, and the function that ends the call then.

    No start waits for a rank. MPI moves the data of all ranks in one nonblocking exchange over ``comm``. NumPy then
    computes the result in rank order, with the bits of mapped memory. A reduction needs memory for the data of all
    ranks. Each rank also tells the others its call, so `PeerError` names different calls. A wait has no limit, as in
    MPI.
    """
    begin_by_mpi(session.row.words, call.operation.number)
    rank, size = comm.rank, comm.size
    scratch = np.empty(call.scratch_nbytes, _BYTE)
    exchange = call.operation.one_shot(call.buffers(Span(scratch.ctypes.data, 0) if scratch.size else None))
    lengths = [exchange.nbytes_with(peer) if peer != rank else (0, 0) for peer in range(size)]
    sent, received = zip(*lengths, strict=True)
    starts = [sum(received[:peer]) for peer in range(size)]
    came = np.empty(sum(received), _BYTE)
    text = call.signature.hash32.to_bytes(8, "little") + str(call.signature).encode()
    said = np.frombuffer(text[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0"), _BYTE)
    all_said = np.empty((size, _TEXT_NBYTES), _BYTE)
    addresses = [span.pointer if span and n else 0 for span, n in zip(exchange.sends, sent, strict=True)]
    base = min((address for address in addresses if address), default=0)
    displs = [address - base if address else 0 for address in addresses]
    blocks = [MPI.memory.fromaddress(base, max(map(add, displs, sent))), sent, displs, MPI.BYTE]
    telling = MPI.Intracomm.Iallgather(comm, said, all_said)
    moving = MPI.Intracomm.Ialltoallv(comm, blocks, [came, received, starts, MPI.BYTE])

    def has_come() -> bool:
        if not telling.Test():
            return False
        if (all_said != said).any():
            _left.append((moving, call, came, scratch))  # MPI may still write there
            calls = [bytes(each[8:]).rstrip(b"\0").decode(errors="ignore") for each in all_said]
            words = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise PeerError(f"ranks called different things: {words}", ranks=range(size))
        return moving.Test()

    # As in the schedules of several domains, a prefix is reduced in the order of all ranks.
    domains = [range(size)] if call.operation in (SCAN, EXSCAN) else session.placement.domains

    def finish() -> None:
        with np.errstate(all="ignore"):
            _take(exchange, rank, [came.ctypes.data + start for start in starts], domains)

    return has_come, finish


def _take(exchange: Exchange, rank: int, came: Sequence[int], domains: Sequence[Sequence[int]]) -> None:
    """End an exchange whose data has come from each rank to an address. Local. ``domains`` are reduced one by one."""
    itemsize, own = exchange.dtype.itemsize, exchange.sends[rank]
    for peer, place in enumerate(exchange.receives):
        source = came[peer] if peer != rank else own and own.pointer
        if place is not None and place.count and source and source != place.pointer:
            ctypes.memmove(place.pointer, source, place.count * itemsize)
    reduction = exchange.reduction
    if reduction is not None and reduction.output.count:
        places = {source: came[source] for source in reduction.sources}
        if reduction.own is not None:
            places[rank] = reduction.own.pointer
        count, dtype = reduction.output.count, exchange.dtype
        output = array_at(reduction.output.pointer, count, dtype)
        parts = [[array_at(places[each], count, dtype) for each in ranks if each in places] for ranks in domains]
        if len(parts) == 1:
            Reducer(reduction.op, dtype).reduce(parts[0], output)
        else:
            from mpicomm.domains.reductions import reduce_on_host  # few programs need it

            reduce_on_host(reduction.op, parts, output)
    if exchange.move is not None:
        ctypes.memmove(exchange.move[1].pointer, exchange.move[0].pointer, exchange.move[1].count * itemsize)
