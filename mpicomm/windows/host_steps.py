"""The steps of one-sided calls on host memory that the ranks of a node have mapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.host.reduction import Reducer
from mpicomm.devices.base import Scratch
from mpicomm.devices.host import HostBackend, array_at, fence
from mpicomm.errors import CollectiveTimeoutError
from mpicomm.interrupts import uninterrupted
from mpicomm.kernels.window import FENCE, LOCATING, LOCK_ROW, ROW_WORDS, ROWS_OF_COUNTS, START, WAIT, late_lock
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.waiting import wait_until
from mpicomm.windows.buffers import Target
from mpicomm.windows.host_locks import HostLocks, LateError, holding_mutex
from mpicomm.windows.steps import Count, ranks_in
from mpicomm.windows.updates import Update, combine_pairs

_WORD, _BYTE = np.dtype(np.uint64), np.dtype(np.uint8)


def gather(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Pack elements, which lie from ``memory`` on, to ``packed``."""
    array_at(packed, layout.nbytes, _BYTE)[:] = _reached(layout, memory)[_places_of(layout)]


def scatter(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Unpack elements from ``packed`` to their places from ``memory`` on."""
    _reached(layout, memory)[_places_of(layout)] = array_at(packed, layout.nbytes, _BYTE)


def _reached(layout: DatatypeLayout, memory: int) -> npt.NDArray[np.uint8]:
    return array_at(memory + layout.begin, layout.end - layout.begin, _BYTE)


@lru_cache(maxsize=16)  # a place takes eight bytes
def _places_of(layout: DatatypeLayout) -> npt.NDArray[np.int64]:
    """Return the place of each packed byte, in bytes from the first byte that the elements touch."""
    places = np.empty(layout.nbytes, np.int64)
    for region in layout.regions:
        begins: Any = np.array([region.offset - layout.begin])
        packed: Any = np.array([region.packed])
        for loop in region.loops:
            rounds = np.arange(loop.rounds)
            steps = loop.listed() if loop.places else rounds * loop.stride
            begins = (begins[:, None] + steps).ravel()
            packed = (packed[:, None] + rounds * loop.packed).ravel()
        run = np.arange(region.run_nbytes)
        places[(packed[:, None] + run).ravel()] = (begins[:, None] + run).ravel()
    return places


_NAMES = {FENCE: "Win.Fence", START: "Win.Start: the Post", WAIT: "Win.Wait: the Complete"}


class HostSteps:
    """The `Steps` of host memory. They do on the boards what window.cu does, and block. The stream is always 0.

    ``progress`` lets MPI go on while this rank waits, because a peer may be in a call of MPI that needs this rank.
    """

    def __init__(self, backend: HostBackend, boards: list[int], rank: int, progress: Callable[[], object]) -> None:
        self._backend = backend
        self._rank = rank
        self._addresses = boards
        rows = LOCK_ROW  # the rows of counts
        self._boards = [array_at(board, rows * ROW_WORDS, _WORD).reshape(rows, ROW_WORDS) for board in boards]
        self._locks = HostLocks(boards, rank)
        self._progress = progress
        self._scratch: Scratch = backend.scratch(0)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._backend.copy(target, source, nbytes, stream)

    def gather(self, layout: DatatypeLayout, memory: int, packed: int, stream: int) -> None:
        gather(layout, memory, packed)

    def scatter(self, layout: DatatypeLayout, memory: int, packed: int, stream: int) -> None:
        scatter(layout, memory, packed)

    def scratch(self, nbytes: int, stream: int) -> int:
        """Return memory that the next call uses again."""
        if self._scratch.nbytes < nbytes:
            self._scratch = self._backend.scratch(nbytes)
        return self._scratch.pointer

    def meet(self, count: Count, signals: int, waits: int, stream: int) -> None:
        inbox, sent, expected = self._rows(self._rank, count)
        # A release: it pairs with the fence after the wait below, on the peer. Without it, a weakly ordered CPU may let
        # the peer see the count before the data that this rank has written before it.
        fence()
        with uninterrupted():
            for peer in ranks_in(signals):
                # A peer of both sets gets the number that this rank waits for. So a call after a Ctrl-C in the wait
                # below repeats its signals; with new ones its peers would not wait for the next call.
                sent[peer] = (expected if waits >> peer & 1 else sent)[peer] + np.uint64(1)
                self._rows(peer, count)[0][self._rank] = sent[peer]
        for peer in ranks_in(waits):
            target = int(expected[peer]) + 1
            if not self._wait(lambda: int(inbox[peer]) >= target):  # noqa: B023
                name = _NAMES[count.operation]
                self._give_up(f"{name}: number {target} from rank {peer} did not come", peer)
        expected[list(ranks_in(waits))] += np.uint64(1)  # all at once, so that a Ctrl-C before it leaves no part
        # An acquire: it pairs with the fence before the signals above, on the peer. This rank reads the data of the
        # peer after the count that publishes the data.
        fence()

    def arrived(self, count: Count, ranks: int) -> bool:
        self._progress()
        inbox, _, expected = self._rows(self._rank, count)
        return all(inbox[rank] > expected[rank] for rank in ranks_in(ranks))

    def lock(self, ranks: int, stream: int, *, exclusive: bool, yields: bool) -> None:
        try:
            self._locks.take(ranks_in(ranks), self._wait, exclusive=exclusive, yields=yields)
        except LateError as error:
            peer, comes_first = error.peer, error.comes_first
        else:
            return
        self._give_up(f"Win.Lock: {late_lock(peer, comes_first=comes_first)}", peer)

    def unlock(self, ranks: int, stream: int, *, exclusive: bool) -> None:
        self._locks.give(ranks_in(ranks))

    def require_updatable(self, update: Update, target: Target, what: str) -> None:
        """Return, because NumPy updates elements of any size at any address."""

    def accumulate(self, update: Update, target: Target, values: int, result: int, stream: int) -> None:
        """Update elements while this rank holds the mutex of the target, so that no other update comes between."""
        elements, address = target.elements, target.address
        count = elements.nbytes // update.dtype.itemsize
        layout, dtype = elements.layout, update.dtype
        with holding_mutex(self._addresses[target.rank]):
            if layout is None:
                now = array_at(address, count, dtype)
            else:
                now = np.empty(count, dtype)
                gather(layout, address, now.ctypes.data)
            if result:
                np.copyto(array_at(result, count, dtype), now)
            if update.reads_only:
                return
            contribution = array_at(values, count, dtype)
            if update.op == "replace":
                np.copyto(now, contribution)
            elif update.op in LOCATING:
                combine_pairs(update.op, now, contribution)
            else:
                with np.errstate(all="ignore"):
                    Reducer(update.op, dtype).reduce([now, contribution], now)
            if layout is not None:
                scatter(layout, address, now.ctypes.data)

    def compare_and_swap(self, target: Target, value: int, compare: int, result: int, stream: int) -> None:
        nbytes = target.elements.nbytes
        now, new, expected, before = (array_at(at, nbytes, _BYTE) for at in (target.address, value, compare, result))
        with holding_mutex(self._addresses[target.rank]):
            previous = now.tobytes()
            if previous == expected.tobytes():
                now[:] = new
        before[:] = np.frombuffer(previous, np.uint8)

    def _wait(self, ready: Callable[[], bool]) -> bool:
        return wait_until(ready, self._backend.timeout_s, self._progress)

    def _rows(self, owner: int, count: Count) -> npt.NDArray[Any]:
        first = count.kind * ROWS_OF_COUNTS
        return self._boards[owner][first : first + ROWS_OF_COUNTS]

    def _give_up(self, text: str, peer: int) -> None:
        within = f"{text} within {self._backend.timeout_s:g} s; the communicator is unusable: create another"
        self._backend.fail(CollectiveTimeoutError(within, ranks=[peer]))
        self._backend.check()
