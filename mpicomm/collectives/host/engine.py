"""HostEngine: carries out exchanges between ranks of a node through shared host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.process import require_own_process
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.exchange import Exchange, Reduction
from mpicomm.collectives.host.channels import Aborted, Channels
from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.signature import Signature
from mpicomm.devices.handle import MemoryUse
from mpicomm.devices.host import array_at
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError, equal_error, name_ranks
from mpicomm.mpi.arguments import Span
from mpicomm.waiting import wait_until

# Measured. With smaller slots, waits take longer than copies. With fewer bytes in all slots, the sender overwrites a
# slot while its chunk is still in the reader's own cache. That is several times slower. With more bytes, the slot has
# left the shared cache.
SLOT_NBYTES = 1024 * 1024
SLOTS = 4

_LATE_S = 0.5  # how long an error waits for the calls of ranks that are a little late


class HostEngine:
    """Collectives on ordinary host memory: all data goes through the ranks' arenas, chunk by chunk.

    Construction is collective and raises as ``share`` does. `run` is blocking. All ranks of the node call it in the
    same order, each with one thread at a time. An engine that has raised `CollectiveTimeoutError` or `PeerError` is
    broken on every rank, and each later call raises at once.

    Why it cannot deadlock. All chunks of all calls have one order, the same on all ranks: by call, by exchange, by
    index in the exchange. For this all ranks must pass `run` the same number of exchanges. For each chunk in turn a
    rank first sends to its peers, then reads the data that they send. Take the slowest rank, at chunk k.

    - It cannot wait for ever to read. The sender of its chunk k is at chunk k or beyond. That rank finishes its sends
      of chunk k, because no send waits for ever.
    - It cannot wait for ever to send. A send waits for a slot. A rank has at least as many slots as peers, so chunk k
      does not fill them all. One slot holds an earlier chunk. All readers of that chunk are at chunk k or beyond, so
      they have read it.

    With one slot per peer a rank would wait for the readers of its last chunk before each next chunk. With two slots
    per peer it copies while they read.

    A rank sends a chunk before it writes the output of that chunk, because in place the output overwrites the input.
    """

    def __init__(
        self,
        node: Group,
        call_log: CallLog,
        *,
        slot_nbytes: int = SLOT_NBYTES,
        slots: int = SLOTS,
        first: int = 0,
    ) -> None:
        self._node = node
        self._call_log = call_log
        self._slot_nbytes = slot_nbytes
        self._channels = Channels(node, slot_nbytes, max(slots, 2 * (node.size - 1)), first, call_log.differ)
        self._peers = [(node.rank + step) % node.size for step in range(1, node.size)]
        self._reducer = cache(Reducer)
        self._slot_array = cache(lambda pointer, dtype: array_at(pointer, slot_nbytes // dtype.itemsize, dtype))
        self._broken: MpicommError | None = None
        self.awaited_in_other_domains: Callable[[], list[int]] = list
        """Returns the ranks of other domains for which ranks of the node wait."""

    @property
    def broken(self) -> MpicommError | None:
        """The error that has made the engine unusable on any rank; None while it works. Local."""
        return self._broken or self._channels.agreed_error.read()

    def run(self, exchanges: Sequence[Exchange], signature: Signature) -> None:
        """Carry out this rank's part of ``exchanges``. Collective in the node, blocking.

        It returns when this rank has copied all its data into slots, and has received and reduced its output. All ranks
        pass the same ``signature`` and the same number of exchanges.

        Raises `PeerError` if ranks called different things. Raises `CollectiveTimeoutError` with the rank that did not
        come within the node's ``timeout_s``. Both errors have the same text on all ranks of the node (`AgreedError`
        names the exception). A rank that did not have to wait raises them at its next call.
        """

        def work() -> None:
            for exchange in exchanges:
                self.execute(exchange)

        self.run_call(work, signature)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's arena; local."""
        return self._channels.memory_use()

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. `run` raises `InvalidUsageError` afterwards."""
        self._slot_array.cache_clear()
        self._channels.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena; local, after every peer's `close_peers`."""
        self._channels.close_own()

    def run_call(self, work: Callable[[], None], signature: Signature) -> None:
        """Run ``work``, this rank's part of a call, which executes exchanges. Collective, blocking.

        If ``work`` raises `CollectiveTimeoutError` or `PeerError` on one rank, all ranks raise it: see `run`.
        """
        require_own_process(signature.operation)
        if self._channels.closed:
            raise InvalidUsageError(f"{signature.operation}: the communicator was freed; create another")
        if self._broken is not None:
            earlier = f"this communicator is unusable since an earlier error ({self._broken}); create another"
            raise self._broken.like(f"{signature.operation}: {earlier}", self._broken.ranks)
        text, self._channels.hash32 = _text_and_hash(signature)
        self._call_log.post(text)
        try:
            self.raise_if_aborted()
            with np.errstate(all="ignore"):
                work()
        except Aborted as aborted:
            agreed_error = self._channels.agreed_error
            self._broken = agreed_error.read() or agreed_error.publish(self._error_of(aborted, text))
            raise equal_error(self._broken) from None
        except (CollectiveTimeoutError, PeerError) as error:
            self._broken = self._channels.agreed_error.publish(error)
            raise equal_error(self._broken) from None
        except BaseException as error:
            # Mostly a KeyboardInterrupt. Without an error the peers would wait for chunks that this rank does not send
            # or read.
            rank = self._node.ranks[self._node.rank]
            left = PeerError(f"{text}: rank {rank} left in the middle: {type(error).__name__}: {error}", ranks=[rank])
            self._broken = self._channels.agreed_error.publish(left)
            raise

    def time_out(self, signature: Signature, late: Sequence[int]) -> None:
        """Raise `CollectiveTimeoutError` for late ranks, as indices in the node. All ranks raise it: see `run`."""

        def fail() -> None:
            ranks = [self._node.ranks[index] for index in late]
            raise self._timeout_error(str(signature), ranks, "did not arrive")

        self.run_call(fail, signature)

    def raise_if_aborted(self) -> None:
        """Raise `Aborted`, which `run_call` handles, if a rank of the node has published an error. Local."""
        if self._channels.agreed_error.is_set():
            raise Aborted(Aborted.PEER_FAILED)

    def execute(self, exchange: Exchange) -> None:
        """Carry out this rank's part of an exchange, in a `run_call`. Collective, blocking."""
        itemsize = exchange.dtype.itemsize
        # Chunks hold whole elements, so that this rank can reduce every chunk. An element larger than a slot is cut
        # anywhere.
        step = self._slot_nbytes // itemsize * itemsize or self._slot_nbytes
        # Peers that get the same data share a message. Each rank begins with the next rank, so that not all ranks send
        # to one rank at the same time.
        readers: dict[Span, list[int]] = {}
        for peer in self._peers:
            span = exchange.sends[peer]
            if span is not None and span.count:
                readers.setdefault(span, []).append(peer)
        incoming = [
            (peer, span)
            for peer in reversed(self._peers)  # the rank before this one sends to this rank first
            if (span := exchange.receives[peer]) is not None and span.count
        ]
        source, target = exchange.sends[self._node.rank], exchange.receives[self._node.rank]
        to_self = 0  # the bytes that this rank copies to itself
        if source is not None and target is not None and source.pointer != target.pointer:
            to_self = source.count * itemsize
        reduced, reduce = 0, None
        if exchange.reduction and exchange.reduction.output.count:
            reduced = exchange.reduction.output.count * itemsize
            reduce = self._reduction(exchange.reduction, exchange.dtype)
        longest = max(span.count for span in (Span(0, 0), *readers, *(span for _, span in incoming))) * itemsize
        channels = self._channels
        for start in range(0, max(longest, to_self, reduced), step):
            for span, peers in readers.items():
                if start < span.count * itemsize:
                    channels.send(span.pointer + start, min(step, span.count * itemsize - start), peers)
            # The copy comes after the sends, because they have brought the data into the cache, and before the waits
            # for peers.
            if start < to_self:
                assert source is not None and target is not None
                ctypes.memmove(target.pointer + start, source.pointer + start, min(step, to_self - start))
            for peer, span in incoming:
                if start < span.count * itemsize:
                    size = min(step, span.count * itemsize - start)
                    ctypes.memmove(span.pointer + start, channels.receive(peer, size), size)
                    channels.release((peer,))
            if reduce is not None and start < reduced:
                reduce(start // itemsize, min(step, reduced - start) // itemsize)
        if exchange.move is not None:
            source, target = exchange.move
            ctypes.memmove(target.pointer, source.pointer, target.count * itemsize)

    def _reduction(self, reduction: Reduction, dtype: np.dtype[Any]) -> Callable[[int, int], None]:
        """Return the function ``reduce(start, count)``, which receives and reduces ``count`` elements."""
        channels, rank = self._channels, self._node.rank
        reducer = self._reducer(reduction.op, dtype)
        output = array_at(reduction.output.pointer, reduction.output.count, dtype)
        own = array_at(reduction.own.pointer, reduction.own.count, dtype) if reduction.own else output
        others = [source for source in reduction.sources if source != rank]

        def reduce(start: int, count: int) -> None:
            nbytes = count * dtype.itemsize
            parts = [
                own[start : start + count]
                if source == rank
                else self._slot_array(channels.receive(source, nbytes), dtype)[:count]
                for source in reduction.sources
            ]
            reducer.reduce(parts, output[start : start + count])
            channels.release(others)

        return reduce

    def _error_of(self, aborted: Aborted, text: str) -> MpicommError:
        ranks = self._node.ranks
        behind = self._call_log.behind()
        # Ranks that call different things, for instance with different roots, may wait for each other.
        if aborted.reason == Aborted.TIMED_OUT and not self._call_log.differ() and not self._call_log.by_mpi():
            # The awaited rank may itself wait for a rank that has not come, so the call log names the late ranks. If no
            # rank is late, all ranks have come, and the awaited rank makes no progress.
            elsewhere = self.awaited_in_other_domains()
            late = elsewhere or [ranks[index] for index in behind or [aborted.index]]
            return self._timeout_error(text, late, "did not arrive" if behind or elsewhere else "made no progress")
        if aborted.reason == Aborted.SIZE_MISMATCH:
            source, here = ranks[aborted.index], ranks[self._node.rank]
            return PeerError(
                f"{text}: rank {source} sends {aborted.sent} bytes, but rank {here} expects {aborted.expected} (of one "
                "chunk): pass counts that agree",
                ranks=[source, here],
            )
        # This rank may be the first that notices, so it gives ranks that are a little late time to post their call.
        wait_until(lambda: not self._call_log.behind(), _LATE_S)
        calls = "; ".join(f"rank {rank}: {call}" for rank, call in zip(ranks, self._call_log.read(), strict=True))
        return PeerError(f"ranks called different things: {calls}", ranks=ranks)

    def _timeout_error(self, text: str, late: list[int], did: str) -> CollectiveTimeoutError:
        limit = f"within {self._node.timeout_s:g} s (collective number {self._call_log.calls} of the communicator)"
        return CollectiveTimeoutError(f"{text}: {name_ranks(late)} {did} {limit}", ranks=late)


@lru_cache(maxsize=1024)
def _text_and_hash(signature: Signature) -> tuple[str, int]:
    return str(signature), signature.hash32
