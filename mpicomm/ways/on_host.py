"""The ways of calls on host arrays that MPI does not carry out: mapped memory, and requests that compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import add
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.activity.page import begin_by_mpi
from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.operations import EXSCAN, SCAN
from mpicomm.devices.host import array_at
from mpicomm.errors import PeerError
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.session import Session
from mpicomm.ways.engines import Engines
from mpicomm.ways.location_votes import LocationVotes

_BYTE = np.dtype(np.uint8)
_TEXT_NBYTES = 512  # longer calls differ by their hash
_left: list[Any] = []
"""The memory of exchanges that no rank completes."""
Begun = MPI.Request | None
"""A call that was enqueued: MPI's request, or a `DeferredRequest`; None if no rank has to wait for it."""


class Way(Protocol):
    """Carries out calls of one communicator. All ranks take the same way for a call."""

    def enqueue(self, call: Call, *, blocking: bool) -> Begun:
        """Enqueue a call that was read. Collective.

        When this returns, a ``blocking`` call has to be over, or in the order of its stream. The answer is None then.
        Blocking, nonblocking and persistent calls differ in their use of the answer, see `dispatch`.
        """


class InMappedMemory:
    """The engine of the ranks' mapped memory, on one node or several. It blocks, because it has no thread."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def enqueue(self, call: Call, *, blocking: bool) -> None:
        """See `Way.enqueue`."""
        engines = self._engines
        if engines.channel is not None:
            name, why = call.algorithm, f'algorithm="{call.algorithm}"'
            if name == "auto":
                name, why = selection.best_mapped(call.operation, call.nbytes or 0), "by size, on mapped memory"
            engines.channel.choose(name if engines.on_one_node else "groups, mpi", why)
        engines.of_hosts(call.operation.name).run(call, call.algorithm)

    def give_up(self, call: Call, number: int) -> None:
        """Raise the error of a call for which votes of that number are missing: see `HostEngine.give_up`."""
        self._engines.on_host(call.operation.name).give_up(call.signature, number)


class Deferred:
    """Nonblocking calls on host arrays that MPI lacks, or that ``algorithm=`` takes from it. No start waits for a rank.

    MPI moves the data of all ranks in one nonblocking exchange. When the data has come, the request computes the result
    with NumPy in rank order, with the bits of mapped memory. A reduction needs memory for the data of all ranks. Each
    rank also tells the others its call, so `PeerError` names different calls. A wait has no limit, as in MPI.
    """

    def __init__(self, votes: LocationVotes, session: Session) -> None:
        self._votes = votes
        self._session = session
        self._completer = Completer()

    def enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest:
        """See `Way.enqueue`. Every ``call`` is nonblocking."""
        begin_by_mpi(self._session.row.words, call.operation.number)
        comm = self._votes.comm(call.operation)
        rank, size = comm.rank, comm.size
        scratch = np.empty(call.scratch_nbytes, _BYTE)
        exchange = call.operation.one_shot(call.buffers(Span(scratch.ctypes.data, 0) if scratch.size else None))
        lengths = [exchange.nbytes_with(peer) if peer != rank else (0, 0) for peer in range(size)]
        sent, received = zip(*lengths, strict=True)
        starts = [sum(received[:peer]) for peer in range(size)]
        came = np.empty(sum(received), _BYTE)
        said = np.zeros(_TEXT_NBYTES, _BYTE)
        text = str(call.signature).encode()[: _TEXT_NBYTES - 8]
        said[:8], said[8 : 8 + len(text)] = (
            np.frombuffer(call.signature.hash32.to_bytes(8, "little"), _BYTE),
            list(text),
        )
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
                raise _different(all_said)
            return moving.Test()

        # As in the schedules of several domains, a prefix is reduced in the order of all ranks.
        prefix = call.operation in (SCAN, EXSCAN)
        domains = [range(size)] if prefix else self._session.placement.domains

        def finish() -> None:
            with np.errstate(all="ignore"):
                _take(exchange, rank, [came.ctypes.data + start for start in starts], domains)

        return self.add(has_come, finish)

    def add(
        self, done: Callable[[], bool], finish: Callable[[], None], prepare_thread: Callable[[], None] = lambda: None
    ) -> DeferredRequest:
        """Return the request of work that MPI does until ``done``, and that ``finish`` ends on this rank.

        ``prepare_thread`` is for work on a device: see `Completer.add`.
        """
        return self._completer.add(DeferredRequest.of(done, finish), prepare_thread)


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


def _different(said: npt.NDArray[np.uint8]) -> PeerError:
    """Return the error of ranks that have said different calls."""
    calls = [bytes(each[8:]).rstrip(b"\0").decode(errors="ignore") for each in said]
    words = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    return PeerError(f"ranks called different things: {words}", ranks=range(len(calls)))
