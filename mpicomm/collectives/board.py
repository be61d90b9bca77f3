"""Board: where each rank of a node writes which collective it is in, for the others to read when something is wrong."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import InvalidUsageError
from mpicomm.sharing.segments import share

_LINE_NBYTES = 256  # also of the counter, so that no two ranks write the same cache line
_KEPT = 16  # lines of a rank: where nobody has to wait, ranks that call different things notice it some calls later
_NBYTES = _LINE_NBYTES * (1 + _KEPT)
_NEVER_CALLED = "nothing yet"


class Board:
    """The latest collectives of each rank of the node as lines of text, in shared host memory whatever the device is.

    Each rank writes its own lines, one before it does anything else of a collective, and any rank reads all. A rank's
    counter is twice the number of its calls, and odd while the next line is being written: a line that is read is never
    half written, and a rank whose counter is behind has not come yet. Construction is collective and raises as `share`
    does.
    """

    def __init__(self, node: Group) -> None:
        backend = HostBackend(node.timeout_s)
        self._segments = share(node, backend, "call board", lambda: backend.allocate("memfd", _NBYTES), lambda: _NBYTES)
        self._node = node
        self._memory = [
            backend.view(self._segments[index], (_NBYTES,), np.dtype(np.uint8)).data for index in range(node.size)
        ]
        self._counters = [memory[:_LINE_NBYTES].cast("Q") for memory in self._memory]
        self._own: memoryview | None = self._counters[node.rank]
        self._count = 0  # what is in it between two calls
        self._written: list[str | None] = [None] * _KEPT

    def post(self, text: str) -> None:
        """Write this rank's next line; local, about a microsecond. Text beyond 256 bytes of UTF-8 is cut off."""
        counter = self._own
        if counter is None:
            raise InvalidUsageError(f"{text}: the communicator was freed; create another")
        self._count = count = self._count + 2
        line = count // 2 % _KEPT
        if text != self._written[line]:  # in a loop of one call the text is there already
            counter[0] = count - 1
            # Pairs with the second fence of `_text`: a reader that sees a byte of the new text finds, when it looks at
            # the counter again, that the line belongs to another call.
            fence()
            self._memory[self._node.rank][_place(line)] = _encode(text)
            self._written[line] = text
            # Pairs with the first fence of `_text`: a reader that sees the even counter sees the whole text.
            fence()
        counter[0] = count

    @property
    def calls(self) -> int:
        """How many collectives this rank has begun; local."""
        return self._count // 2

    def read(self) -> list[str]:
        """Return what each rank of the node called when they called different things, in the node's order; local.

        That is the first of their latest collectives in which they differ, and the last of all where they do not.
        """
        texts = self._difference() or [None] * self._node.size
        return [text or self._last(index) for index, text in enumerate(texts)]

    def differ(self) -> bool:
        """Return whether the ranks of the node have called different things of late; local."""
        return self._difference() is not None

    def all_differ(self) -> bool:
        """Return whether they have, and each has said what it called instead; local."""
        texts = self._difference()
        return texts is not None and None not in texts

    def behind(self) -> list[int]:
        """Return the indices of the ranks that have posted less often than this one; local."""
        mine = self._counters[self._node.rank][0]
        return [index for index, counter in enumerate(self._counters) if counter[0] < mine]

    def close_peers(self) -> None:
        """Unmap the peers' lines; local. The board cannot be used any more."""
        self._own = None
        self._memory.clear()
        self._counters.clear()
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's lines; local, after every peer's `close_peers`."""
        self._segments.close_own()

    def _difference(self) -> list[str | None] | None:
        """Return what each rank said of the first call in which they differ, None for those that have not come yet."""
        calls = self._counters[self._node.rank][0] // 2
        for call in range(max(1, calls - _KEPT + 2), calls + 1):
            texts = [self._text(index, call) for index in range(self._node.size)]
            if len({text for text in texts if text is not None}) > 1:
                return texts
        return None

    def _last(self, index: int) -> str:
        """Return the last line of a rank, and say so if that rank has not come as far as this one."""
        while True:
            calls = self._counters[index][0] // 2
            if calls == 0:
                return _NEVER_CALLED
            text = self._text(index, calls)
            if text is not None:  # else that rank has written as many others meanwhile
                return text + (" (before: has not called this time yet)" if index in self.behind() else "")

    def _text(self, index: int, call: int) -> str | None:
        """Return the line of a rank for the call of that number, None if it is not there yet, or no more."""
        if self._counters[index][0] // 2 < call:
            return None
        fence()
        text = bytes(self._memory[index][_place(call % _KEPT)])
        fence()
        if (self._counters[index][0] + 1) // 2 - call >= _KEPT:
            return None
        return text.rstrip(b"\0").decode(errors="replace")


def _place(line: int) -> slice:
    return slice(_LINE_NBYTES * (1 + line), _LINE_NBYTES * (2 + line))


@lru_cache(maxsize=1024)
def _encode(text: str) -> bytes:
    return text.encode()[:_LINE_NBYTES].ljust(_LINE_NBYTES, b"\0")
