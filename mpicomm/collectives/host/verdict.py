"""Verdict: the one error for which the ranks of a node give a host engine up, the same on all of them."""

from __future__ import annotations

import json
import time

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import fence
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.waiting import wait_until

_CLASSES: dict[str, type[MpicommError]] = {each.__name__: each for each in (CollectiveTimeoutError, PeerError)}
_WORD = 8
_RANKS_NBYTES = 4096
_ELECTION_S = 1.0
_BACK_OFF_S = 1e-4


class Verdict:
    """An error in shared memory that is written once, by whichever rank fails first, and raised by every rank.

    ``memory`` is the same `nbytes` of zeroed shared memory on all ranks: how long the verdict is, then a word per rank
    for the election, then the verdict itself.
    """

    def __init__(self, node: Group, memory: memoryview) -> None:
        self._node = node
        self._words = memory[: _WORD * (1 + node.size)].cast("Q")
        self._text = memory[_WORD * (1 + node.size) :]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how much memory the verdict of ``size`` ranks needs: a line of the board each, and some words."""
        return _WORD * (1 + size) + _RANKS_NBYTES + 6 * (512 + 512 * size)

    def there(self) -> bool:
        """Return whether there is one; local, fast enough for a polling loop."""
        return self._words[0] != 0

    def read(self) -> MpicommError | None:
        """Return the error that all ranks are to raise, or None; local."""
        length = self._words[0]
        if not length:
            return None
        # Pairs with the fence in `give`: the text that is read is not older than its length, which publishes it.
        fence()
        name, text, ranks = json.loads(bytes(self._text[:length]))
        return _CLASSES[name](text, ranks=ranks)

    def give(self, error: MpicommError) -> MpicommError:
        """Make ``error`` the verdict unless there is one, and return the one there is; local, a second at most.

        Two ranks that fail at once would otherwise raise different errors, or write one text over the other.
        """
        elected = self._enter()
        try:
            earlier = self.read()
            if earlier is not None or not elected:
                return earlier or error
            name = type(error).__name__ if type(error).__name__ in _CLASSES else PeerError.__name__
            # JSON needs six bytes for a character at most: what it is cut to fits.
            text = str(error)[: (len(self._text) - _RANKS_NBYTES) // 6]
            error = _CLASSES[name](text, ranks=error.ranks)
            said = json.dumps([name, text, error.ranks]).encode()
            self._text[: len(said)] = said
            # Pairs with the fence in `read`: a rank that sees the length sees the text.
            fence()
            self._words[0] = len(said)
            return error
        finally:
            fence()  # the verdict is there before the next rank gets in
            self._words[1 + self._node.rank] = 0

    def close(self) -> None:
        """Let go of the memory; local. There is no verdict any more."""
        self._words = memoryview(bytes(_WORD)).cast("Q")
        self._text = memoryview(b"")

    def _enter(self) -> bool:
        """Wait until no other rank is in `give`, and keep the others out. False if a rank died in there.

        Burns and Lamport's one-bit algorithm: Python has no atomic exchange, and this needs only loads and stores. Each
        rank raises its bit, then gives way to lower ranks and waits for higher ones.
        """
        words, own = self._words, 1 + self._node.rank
        deadline = time.monotonic() + _ELECTION_S
        while time.monotonic() < deadline:
            words[own] = 1
            # Own bit up before the others are read: of two ranks that do so at once, one at least sees the other.
            fence()
            if not any(words[1:own]):
                return wait_until(lambda: not any(words[own + 1 :]), _ELECTION_S)
            words[own] = 0
            time.sleep(_BACK_OFF_S)
        return False
