"""Board: where each rank of a node writes which collective it is in, for the others to read when something is wrong."""

from __future__ import annotations

import numpy as np

from mpicomm.backend.host import HostBackend, fence
from mpicomm.bootstrap import Group
from mpicomm.errors import InvalidUsageError
from mpicomm.shared_segments import share
from mpicomm.waiting import wait_until

_TEXT_NBYTES = 248  # with the counter a slot is 256 bytes, so that no two ranks write the same cache line
_SLOT_NBYTES = 256
_MOST_TEXTS = 1024
_PATIENCE_S = 0.1  # a rank may lose its core while it writes


class Board:
    """A line of text per rank of the node, in shared host memory whatever the communicator's device is.

    Each rank writes its own line, before it does anything else of a collective, and any rank reads all lines. A line
    has a counter, odd while the text is being written, two more for every `post`: what is read is never half written,
    and a rank whose counter is behind has not come yet. Construction is collective and raises as `share` does.
    """

    def __init__(self, node: Group) -> None:
        backend = HostBackend(node.timeout_s)
        self._segments = share(
            node, backend, "call board", lambda: backend.allocate("memfd", _SLOT_NBYTES), lambda: _SLOT_NBYTES
        )
        self._node = node
        self._lines = [
            backend.view(self._segments[index], (_SLOT_NBYTES,), np.dtype(np.uint8)).data for index in range(node.size)
        ]
        self._counters = [line.cast("Q") for line in self._lines]
        self._posted: str | None = None
        self._encoded: dict[str, bytes] = {}

    def post(self, text: str) -> None:
        """Write this rank's line; local, about a microsecond. Text beyond 248 bytes of UTF-8 is cut off."""
        if not self._counters:
            raise InvalidUsageError(f"{text}: the communicator was freed; create another")
        counter = self._counters[self._node.rank]
        count = counter[0]
        if text != self._posted:  # in a loop of one call the text is there already
            counter[0] = count + 1
            # Pairs with the second fence of `_read`: a reader that sees a byte of the new text finds, when it looks at
            # the counter again, that it has changed.
            fence()
            self._lines[self._node.rank][8 : 8 + _TEXT_NBYTES] = self._encode(text)
            self._posted = text
            # Pairs with the first fence of `_read`: a reader that sees the even counter sees the whole text.
            fence()
        counter[0] = count + 2

    def read(self) -> list[str]:
        """Return what each rank of the node has posted last, in the node's order; local."""
        return [self._read(index) for index in range(self._node.size)]

    def behind(self) -> list[int]:
        """Return the indices of the ranks that have posted less often than this one; local."""
        mine = self._counters[self._node.rank][0]
        return [index for index, counter in enumerate(self._counters) if counter[0] < mine]

    def close_peers(self) -> None:
        """Unmap the peers' lines; local. The board cannot be used any more."""
        self._lines.clear()
        self._counters.clear()
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's line; local, after every peer's `close_peers`."""
        self._segments.close_own()

    def _read(self, index: int) -> str:
        text = b""

        def read_whole() -> bool:
            nonlocal text
            count = self._counters[index][0]
            fence()
            text = bytes(self._lines[index][8 : 8 + _TEXT_NBYTES])
            fence()
            return count % 2 == 0 and self._counters[index][0] == count

        # A rank that was ended while it wrote leaves the counter odd for ever: its text may then be a mixture.
        wait_until(read_whole, _PATIENCE_S)
        return text.rstrip(b"\0").decode(errors="replace") or "nothing yet"

    def _encode(self, text: str) -> bytes:
        if text not in self._encoded:
            if len(self._encoded) >= _MOST_TEXTS:
                self._encoded.clear()
            self._encoded[text] = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
        return self._encoded[text]
