"""CallLog: each rank of a node writes which collective it is in. Its peers read that when something is wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpicomm.activity.layout import OFFSET_IN_TEXT, filled
from mpicomm.activity.page import CommunicatorRow
from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import InvalidUsageError
from mpicomm.sharing.segments import share
from mpicomm.symmetric.owner import SharedMemory

_LINE_NBYTES = 256
_KEPT = 16  # calls of a rank; ranks that do not wait for each other notice different calls only some calls later
_TEXTS = 64  # texts of a rank; more than the kept calls, so that a new text always finds a free slot
_MARKS = 4096  # marks of a rank; no rank gets so many calls ahead of a rank that takes part in them

# First come the words of calls, in whole lines. Then come the numbers of texts, the texts, and the marks.
_NUMBERS_AT = 2 * _LINE_NBYTES
_TEXTS_AT = _NUMBERS_AT + 8 * _TEXTS
_MARKS_AT = _TEXTS_AT + _LINE_NBYTES * _TEXTS
_NBYTES = _MARKS_AT + 8 * _MARKS
# The words of calls: the number of the latest call, the calls of `ask` and of `ready`, two longest messages, the latest
# calls, and their offsets.
_CALLS, _ASKED, _READY, _LONGEST_AT, _KEPT_AT = 0, 1, 2, 3, 5
_OFFSETS_AT = _KEPT_AT + _KEPT
_CHECKPOINT = (1 << 16) - 1  # the lowest bits of a longest message say at which checkpoint it was written

# The word of a kept call, from the lowest bit on: the number of the call, the number of its text, and a count. The word
# of its offset: the number of the call, and the offset.
_CALL_BITS, _TEXT_BITS = 8, 12
_CALL, _TEXT = (1 << _CALL_BITS) - 1, (1 << _TEXT_BITS) - 1
_COUNT_AT = _CALL_BITS + _TEXT_BITS
_NEVER_CALLED = "nothing yet"


class CallLog(SharedMemory):
    """The latest collectives of each rank of the node as texts with numbers, in shared host memory for every device.

    Each rank writes its own memory: one word or two for each call, before it does anything else for the call, and each
    text once. Every rank reads the memory of all ranks. The words of a call contain the number of the call. So a reader
    notices that a word is not there yet, or that a later call has overwritten it. Marks tell calls on the host from
    calls on the GPUs: see `witness`.

    Construction is collective and raises as `share` does. ``row`` shows this rank's calls to the doctor. ``by_mpi``
    returns the call by MPI of a rank that has not posted this rank's call; "" if that rank is only late.
    """

    def __init__(
        self, node: Group, row: CommunicatorRow | None = None, by_mpi: Callable[[int], str] = lambda rank: ""
    ) -> None:
        backend = HostBackend(node.timeout_s)
        segments = share(node, backend, "call log", lambda: backend.allocate("memfd", _NBYTES), lambda: _NBYTES)
        super().__init__("call log", "memfd", segments)
        self._node = node
        self._row = row or CommunicatorRow()
        self._by_mpi = by_mpi
        self._memory = [
            backend.view(segments[index], (_NBYTES,), np.dtype(np.uint8)).data for index in range(node.size)
        ]
        self._counters = [memory[:_NUMBERS_AT].cast("Q") for memory in self._memory]
        self._numbers = [memory[_NUMBERS_AT:_TEXTS_AT].cast("Q") for memory in self._memory]
        self._marks = [memory[_MARKS_AT:].cast("Q") for memory in self._memory]
        self._own: memoryview | None = self._counters[node.rank]
        self._calls = 0
        self._texts: dict[str, int] = {}
        """The texts in this rank's memory, with their numbers."""
        self._next_text = 0

    def post(self, text: str, count: int = 0, offset: int | None = None, *, ready: bool = False) -> None:
        """Write this rank's next call; local. Text beyond 256 bytes of UTF-8 is cut off.

        ``ready`` tells the other ranks as `CallLog.ready` does. Calls that differ only in numbers share a text. Readers
        fill ``count`` into it, and ``offset`` if the text has `OFFSET_IN_TEXT`.
        """
        counter = self._own
        if counter is None:
            raise InvalidUsageError(f"{filled(text, count, offset or 0)}: the communicator was freed; create another")
        number = self._texts.get(text)
        if number is None:
            number = self._write(text)
        self._calls = call = self._calls + 1
        if offset is not None:
            counter[_OFFSETS_AT + call % _KEPT] = offset << _CALL_BITS | call & _CALL
        counter[_KEPT_AT + call % _KEPT] = count << _COUNT_AT | (number & _TEXT) << _CALL_BITS | call & _CALL
        counter[_CALLS] = call
        if ready:
            counter[_READY] = call
        self._row.post(text, count, offset)

    def post_on_host(self, text: str) -> None:
        """As `post`, for a call on the host. A mark holds its number."""
        self._require_open(text)
        call = self._calls + 1
        self._marks[self._node.rank][call % _MARKS] = call
        # Pairs with the fence of `is_on_host`: a reader that sees the counter of the call also sees its mark.
        fence()
        self.post(text)

    def ready(self) -> None:
        """Tell the other ranks that this rank launches its latest call next and waits for nothing before; local."""
        # Pairs with `not_ready` of the peers. It needs no fence, because a peer that sees the word reads nothing else.
        if self._own is not None:
            self._own[_READY] = self._calls

    def ask(self) -> int:
        """Tell the other ranks that this rank does not know where its next call is; return the number of that call."""
        self._require_open("a call without elements")
        call = self._calls + 1
        self._counters[self._node.rank][_ASKED] = call
        return call

    def is_on_host(self, call: int) -> bool | None:
        """Return whether the call of that number is on the host; None while no rank has said where it is. Local.

        The call is also on the host if all ranks ask, because then no rank has data.
        """
        for index, counter in enumerate(self._counters):
            if counter[_CALLS] < call:
                continue
            # Pairs with the fence of `post_on_host`: this rank reads the mark after the counter.
            fence()
            mark = self._marks[index][call % _MARKS]
            if mark <= call:  # else a later call has overwritten the mark, and that rank gives no answer
                return bool(mark == call)
        return True if self.all_ask(call) else None

    def all_ask(self, call: int) -> bool:
        """Return whether every rank has asked where the call of that number is. Local."""
        return all(counter[_ASKED] >= call for counter in self._counters)

    def write_longest(self, checkpoint: int, nbytes: int) -> None:
        """Write this rank's longest message at a checkpoint for the other ranks; local. See `LongestMessage`."""
        self._counters[self._node.rank][_LONGEST_AT + checkpoint % 2] = nbytes << 16 | checkpoint + 1 & _CHECKPOINT

    def without_longest(self, checkpoint: int) -> list[int]:
        """Return the indices of the ranks that have not written their longest message at a checkpoint; local."""
        words = (counter[_LONGEST_AT + checkpoint % 2] for counter in self._counters)
        return [index for index, word in enumerate(words) if (word ^ checkpoint + 1) & _CHECKPOINT]

    def longest(self, checkpoint: int) -> int:
        """Return the longest message of all ranks at a checkpoint; local. Every rank must have written its own."""
        return max(counter[_LONGEST_AT + checkpoint % 2] >> 16 for counter in self._counters)

    def _require_open(self, text: str) -> None:
        if self._own is None:
            raise InvalidUsageError(f"{text}: the communicator was freed; create another")

    @property
    def calls(self) -> int:
        """How many collectives this rank has begun; local."""
        return self._calls

    def read(self) -> list[str]:
        """Return the call of each rank of the node, in the node's order; local.

        It is the first of the latest calls in which the ranks differ. If they do not differ, it is each rank's last
        call. A rank that is in a call by MPI in place of this rank's call has that call.
        """
        texts = self._difference() or [None] * self._node.size
        by_mpi = self.by_mpi()
        return [by_mpi.get(index) or text or self._last(index) for index, text in enumerate(texts)]

    def differ(self) -> bool:
        """Return whether the ranks of the node differ in one of their latest calls; local."""
        return self._difference() is not None

    def all_differ(self) -> bool:
        """Return whether the ranks differ in a call that every rank has posted; local."""
        texts = self._difference()
        return texts is not None and None not in texts

    def by_mpi(self) -> dict[int, str]:
        """Return the calls by MPI of ranks that have not posted this rank's latest call, by their index; local."""
        return {index: call for index in self.behind() if (call := self._by_mpi(self._node.ranks[index]))}

    def behind(self) -> list[int]:
        """Return the indices of the ranks that have posted fewer calls than this rank; local."""
        mine = self._counters[self._node.rank][0]
        return [index for index, counter in enumerate(self._counters) if counter[0] < mine]

    def not_ready(self) -> list[int]:
        """Return the indices of the ranks that are not ready to launch this rank's latest call; local."""
        return [index for index, counter in enumerate(self._counters) if counter[_READY] < self._calls]

    def ahead(self) -> list[int]:
        """Return the indices of the ranks that have posted more calls than this rank; local."""
        if self._own is None:
            return []
        mine = self._own[0]
        return [index for index, counter in enumerate(self._counters) if counter[0] > mine]

    def absence_reason(self) -> str:
        """Return a text that names the ranks in calls that this rank has not made, and the way out; else "". Local."""
        ranks = self._node.ranks
        calls = [f"rank {ranks[index]} is in {self._last(index)}, or has left it" for index in self.ahead()]
        if not calls:
            return ""
        here = ranks[self._node.rank]
        return "; ".join([*calls, f"rank {here} has not made that call: make every collective call on all ranks"])

    def close_peers(self) -> None:
        """Unmap the peers' calls; local. `post` raises `InvalidUsageError` afterwards."""
        self._own = None
        self._memory.clear()
        self._counters.clear()
        self._numbers.clear()
        self._marks.clear()
        super().close_peers()

    def _write(self, text: str) -> int:
        """Write a text over a text that no kept call uses; return the number of the new text."""
        own = self._node.rank
        words = self._counters[own][_KEPT_AT : _KEPT_AT + _KEPT]
        in_use = {(word >> _CALL_BITS) % _TEXTS for word in words}
        number = self._next_text
        while number % _TEXTS in in_use:
            number += 1
        self._next_text = number + 1
        self._texts = {each: its for each, its in self._texts.items() if (its - number) % _TEXTS}
        self._numbers[own][number % _TEXTS] = number
        # Pairs with the second fence of `_text`: a reader that sees a byte of the new text also sees the new number,
        # which it reads afterwards. So it notices that the slot holds another text.
        fence()
        self._memory[own][_place(number)] = text.encode()[:_LINE_NBYTES].ljust(_LINE_NBYTES, b"\0")
        # Pairs with the first fence of `_text`: a reader that sees the word of a call also sees its whole text.
        fence()
        self._texts[text] = number
        return number

    def _difference(self) -> list[str | None] | None:
        """Return each rank's text of the first call in which ranks differ; None for a rank that has not made it."""
        for call in range(max(1, self._calls - _KEPT + 2), self._calls + 1):
            texts = [self._text(index, call) for index in range(self._node.size)]
            if len({text for text in texts if text is not None}) > 1:
                return texts
        return None

    def _last(self, index: int) -> str:
        """Return the last call of a rank, with a remark if that rank has posted fewer calls than this rank."""
        while True:
            call = self._counters[index][_CALLS]
            if call == 0:
                return _NEVER_CALLED
            text = self._text(index, call)
            if text is not None:  # else that rank has made another call meanwhile
                return text + (" (its previous call: it has not made this one yet)" if index in self.behind() else "")

    def _text(self, index: int, call: int) -> str | None:
        """Return the text of a rank's call of that number; None if the call is not there yet or was overwritten."""
        counter = self._counters[index]
        if counter[_CALLS] < call:
            return None
        word = counter[_KEPT_AT + call % _KEPT]
        if (word ^ call) & _CALL:
            return None
        number = word >> _CALL_BITS & _TEXT
        # Pairs with the second fence of `_write`: this rank reads the text after the word of the call, so the text is
        # complete.
        fence()
        text = bytes(self._memory[index][_place(number)]).rstrip(b"\0").decode(errors="replace")
        # Pairs with the first fence of `_write`: this rank reads the number after the text. So the number differs if
        # this rank has read any byte of another text.
        fence()
        if (self._numbers[index][number % _TEXTS] ^ number) & _TEXT:
            return None
        offset = counter[_OFFSETS_AT + call % _KEPT]
        if OFFSET_IN_TEXT in text and (offset ^ call) & _CALL:
            return None
        return filled(text, word >> _COUNT_AT, offset >> _CALL_BITS)


def _place(number: int) -> slice:
    start = _TEXTS_AT + _LINE_NBYTES * (number % _TEXTS)
    return slice(start, start + _LINE_NBYTES)
