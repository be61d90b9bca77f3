"""Messages along a chain of ranks, as launches of chain.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chain.arguments import (
    BATCH_NBYTES,
    CHAIN_SLOTS,
    CHAIN_THREADS,
    ChainArguments,
    Place,
    chain_kernel,
)
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.launch import Launch
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory
from mpicomm.kernels.team import LANES, Team
from mpicomm.mpi.span import Span

# Of one launch, as measured on H200s: half as many where a batch would not be whole, or a rank stands in two places.
_MOST_BLOCKS = 128
_MOST_SLOT_NBYTES = 32 * 1024  # credit is given for a slot: as rarely as this, on H200s, or it is in the way of data
_WARPS = CHAIN_THREADS // LANES
_UNIT_NBYTES = LANES * PACKET_NBYTES  # a packet for each lane


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
    ``host_slots`` is whether the ranks' memory is of the host.
    """

    def __init__(self, team: Team, multiprocessors: int, *, early: bool = True, host_slots: bool = False) -> None:
        self._team = team
        self._early = early
        self._host_slots = host_slots
        # A multiprocessor holds two blocks: all run at once, of both places.
        self._most_blocks = min(_MOST_BLOCKS, multiprocessors)

    def layout(self, nbytes: int, hops: int) -> ChannelMemory:
        """Return that of each rank's memory for messages of ``nbytes``: a slot holds what a channel carries of one.

        Or a part of that, where it would be too large. Channels are all of one neighbour each way. Escapes follow the
        slots. ``hops`` is how many exchanges the chain is.
        """
        blocks, batch_nbytes = self._cut(nbytes, hops)
        batches = -(-nbytes // (blocks * _WARPS * batch_nbytes))
        slot_nbytes = BATCH_NBYTES
        while slot_nbytes < min(batches * BATCH_NBYTES, _MOST_SLOT_NBYTES):
            slot_nbytes *= 4  # few sizes: what there is of smaller ones stays
        return ChannelMemory(1, self._most_blocks * _WARPS, CHAIN_SLOTS * slot_nbytes)

    def launch(
        self,
        exchanges: Sequence[Exchange],
        reduction: tuple[str, str] | None,
        tag: int,
        layout: ChannelMemory,
        memory: Sequence[int],
    ) -> Launch:
        """Return the launch for all ``exchanges``, of something, between two ranks or more.

        ``memory`` is that of every rank, of a ``layout`` of this planner; ``tag`` is what they have to agree on.
        """
        rank, size = self._team.rank, self._team.size
        stations = stations_of(rank, exchanges)
        nbytes = max(span.count for each in stations for span in (each.own, each.output) if span)
        nbytes *= exchanges[0].dtype.itemsize
        blocks, batch_nbytes = self._cut(nbytes, len(exchanges))
        slot_nbytes = layout.channel_nbytes // CHAIN_SLOTS
        arguments = ChainArguments(
            team=self._team,
            nbytes=nbytes,
            batch_nbytes=batch_nbytes,
            credits=layout.credits,
            flags=layout.flags,
            slots=layout.slots,
            slot_nbytes=slot_nbytes,
            batches=slot_nbytes // BATCH_NBYTES,
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
            chain_kernel(reduction, host_slots=self._host_slots),
            arguments,
            blocks=blocks * len(stations),
            threads=CHAIN_THREADS,
            early=self._early,
        )

    def _cut(self, nbytes: int, hops: int) -> tuple[int, int]:
        """Return the blocks for one place and the size of a batch: the same on all ranks, as both sides cut alike.

        A chain of as many hops as ranks comes back to the first one, which has two places then.
        """
        half = _MOST_BLOCKS // 2
        wanted = half if hops == self._team.size else max(half, min(_MOST_BLOCKS, nbytes // (_WARPS * BATCH_NBYTES)))
        blocks = min(wanted, self._most_blocks)
        batch_nbytes = min(BATCH_NBYTES, -(-nbytes // (blocks * _WARPS * _UNIT_NBYTES)) * _UNIT_NBYTES)
        return min(blocks, -(-nbytes // batch_nbytes)), batch_nbytes


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
