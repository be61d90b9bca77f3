"""AgreedError: the error with which the ranks of a node give up a host engine."""

from __future__ import annotations

import time

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import fence
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError

_CLASSES: dict[str, type[MpicommError]] = {each.__name__: each for each in (CollectiveTimeoutError, PeerError)}
_WORD = 8
_SETTLE_S = 0.02  # some turns of the scheduler, because ranks may outnumber cores


class AgreedError:
    """The errors that ranks of a node have published in shared memory, one of which all ranks raise.

    ``memory`` is the same `nbytes` of zeroed shared memory on all ranks: a word that is 1 as soon as there is an error,
    the length of each rank's error, and a slot for each rank's error.

    A rank publishes its error only if it sees no other. A rank that sees an error, its own or another's, waits
    `_SETTLE_S`, because ranks that fail at the same time publish theirs meanwhile, and then decides for the error of
    the lowest rank that has published one.

    Every rank decides once, for an error that some rank has published. All ranks decide for the same error unless the
    system holds a rank up for longer than `_SETTLE_S` between its look for other errors and the publication of its own,
    which are microseconds apart: ranks that have decided by then keep their error, and later ones may take the late
    one. To exclude that, a rank would have to hold a lock, and could die with it.
    """

    def __init__(self, node: Group, memory: memoryview) -> None:
        self._rank = node.rank
        self._slot_nbytes = _slot_nbytes(node.size)
        slots_at = _WORD * (1 + node.size)
        words = memory[:slots_at].cast("Q")
        self._there = words[:1]
        self._lengths = words[1:]
        self._slots = memory[slots_at:]
        self._decided: MpicommError | None = None

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that ``size`` ranks need."""
        return _WORD * (1 + size) + size * _slot_nbytes(size)

    def there(self) -> bool:
        """Return whether any rank has published an error; local, fast enough for a polling loop."""
        return self._there[0] != 0

    def read(self) -> MpicommError | None:
        """Return the error that this rank is to raise, None if there is none; local, waits `_SETTLE_S` once."""
        if self._decided is None and self.there():
            time.sleep(_SETTLE_S)
            self._decided = self._lowest()
        return self._decided

    def give(self, error: MpicommError) -> MpicommError:
        """Publish ``error`` if no rank has published one, and return the error that this rank is to raise; local.

        It waits `_SETTLE_S` once. An error longer than its slot loses its end.
        """
        name = type(error).__name__ if type(error).__name__ in _CLASSES else PeerError.__name__
        ranks = ",".join(map(str, error.ranks))
        said = f"{name}\n{ranks}\n{error}".encode(errors="replace")[: self._slot_nbytes]
        # As late as possible: the shorter the time from here to the publication, the surer all ranks agree.
        if not self.there():
            start = self._rank * self._slot_nbytes
            self._slots[start : start + len(said)] = said
            # Pairs with the fence in `_lowest`: a rank that sees the length sees the text.
            fence()
            self._lengths[self._rank] = len(said)
            # Pairs with the same fence: a rank that sees the word sees one length at least.
            fence()
            # Ranks that publish at the same time all write 1, so this word may have several writers.
            self._there[0] = 1
        decided = self.read()
        assert decided is not None
        return decided

    def close(self) -> None:
        """Let go of the memory; local. Afterwards there is no error."""
        self._there = self._lengths = memoryview(bytes(_WORD)).cast("Q")
        self._slots = memoryview(b"")
        self._decided = None

    def _lowest(self) -> MpicommError:
        """Return the error of the lowest rank that has published one."""
        # Pairs with the fences in `give`: the lengths are read after the word, which publishes one of them.
        fence()
        rank, length = next((rank, length) for rank, length in enumerate(self._lengths) if length)
        # Pairs with the first fence in `give`: the text is read after its length, which publishes it.
        fence()
        start = rank * self._slot_nbytes
        said = bytes(self._slots[start : start + length]).decode(errors="ignore")  # it may be cut within a character
        name, ranks, text = said.split("\n", 2)
        return _CLASSES[name](text, ranks=[int(rank) for rank in ranks.split(",") if rank])


def _slot_nbytes(size: int) -> int:
    """Return the bytes of one error between ``size`` ranks: some words, and a line of the call log for each rank."""
    return 2048 + 512 * size
