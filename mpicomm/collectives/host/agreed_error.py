"""AgreedError: the error that all ranks of a node raise when they give up a host engine."""

from __future__ import annotations

import time

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import fence
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError

_CLASSES: dict[str, type[MpicommError]] = {each.__name__: each for each in (CollectiveTimeoutError, PeerError)}
_WORD = 8
_SETTLE_S = 0.02  # some time slices of the scheduler, because ranks may outnumber cores


class AgreedError:
    """The errors that ranks of a node have published in shared memory. All ranks raise the same one of them.

    ``memory`` is the same `nbytes` of zeroed shared memory on all ranks. It holds a word that becomes 1 with the first
    error, the length of each rank's error, and a slot for each rank's error.

    A rank publishes its error only if it sees no other error. A rank that sees any error waits `_SETTLE_S`, because
    ranks that fail at the same time publish their errors meanwhile. Then it decides for the error of the lowest rank
    that has published an error.

    Every rank decides once, for an error that some rank has published. All ranks decide for the same error, with one
    exception. A rank looks for other errors and publishes its own error microseconds later. The system may stop the
    rank in between for longer than `_SETTLE_S`. Then ranks that have decided keep their error, and later ranks may take
    the late error. Only a lock could exclude that, and a rank could die while it holds the lock.
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
        """Return whether any rank has published an error. Local, fast enough for a polling loop."""
        return self._there[0] != 0

    def read(self) -> MpicommError | None:
        """Return the error that this rank must raise; None if there is none. Local; waits `_SETTLE_S` once."""
        if self._decided is None and self.there():
            time.sleep(_SETTLE_S)
            self._decided = self._lowest()
        return self._decided

    def give(self, error: MpicommError) -> MpicommError:
        """Publish ``error`` if no rank has published an error, and return the error that this rank must raise; local.

        It waits `_SETTLE_S` once. An error longer than its slot loses its end.
        """
        name = type(error).__name__ if type(error).__name__ in _CLASSES else PeerError.__name__
        ranks = ",".join(map(str, error.ranks))
        said = f"{name}\n{ranks}\n{error}".encode(errors="replace")[: self._slot_nbytes]
        # This look comes as late as possible, because ranks may disagree if it is long before the publication.
        if not self.there():
            start = self._rank * self._slot_nbytes
            self._slots[start : start + len(said)] = said
            # Pairs with the second fence in `_lowest`: a rank that sees the length also sees the text.
            fence()
            self._lengths[self._rank] = len(said)
            # Pairs with the first fence in `_lowest`: a rank that sees the word also sees at least one length.
            fence()
            # This word may have several writers, because ranks that publish at the same time all write 1.
            self._there[0] = 1
        decided = self.read()
        assert decided is not None
        return decided

    def close(self) -> None:
        """Release the memory; local. Afterwards there is no error."""
        self._there = self._lengths = memoryview(bytes(_WORD)).cast("Q")
        self._slots = memoryview(b"")
        self._decided = None

    def _lowest(self) -> MpicommError:
        """Return the error of the lowest rank that has published one."""
        # Pairs with the second fence in `give`: this rank reads the lengths after the word, which publishes one of
        # them.
        fence()
        rank, length = next((rank, length) for rank, length in enumerate(self._lengths) if length)
        # Pairs with the first fence in `give`: this rank reads the text after its length, which publishes the text.
        fence()
        start = rank * self._slot_nbytes
        said = bytes(self._slots[start : start + length]).decode(errors="ignore")  # the slot may cut a character
        name, ranks, text = said.split("\n", 2)
        return _CLASSES[name](text, ranks=[int(rank) for rank in ranks.split(",") if rank])


def _slot_nbytes(size: int) -> int:
    """Return the bytes of one error between ``size`` ranks: a text, and a line of the call log for each rank."""
    return 2048 + 512 * size
