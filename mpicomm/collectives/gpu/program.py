"""Program: what one rank launches and copies for a collective on GPUs. It knows no device: tests do without."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainPlanner
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChannelPlanner, reduction_of
from mpicomm.collectives.gpu.algorithms.copies.landing import InOutput, InStaging, Landing, Parts
from mpicomm.collectives.gpu.algorithms.copies.plan import (
    Action,
    Barrier,
    Copy,
    Fork,
    Join,
    Reduce,
    Then,
    allreduce,
    local_reduction,
    movement,
    parts_of,
)
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectPlanner
from mpicomm.collectives.gpu.algorithms.launch import Launch
from mpicomm.collectives.gpu.algorithms.memory import Arena
from mpicomm.collectives.gpu.algorithms.packets.arguments import carried_nbytes
from mpicomm.collectives.gpu.algorithms.packets.plan import PacketPlanner
from mpicomm.collectives.gpu.choose import Room, Way, choose_ways
from mpicomm.collectives.signature import Signature
from mpicomm.symmetric.registry import Mapped

Step = Launch | Fork | Join | Copy


@dataclass(frozen=True)
class Planners:
    """What turns exchanges into launches on one rank of a node, for each kind of kernel."""

    rank: int
    size: int
    arena: Arena
    most_staged_nbytes: int
    """Of memory on each rank, at most, that copy engines bring what comes from the others to."""
    link_speed: float
    """See `Tuning.link_speed`."""
    channels: ChannelPlanner
    packets: PacketPlanner
    direct: DirectPlanner
    chain: ChainPlanner


class _Copying(NamedTuple):
    """How copy engines carry exchanges out: the second one, if it counts, what it does, and what needs memory."""

    following: Exchange | None
    then: Then
    parts: Parts
    contributions_nbytes: int
    """What lands of others' contributions to a reduction."""
    staging_nbytes: int
    """That, and behind it what lands of results where these cannot go straight to their place."""


class Program:
    """One rank's part of the ``exchanges`` of an ``algorithm``; ``memory`` is where all ranks' output lies, if mapped.

    Which kernels there are is chosen here; raises `InvalidUsageError` for a reduction that is not defined.
    """

    def __init__(
        self,
        planners: Planners,
        exchanges: Sequence[Exchange],
        signature: Signature,
        memory: Mapped | None = None,
        algorithm: str = "one_shot",
    ) -> None:
        self._planners = planners
        self._exchanges = exchanges
        self._signature = signature
        self._memory = memory
        self._algorithm = algorithm
        op = signature.op
        self._reduction = reduction_of(exchanges[0].dtype, op) if op is not None and exchanges else None
        self._nbytes = max((exchange.longest_nbytes for exchange in exchanges), default=0)
        self._ways = [] if algorithm in ("chain", "copy_engine") else self._chosen()

    def __str__(self) -> str:
        copies = self._algorithm == "copy_engine"
        into_memory = self._memory is not None and (copies or any(way.direct for way in self._ways))
        return f"{self._signature}, into {self._memory}" if into_memory else str(self._signature)

    @property
    def staging_nbytes(self) -> int:
        """How much memory of each rank `steps` asks the arena for, for copy engines."""
        return self._copying.staging_nbytes if self._algorithm == "copy_engine" else 0

    def steps(self) -> Iterator[Step]:
        """Yield what is launched and copied, in order; raises as the arena's methods do."""
        if self._algorithm == "chain":
            planners, tag = self._planners, tag_of(self._signature, 0)
            layout, memory = planners.arena.chain(planners.chain.layout(self._nbytes, len(self._exchanges)))
            return iter((planners.chain.launch(self._exchanges, self._reduction, tag, layout, memory),))
        return self._copied() if self._algorithm == "copy_engine" else self._launched()

    def _chosen(self) -> list[Way]:
        arena = self._planners.arena
        return choose_ways(
            self._exchanges,
            self._signature,
            self._planners.rank,
            self._nbytes,
            Room(
                carried_nbytes(arena.flagged.nbytes, "flagged"),
                arena.most_inbox_nbytes,
            ),
            symmetric=self._memory is not None,
            link_speed=self._planners.link_speed,
            algorithm=self._algorithm,
        )

    def _launched(self) -> Iterator[Step]:
        planners, signature = self._planners, self._signature
        for way in self._ways:
            if way.nbytes == 0:  # on all ranks, of which none is to set up memory for it
                continue
            if way.alone:
                yield from self._moved(way.exchange)
                continue
            launch: Launch | None
            if way.direct:
                assert self._memory is not None
                tag = tag_of(signature, way.step, self._memory)
                launch = planners.direct.launch(way.exchange, self._memory, tag, nbytes=way.nbytes)
            elif way.wire is None:
                launch = planners.channels.launch(way.exchange, (signature.hash32, way.step), planners.arena.slots())
            else:
                tag = tag_of(signature, way.step)
                launch = planners.packets.launch(
                    way.exchange, way.reduction, tag, way.wire, nbytes=way.nbytes, fan_out=way.merged
                )
            if launch is not None:
                yield launch

    def _moved(self, exchange: Exchange) -> Iterator[Copy]:
        """What this rank sends to itself, in the order of its kernels."""
        source, target = exchange.sends[self._planners.rank], exchange.receives[self._planners.rank]
        if source is not None and target is not None and target.count:
            yield Copy(target.pointer, source.pointer, target.count * exchange.dtype.itemsize, local=True)

    def _copied(self) -> Iterator[Step]:
        barriers = 0  # counted, as ranks with nothing to copy or reduce have fewer actions
        for action in self._actions():
            if isinstance(action, Barrier):
                tag = tag_of(self._signature, barriers, self._memory)
                yield self._planners.direct.barrier(tag, after_copies=True)
                barriers += 1
            elif isinstance(action, Reduce):
                assert self._reduction is not None
                yield local_reduction(action, self._reduction)
            else:
                yield action

    @cached_property
    def _copying(self) -> _Copying:
        planners, (_, *rest) = self._planners, self._exchanges
        size, reduces, staged = planners.size, self._signature.op is not None, self._memory is None
        # Between two ranks nobody is left to send a broadcast on to.
        following = rest[0] if rest and (reduces or size > 2) else None
        then: Then = "nothing" if following is None else "gather" if reduces else "relay"
        parts = parts_of(self._nbytes, size, planners.most_staged_nbytes, reduces=reduces, then=then, staged=staged)
        all_rooms = (size - 1) * parts.room_nbytes
        contributions_nbytes = (then == "gather") * all_rooms
        return _Copying(following, then, parts, contributions_nbytes, contributions_nbytes + staged * all_rooms)

    def _actions(self) -> list[Action]:
        rank, memory, exchange = self._planners.rank, self._memory, self._exchanges[0]
        following, then, parts, contributions_nbytes, staging_nbytes = self._copying
        pointers: Sequence[int] = ()
        if staging_nbytes:
            pointers = self._planners.arena.staging(staging_nbytes)
        landing: Landing
        if memory is not None:
            landing = InOutput(rank, memory)
        else:
            landing = InStaging(rank, [pointer + contributions_nbytes for pointer in pointers], parts)
        if following is None or then == "relay":
            return movement(rank, exchange, parts, landing, following)
        return allreduce(rank, exchange, following, parts, InStaging(rank, pointers, parts), landing)


def tag_of(signature: Signature, step: int, memory: Mapped | None = None) -> int:
    """Return what ranks must agree on in one launch, as a number."""
    place = (memory.array, memory.offset) if memory is not None else (0, 0)
    return zlib.crc32(struct.pack("<IIIQ", signature.hash32, step, *place))
