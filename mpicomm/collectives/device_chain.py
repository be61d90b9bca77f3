"""Messages along a chain of ranks, as launches of chain.cu."""

from __future__ import annotations

from collections.abc import Sequence
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
from mpicomm.kernels.team import LANES, Team

_WARPS = CHAIN_THREADS // LANES
_UNIT_NBYTES = LANES * PACKET_NBYTES  # a packet for each lane


def chain_memory(blocks: int) -> ChannelMemory:
    """Return the layout of each rank's memory for chains, whose channels are all of one neighbour each way."""
    return ChannelMemory(1, blocks * _WARPS, CHAIN_SLOTS * CHAIN_SLOT_NBYTES)


@dataclass(frozen=True)
class Station:
    """Where a rank stands: what it adds, where it keeps the result, and whether a rank is before and behind it."""

    own: Span | None
    output: Span | None
    receives: bool
    sends: bool


class ChainPlanner:
    """Turns exchanges of a chain into launches; ``team`` is what every kernel of this rank is told."""

    def __init__(self, team: Team, layout: ChannelMemory) -> None:
        self.layout = layout
        self._team = team

    def launch(
        self, exchanges: Sequence[Exchange], reduction: tuple[str, str] | None, tag: int, memory: Sequence[int]
    ) -> Launch:
        """Return the launch for all ``exchanges``, of something, between two ranks or more.

        ``memory`` is that of every rank; ``tag`` is what they have to agree on.
        """
        layout, rank, size = self.layout, self._team.rank, self._team.size
        stations = stations_of(rank, exchanges)
        nbytes = max(span.count for each in stations for span in (each.own, each.output) if span)
        nbytes *= exchanges[0].dtype.itemsize
        # A pure function of the bytes and the layout, as both sides must cut alike.
        chunk_nbytes = min(CHAIN_SLOT_NBYTES, -(-nbytes // (layout.channels * _UNIT_NBYTES)) * _UNIT_NBYTES)
        blocks = min(layout.channels // _WARPS, -(-nbytes // chunk_nbytes))
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
        return Launch(chain_kernel(reduction), arguments, blocks=blocks * len(stations), threads=CHAIN_THREADS)


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
