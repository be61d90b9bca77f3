"""CallLog: each rank of a node publishes which collective it is in. Its peers read that when something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import numpy as np

from mpicomm.activity import layout
from mpicomm.activity.layout import VOTE_BITS, VOTE_WORDS, VOTES
from mpicomm.activity.page import CommunicatorRow, read_text
from mpicomm.cluster.agreement import Group
from mpicomm.devices.handle import MemoryUse
from mpicomm.devices.host import HostBackend
from mpicomm.sharing.segments import SharedMemory, share
from mpicomm.waiting import wait_until

CallLocation = Literal["gpu", "host"]
"""Where a call is, as `mpicomm.dispatch.location_votes` explains."""
FOR_GPUS, FOR_HOST = 1, 3
"""The bits of a vote."""
_VOTE_MASK = (1 << VOTE_BITS) - 1
_NEVER_CALLED = "nothing yet"
_OVERWRITTEN = "a call whose text is gone"
_ALIVE_S = 0.25  # in this time a waiting rank shows that it is alive, even if ranks take turns on cores and on a GPU


class CallLog(SharedMemory):
    """The latest collectives of each rank of the node as texts with numbers, on the pages of the ranks' processes.

    Each rank writes its own page, before it does anything else for the call. Every rank reads the pages of all ranks.

    Construction is collective and raises as `share` does. ``row`` is of this rank's communicator, and ``index`` is of
    the log in the row. ``by_mpi`` returns the call by MPI of a rank that has not posted this rank's call; "" if that
    rank is only late.
    """

    post: Callable[..., None]
    """Writes this rank's next call: see `Log.post`."""

    def __init__(
        self,
        node: Group,
        row: CommunicatorRow | None = None,
        index: int = 0,
        by_mpi: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._row = row or CommunicatorRow()
        self._log = log = self._row.log(index)
        backend = HostBackend(node.timeout_s)
        segments = share(node, backend, "call log", log.export, lambda: layout.MAGIC)
        super().__init__("call log", "memfd", segments)
        self._node = node
        self._by_mpi = by_mpi
        parts = [segments[index] for index in range(node.size)]
        memory = [backend.view(part, (part.nbytes,), np.dtype(np.uint8)).data for part in parts]
        self._words = [each[: layout.LOG_NBYTES].cast("q") for each in memory]
        self._texts = [each[-layout.TEXTS * layout.TEXT_NBYTES :] for each in memory]
        self.post = log.post
        self._votes = self._vote_word = 0

    def memory_use(self) -> Iterable[MemoryUse]:
        return (MemoryUse("call log", host_nbytes=layout.LOG_NBYTES),)

    def publish_ready(self) -> None:
        """Publish that this rank launches its latest call next, and waits for nothing before; local."""
        # Pairs with `not_ready` of the peers. It needs no fence, because a peer that sees the word reads nothing else.
        self._log.words[layout.READY] = self._log.calls

    def vote(self, bits: int) -> int:
        """Publish whether this rank's buffers of its next collective are on the GPU; return the number of the vote.

        ``bits`` are `FOR_GPUS` or `FOR_HOST`.
        """
        self._votes = number = self._votes + 1
        group, vote = number >> VOTE_BITS, number & _VOTE_MASK
        self._vote_word = word = (self._vote_word if vote else group << 32) | bits << 2 * vote
        # Pairs with the load in `location` of the peers. One aligned store, so no peer sees half a vote. It needs no
        # fence, because a peer that sees the vote reads nothing else that this rank has written before.
        self._log.words[VOTES + group % VOTE_WORDS] = word
        return number

    def withdraw_vote(self) -> None:
        """Withdraw the last vote, because the call has failed before it communicated; local.

        Other ranks may have read it. So it only helps a program that repeats the call with better arguments.
        """
        group, vote = self._votes >> VOTE_BITS, self._votes & _VOTE_MASK
        self._votes -= 1
        self._vote_word &= ~(FOR_HOST << 2 * vote)
        self._log.words[VOTES + group % VOTE_WORDS] = self._vote_word

    def location(self, number: int) -> CallLocation | None:
        """Return where the collective of that vote is: on GPUs if any rank votes so; None if votes are missing. Local.

        The vote of a rank that is further ahead than the log has votes does not count.
        """
        group, shift = number >> VOTE_BITS, 2 * (number & _VOTE_MASK)
        at, of_host, everybody = VOTES + group % VOTE_WORDS, group << 32 - shift | FOR_HOST, True
        for words in self._words:
            word = words[at]
            if word >> shift != of_host and word >> 32 <= group:
                bits = word >> shift & FOR_HOST if word >> 32 == group else 0
                if bits == FOR_GPUS:
                    return "gpu"
                everybody = everybody and bits != 0
        return "host" if everybody else None

    def missing_votes(self, number: int) -> list[int]:
        """Return the indices of the ranks whose vote of that number is missing; local."""
        group, shift = number >> VOTE_BITS, 2 * (number & _VOTE_MASK)
        # Pairs with the store in `vote`, as the load in `location` does. A word of a later group says that its rank has
        # voted in this one.
        latest = (words[VOTES + group % VOTE_WORDS] for words in self._words)
        return [
            index
            for index, word in enumerate(latest)
            if word >> 32 < group or (word >> 32 == group and word >> shift & FOR_HOST == 0)
        ]

    @property
    def calls(self) -> int:
        """How many collectives this rank has begun; local."""
        return self._log.calls

    def read(self) -> list[str]:
        """Return the text of each rank's call, in the node's order; local.

        The calls are the first of the latest calls in which the ranks differ, or else each rank's last call. For a rank
        that is in a call by MPI instead of this rank's call, it is that call.
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
        return [index for index, words in enumerate(self._words) if words[layout.POSTS] < self._log.calls]

    def not_ready(self) -> list[int]:
        """Return the indices of the ranks that are not ready to launch this rank's latest call; local."""
        return [index for index, words in enumerate(self._words) if words[layout.READY] < self._log.calls]

    def ahead(self) -> list[int]:
        """Return the indices of the ranks that have posted more calls than this rank; local."""
        return [index for index, words in enumerate(self._words) if words[layout.POSTS] > self._log.calls]

    def publish_wait(self, rank: int) -> None:
        """Publish that this rank waits for ``rank`` of another domain, or for none with -1. Local.

        Call it repeatedly while waiting, as a heartbeat: a rank that has stopped in such a wait is missing itself.
        """
        # Pairs with the reads in `awaited_ranks`. The words need no order between them, because a reader only looks
        # whether the heartbeat goes on, and names the rank that it finds.
        if self._words:  # else another communicator may have the log
            self._log.words[layout.WAITING_FOR] = rank + 1
            self._log.words[layout.HEARTBEAT] += 1

    def awaited_ranks(self) -> list[int]:
        """Return the ranks of other domains for which living ranks wait; local.

        If a rank waits too long for a rank of its domain, one of these may be the missing rank. This returns after a
        heartbeat of all waiting ranks. If a rank has stopped or no rank waits, it returns after `_ALIVE_S`.
        """
        heartbeats = [words[layout.HEARTBEAT] for words in self._words]

        def waiting() -> list[tuple[int, bool]]:
            logs = zip(self._words, heartbeats, strict=True)
            found = ((words[layout.WAITING_FOR] - 1, words[layout.HEARTBEAT] != before) for words, before in logs)
            return [(rank, alive) for rank, alive in found if rank >= 0]

        wait_until(lambda: bool(found := waiting()) and all(alive for _, alive in found), _ALIVE_S)
        return sorted({rank for rank, alive in waiting() if alive})

    def absence_reason(self) -> str:
        """Return a text that names ranks in calls that this rank has not made, and the way out; else "". Local."""
        ranks = self._node.ranks
        calls = [f"rank {ranks[index]} is in {self._last(index)}, or has left it" for index in self.ahead()]
        if not calls:
            return ""
        here = ranks[self._node.rank]
        return "; ".join([*calls, f"rank {here} has not made that call: make every collective call on all ranks"])

    def close_peers(self) -> None:
        """Unmap the peers' calls; local."""
        self._words.clear()
        self._texts.clear()
        super().close_peers()

    def close_own(self) -> None:
        if self._node.broken is not None:
            self._row.retain()
        super().close_own()

    def _difference(self) -> list[str | None] | None:
        """Return each rank's text of the first call in which ranks differ; None for a rank that has not made it."""
        for call in range(max(1, self._log.calls - layout.LOG_DEPTH + 2), self._log.calls + 1):
            texts = [self._text(index, call) for index in range(self._node.size)]
            if len({text for text in texts if text is not None}) > 1:
                return texts
        return None

    def _last(self, index: int) -> str:
        """Return the last call of a rank, with a remark if that rank has posted fewer calls than this rank."""
        words, text, call = self._words[index], None, 0
        while text is None and call != words[layout.POSTS]:  # that rank may post calls meanwhile, and overwrite texts
            call = words[layout.POSTS]
            text = self._text(index, call)
        if call == 0:
            return _NEVER_CALLED
        late = " (its previous call: it has not made this one yet)" if index in self.behind() else ""
        return (text or _OVERWRITTEN) + late

    def _text(self, index: int, call: int) -> str | None:
        """Return the text of a rank's call of that number; None if the call is not there yet or was overwritten."""
        words, texts = self._words[index], self._texts[index]
        return layout.logged_call(words, call, partial(read_text, texts)) if words[layout.POSTS] >= call else None
