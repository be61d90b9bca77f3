"""DeviceArena: the memory that each rank of a communicator opens to the kernels of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, ArenaLayout, ChannelMemory, Inboxes, escapes_nbytes
from mpicomm.collectives.gpu.algorithms.packets.arguments import ABSENT, STAGES
from mpicomm.devices.base import GpuBackend, Segment
from mpicomm.devices.handle import Kind
from mpicomm.errors import HandleError
from mpicomm.kernels.team import ABORT_OPERATION, MISMATCH
from mpicomm.sharing.segments import SharedSegments, share

_COPIES = "collectives: copies"
_MESSAGES = "messages in the order of streams"


class NoStagingError(HandleError):
    """The ranks could not set up memory for copy engines to bring data to; raised on all of them."""


class DeviceArena:
    """Every rank's arena, and more memory once a message asks for it. Construction raises as ``share`` does.

    Collective, as are `slots`, `chain`, `messages`, `large_inboxes` and `staging` where they were not asked for that
    many bytes before. What they have given is kept until the end, as a captured graph goes on using it.
    ``before_more`` is called before ranks set up more memory, and raises where they should not.
    """

    def __init__(
        self,
        node: Group,
        backend: GpuBackend,
        kind: Kind,
        layout: ArenaLayout,
        before_more: Callable[[], None],
    ) -> None:
        self._node = node
        self._backend = backend
        self._kind = kind
        self.layout = layout
        self._before_more = before_more
        self.most_inbox_nbytes = layout.most_inbox_nbytes
        """How many bytes from each rank inboxes of the sentinel wire hold at most."""

        absent = (layout.sentinels, layout.escapes)
        allocate = partial(self._allocate, layout.nbytes, absent)
        self._segments = share(node, backend, "collectives", allocate, lambda: layout.nbytes)
        self._more: dict[tuple[str, int], SharedSegments] = {}
        self._large: set[int] = set()  # sizes of large inboxes that there are
        self._chains: set[int] = set()  # sizes of a channel's slots in memory for chains that there is
        self._refused: tuple[float, str] = inf, ""  # the smallest staging memory that there was no room for, and why
        self.pointers = _pointers(self._segments, node.size)
        self.flagged = self._at(layout.flagged, layout.flagged_inbox_nbytes)
        """The inboxes of the LL wire."""
        self.sentinels = self._at(layout.sentinels, layout.sentinel_inbox_nbytes)
        """The inboxes of the sentinel wire."""

    def large_inboxes(self, nbytes: int) -> Inboxes:
        """Return inboxes of the sentinel wire for ``nbytes`` from each rank, or for a part of that, many times."""
        inboxes = PARITIES * STAGES * self._node.size
        least = inboxes * self.layout.large_inbox_nbytes(nbytes)
        slots_nbytes = _enough(self._large, least)
        pointers = self._with_escapes("collectives: large messages", 0, slots_nbytes)
        self._large.add(slots_nbytes)
        return Inboxes(pointers, slots_nbytes // inboxes)

    def slots(self) -> tuple[int, ...]:
        """Return where the slots of every rank begin, for exchange.cu."""
        return self._on_demand("collectives: slots", self.layout.slots_nbytes)

    def chain(self, layout: ChannelMemory) -> tuple[ChannelMemory, tuple[int, ...]]:
        """Return where the memory of every rank begins, for chain.cu, and its layout: this or larger slots."""
        layout = replace(layout, channel_nbytes=_enough(self._chains, layout.channel_nbytes))
        pointers = self._with_escapes("collectives: chain", layout.slots, layout.nbytes - layout.slots)
        self._chains.add(layout.channel_nbytes)
        return layout, pointers

    def messages(self, nbytes: int) -> tuple[int, ...]:
        """Return where the memory for messages of every rank begins, for sendrecv.cu; always of the same size."""
        return self._on_demand(_MESSAGES, nbytes)

    @property
    def has_messages(self) -> bool:
        """Whether memory for messages was asked for before."""
        return any(what == _MESSAGES for what, _ in self._more)

    def staging(self, nbytes: int) -> tuple[int, ...]:
        """Return where ``nbytes`` or more of every rank begin, for copy engines. Raises `NoStagingError`."""
        size = self._staging_nbytes(nbytes)
        self.require_staging(nbytes)
        try:
            return self._on_demand(_COPIES, size)
        except HandleError as error:
            self._refused = size, str(error)
            raise NoStagingError(str(error)) from error

    def require_staging(self, nbytes: int) -> None:
        """Raise `NoStagingError` where the ranks have failed to set up so much before. Local, on all ranks alike.

        They never try again: a rank that has kept what was chosen instead, for a call it makes again, would not come,
        nor choose what the others do when there is memory again.
        """
        least, why = self._refused
        if self._staging_nbytes(nbytes) >= least:
            raise NoStagingError(why)

    def _staging_nbytes(self, nbytes: int) -> int:
        whole = 1 << max(0, nbytes - 1).bit_length()  # so that few sizes are ever asked for
        return _enough((size for what, size in self._more if what == _COPIES), whole)

    def _with_escapes(self, what: str, slots: int, slots_nbytes: int) -> tuple[int, ...]:
        """Return where memory of every rank begins that has ``slots_nbytes`` of slots from ``slots`` on."""
        nbytes = slots + slots_nbytes + escapes_nbytes(slots_nbytes)
        return self._on_demand(what, nbytes, absent=(slots, slots + slots_nbytes))

    def _on_demand(self, what: str, nbytes: int, *, absent: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
        """Return where memory of ``nbytes`` of every rank begins, which holds at first what `_allocate` says."""
        if (what, nbytes) not in self._more:
            self._before_more()
            allocate = partial(self._allocate, nbytes, absent)
            # It allocates and waits, which a thread that captures a graph may not otherwise.
            with self._backend.loading():
                self._more[what, nbytes] = share(self._node, self._backend, what, allocate, lambda: nbytes)
        return _pointers(self._more[what, nbytes], self._node.size)

    def _allocate(self, nbytes: int, absent: tuple[int, int]) -> Segment:
        """Return memory that holds zeros, and `ABSENT` from the first to the second of these offsets.

        Before the exchange that tells the peers of it: what they write first could be wiped out.
        """
        segment, (begin, end) = self._backend.allocate(self._kind, nbytes), absent
        self._backend.fill(segment.pointer, begin, 0)
        self._backend.fill_words(segment.pointer + begin, end - begin, ABSENT)
        self._backend.fill(segment.pointer + end, nbytes - end, 0)
        return segment

    def abort(self) -> None:
        """Let kernels of all ranks give up, as one does that finds a rank in another call. Local, blocking."""
        # Pairs with the loads of the abort word in is_healthy and Patience; else they would wait until time is up.
        # One byte is enough: they look whether the word is zero. What it is written over loses only what it was about.
        for pointer in self.pointers:
            self._backend.fill(pointer + ABORT_OPERATION, 1, MISMATCH)

    def close_peers(self) -> None:
        """Unmap the peers' memory; local."""
        for segments in (self._segments, *self._more.values()):
            segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's memory; local, after every peer's `close_peers`."""
        for segments in (self._segments, *self._more.values()):
            segments.close_own()

    def _at(self, offset: int, nbytes: int) -> Inboxes:
        return Inboxes(tuple(pointer + offset for pointer in self.pointers), nbytes)


def _enough(known: Iterable[int], least: int) -> int:
    """Return the smallest size that there is and that is enough, or the least that is.

    The same on all ranks: whatever there is was set up by all of them together.
    """
    return min((size for size in known if size >= least), default=least)


def _pointers(segments: SharedSegments, size: int) -> tuple[int, ...]:
    return tuple(segments[index].pointer for index in range(size))
