"""Messages along a chain of ranks, as launches of chain.cu and packet_chain.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mpicomm.collectives.device_arena import ChannelMemory
from mpicomm.collectives.device_launch import Launch
from mpicomm.collectives.exchange import Exchange, Span
from mpicomm.kernels.chain import (
    CHAIN_SLOT_NBYTES,
    CHAIN_SLOTS,
    CHAIN_THREADS,
    ChainArguments,
    Place,
    chain_kernel,
)
from mpicomm.kernels.exchange import PACKET_NBYTES
from mpicomm.kernels.load import Variant
from mpicomm.kernels.packet_chain import (
    BATCH_NBYTES,
    PACKET_CHAIN_SLOT_NBYTES,
    PACKET_CHAIN_SLOTS,
    PACKET_CHAIN_THREADS,
    packet_chain_kernel,
)
from mpicomm.kernels.reductions import sentinels_can_carry
from mpicomm.kernels.team import LANES, Team

_UNIT_NBYTES = LANES * PACKET_NBYTES  # a packet for each lane
Reduction = tuple[str, str]


@dataclass(frozen=True)
class ChainForm:
    """One of the kernels, as it is best: measured on H200s."""

    kernel: Callable[[Reduction | None], Variant]
    most_blocks: int
    """Of one place in a chain, of which a rank may have two."""
    threads: int
    chunk_nbytes: int
    """What is passed on at once, at most."""
    slots_nbytes: int
    """Of one channel."""
    sentinels: bool
    """Whether slots hold ones at first."""
    early: bool = False
    """Whether launches may begin before the kernel ahead of them is over."""

    @property
    def warps(self) -> int:
        """How many a block has: as many channels."""
        return self.threads // LANES


_CHUNKS = ChainForm(
    chain_kernel,
    most_blocks=128,
    threads=CHAIN_THREADS,
    chunk_nbytes=CHAIN_SLOT_NBYTES,
    slots_nbytes=CHAIN_SLOTS * CHAIN_SLOT_NBYTES,
    sentinels=False,
)
_PACKETS = ChainForm(
    packet_chain_kernel,
    most_blocks=64,
    threads=PACKET_CHAIN_THREADS,
    chunk_nbytes=BATCH_NBYTES,
    slots_nbytes=PACKET_CHAIN_SLOTS * PACKET_CHAIN_SLOT_NBYTES,
    sentinels=True,
    early=True,
)


def form_of(reduction: Reduction | None) -> ChainForm:
    """Return the kernel for ``(dtype, op)``, or for what is not reduced: packets where these need no flags."""
    return _PACKETS if reduction is not None and sentinels_can_carry(reduction[0]) else _CHUNKS


@dataclass(frozen=True)
class Station:
    """Where a rank stands: what it adds, where it keeps the result, and whether a rank is before and behind it."""

    own: Span | None
    output: Span | None
    receives: bool
    sends: bool


class ChainPlanner:
    """Turns exchanges of a chain into launches; ``team`` is what every kernel of this rank is told.

    There are ``multiprocessors`` on each device, at least. With ``early`` kernels may begin before the last is over.
    """

    def __init__(self, team: Team, multiprocessors: int, *, early: bool = True) -> None:
        self._team = team
        self._multiprocessors = multiprocessors
        self._early = early

    def layout(self, form: ChainForm) -> ChannelMemory:
        """Return the layout of each rank's memory, whose channels are all of one neighbour each way."""
        # A multiprocessor holds two blocks of each kernel: all run at once, of both places.
        blocks = min(form.most_blocks, self._multiprocessors)
        return ChannelMemory(1, blocks * form.warps, form.slots_nbytes)

    def launch(
        self, exchanges: Sequence[Exchange], reduction: Reduction | None, tag: int, memory: Sequence[int]
    ) -> Launch:
        """Return the launch for all ``exchanges``, of something, between two ranks or more.

        ``memory`` is that of every rank, for the form of the ``reduction``; ``tag`` is what they have to agree on.
        """
        form, rank, size = form_of(reduction), self._team.rank, self._team.size
        layout = self.layout(form)
        stations = stations_of(rank, exchanges)
        nbytes = max(span.count for each in stations for span in (each.own, each.output) if span)
        nbytes *= exchanges[0].dtype.itemsize
        # A pure function of the bytes and the layout, as both sides must cut alike.
        chunk_nbytes = min(form.chunk_nbytes, -(-nbytes // (layout.channels * _UNIT_NBYTES)) * _UNIT_NBYTES)
        blocks = min(layout.channels // form.warps, -(-nbytes // chunk_nbytes))
        arguments = ChainArguments(
            team=self._team,
            nbytes=nbytes,
            chunk_nbytes=chunk_nbytes,
            credits=layout.credits,
            flags=layout.flags,
            slots=layout.slots,
            channels=layout.channels,
            blocks=blocks,
            previous=(rank - 1) % size,
            next=(rank + 1) % size,
            tag=tag,
        )
        arguments.memory[: len(memory)] = memory
        for number, station in enumerate(stations):
            own, output = (span.pointer if span else 0 for span in (station.own, station.output))
            arguments.places[number] = Place(own, output, station.receives, station.sends)
        return Launch(
            form.kernel(reduction),
            arguments,
            blocks=blocks * len(stations),
            threads=form.threads,
            early=form.early and self._early,
        )


def stations_of(rank: int, exchanges: Sequence[Exchange]) -> list[Station]:
    """Return where a rank stands in the chain that ``exchanges`` are: twice if it sends before it receives."""
    stations: list[Station] = []
    for exchange in exchanges:
        reduction = exchange.reduction
        stations += [Station(None, span, receives=True, sends=False) for span in exchange.receives if span is not None]
        if reduction is not None:
            stations.append(Station(reduction.own, reduction.output, receives=True, sends=False))
        for sent in (span for span in exchange.sends if span is not None):
            if not stations:
                stations.append(Station(sent, None, receives=False, sends=True))
                continue
            # What comes as it is, is kept and sent on; what is reduced is not kept.
            (station,) = stations
            stations = [replace(station, output=None if station.own else station.output, sends=True)]
    return stations
