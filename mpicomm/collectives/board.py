"""Board: each rank of a node writes which collective it is in, and its peers read that when something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from mpicomm.activity.page import Row
from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import HostBackend, fence
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.sharing.segments import share

_LINE_NBYTES = 256  # the counter takes a line too, so that no two ranks write the same cache line
_KEPT = 16  # lines of a rank: ranks that need not wait for each other notice different calls some calls later
_MARKS = 4096  # marks of a rank: no rank is so many calls ahead of one that takes part in them
_NBYTES = _LINE_NBYTES * (1 + _KEPT) + 8 * _MARKS
_CALLS, _ASKED, _READY = 0, 1, 2  # the words of the first line
_NEVER_CALLED = "nothing yet"


class Board:
    """The latest collectives of each rank of the node as lines of text, in shared host memory for every device.

    Each rank writes its own lines, each before it does anything else for a collective. Any rank reads all lines. A
    rank's counter is twice the number of its calls, and odd while the rank writes the next line. So no rank reads a
    line that is half written, and a rank whose counter is behind has not come yet. Marks tell calls on the host from
    calls on the GPUs: see `witness`. Construction is collective and raises as `share` does. ``row`` shows this rank's
    calls to the doctor.
    """

    def __init__(self, node: Group, row: Row | None = None) -> None:
        backend = HostBackend(node.timeout_s)
        self._segments = share(node, backend, "call board", lambda: backend.allocate("memfd", _NBYTES), lambda: _NBYTES)
        self._node = node
        self._row = row or Row()
        self._memory = [
            backend.view(self._segments[index], (_NBYTES,), np.dtype(np.uint8)).data for index in range(node.size)
        ]
        self._counters = [memory[:_LINE_NBYTES].cast("Q") for memory in self._memory]
        self._marks = [memory[_LINE_NBYTES * (1 + _KEPT) :].cast("Q") for memory in self._memory]
        self._own: memoryview | None = self._counters[node.rank]
        self._count = 0  # the value of the own counter between two calls
        self._written: list[str | None] = [None] * _KEPT

    def post(self, text: str) -> None:
        """Write this rank's next line; local. Text beyond 256 bytes of UTF-8 is cut off."""
        counter = self._own
        if counter is None:
            raise InvalidUsageError(f"{text}: the communicator was freed; create another")
        self._count = count = self._count + 2
        line = count // 2 % _KEPT
        if text != self._written[line]:  # a loop of one call finds the text there already
            counter[0] = count - 1
            # Pairs with the second fence of `_text`: a reader that sees a byte of the new text sees by the counter,
            # which it reads again, that the line belongs to another call.
            fence()
            self._memory[self._node.rank][_place(line)] = _encode(text)
            self._written[line] = text
            # Pairs with the first fence of `_text`: a reader that sees the even counter sees the whole text.
            fence()
        counter[0] = count
        self._row.post(text)

    def post_on_host(self, text: str) -> None:
        """As `post`, for a call that is not on the GPUs. Its number stands in a mark."""
        self._require_open(text)
        call = self.calls + 1
        self._marks[self._node.rank][call % _MARKS] = call
        # Pairs with the fence of `is_on_host`: a reader that sees the counter of the call sees its mark.
        fence()
        self.post(text)

    def ready(self) -> None:
        """Tell the other ranks that this one launches its latest call next, and waits for nothing before; local."""
        if self._own is not None:
            self._own[_READY] = self._count

    def ask(self) -> int:
        """Tell the other ranks that this one does not know where the next call is; return the number of that call."""
        self._require_open("a call without elements")
        counter, call = self._counters[self._node.rank], self.calls + 1
        counter[_ASKED] = call
        return call

    def is_on_host(self, call: int) -> bool | None:
        """Return whether the call of that number is on the host; None while no rank has said so. Local.

        It is, too, where all ranks ask: they have no data for each other.
        """
        for index, counter in enumerate(self._counters):
            if counter[_CALLS] // 2 < call:
                continue
            # Pairs with the fence of `post_on_host`: the mark is read after the counter.
            fence()
            mark = self._marks[index][call % _MARKS]
            if mark <= call:  # else a later call has the mark, and this rank says nothing of the call
                return bool(mark == call)
        return True if self.nobody_knows(call) else None

    def nobody_knows(self, call: int) -> bool:
        """Return whether all ranks have asked where the call of that number is. Local."""
        return all(counter[_ASKED] >= call for counter in self._counters)

    def _require_open(self, text: str) -> None:
        if self._own is None:
            raise InvalidUsageError(f"{text}: the communicator was freed; create another")

    @property
    def calls(self) -> int:
        """How many collectives this rank has begun; local."""
        return self._count // 2

    def read(self) -> list[str]:
        """Return the call of each rank of the node, in the node's order; local.

        It is the first of their latest calls in which the ranks differ, and each rank's last call if they do not.
        """
        texts = self._difference() or [None] * self._node.size
        return [text or self._last(index) for index, text in enumerate(texts)]

    def differ(self) -> bool:
        """Return whether the ranks of the node differ in one of their latest calls; local."""
        return self._difference() is not None

    def all_differ(self) -> bool:
        """Return whether the ranks differ in a call that every rank has posted; local."""
        texts = self._difference()
        return texts is not None and None not in texts

    def behind(self) -> list[int]:
        """Return the indices of the ranks that have posted less often than this one; local."""
        mine = self._counters[self._node.rank][0]
        return [index for index, counter in enumerate(self._counters) if counter[0] < mine]

    def not_ready(self) -> list[int]:
        """Return the indices of the ranks that do not launch this rank's latest call yet; local."""
        return [index for index, counter in enumerate(self._counters) if counter[_READY] < self._count]

    def ahead(self) -> list[int]:
        """Return the indices of the ranks that have posted more often than this one; local."""
        if self._own is None:
            return []
        mine = self._own[0]
        return [index for index, counter in enumerate(self._counters) if counter[0] > mine]

    def testimony(self) -> str:
        """Return which ranks are in calls that this rank has not made, and the way out; "" if none is. Local."""
        ranks = self._node.ranks
        calls = [f"rank {ranks[index]} is in {self._last(index)}, or has left it" for index in self.ahead()]
        if not calls:
            return ""
        here = ranks[self._node.rank]
        return "; ".join([*calls, f"rank {here} has not made that call: make every collective call on all ranks"])

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's lines; local."""
        return (MemoryUse("call board", host_nbytes=self._segments.own.nbytes),)

    def close_peers(self) -> None:
        """Unmap the peers' lines; local. `post` raises `InvalidUsageError` afterwards."""
        self._own = None
        self._memory.clear()
        self._counters.clear()
        self._marks.clear()
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's lines; local, after every peer's `close_peers`."""
        self._segments.close_own()

    def _difference(self) -> list[str | None] | None:
        """Return each rank's line of the first call in which the ranks differ, None for a rank that has not come."""
        calls = self._counters[self._node.rank][0] // 2
        for call in range(max(1, calls - _KEPT + 2), calls + 1):
            texts = [self._text(index, call) for index in range(self._node.size)]
            if len({text for text in texts if text is not None}) > 1:
                return texts
        return None

    def _last(self, index: int) -> str:
        """Return the last line of a rank, with a remark if that rank has posted fewer calls than this one."""
        while True:
            calls = self._counters[index][0] // 2
            if calls == 0:
                return _NEVER_CALLED
            text = self._text(index, calls)
            if text is not None:  # else that rank has overwritten the line meanwhile
                return text + (" (its previous call: it has not made this one yet)" if index in self.behind() else "")

    def _text(self, index: int, call: int) -> str | None:
        """Return the line of a rank for the call of that number, None if it is not there yet or was overwritten."""
        if self._counters[index][0] // 2 < call:
            return None
        # Pairs with the second fence of `post`: the text is read after the even counter, so all of it is there.
        fence()
        text = bytes(self._memory[index][_place(call % _KEPT)])
        # Pairs with the first fence of `post`: the counter is read again after the text, so it shows a later call if
        # any byte of that call's text was read.
        fence()
        if (self._counters[index][0] + 1) // 2 - call >= _KEPT:
            return None
        return text.rstrip(b"\0").decode(errors="replace")


def _place(line: int) -> slice:
    return slice(_LINE_NBYTES * (1 + line), _LINE_NBYTES * (2 + line))


@lru_cache(maxsize=1024)
def _encode(text: str) -> bytes:
    return text.encode()[:_LINE_NBYTES].ljust(_LINE_NBYTES, b"\0")
