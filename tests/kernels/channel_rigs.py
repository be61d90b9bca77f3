"""Kernels that pass slots through channels between ranks of a machine, with the arguments that the package makes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import Exchange, Message
from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainLauncher
from mpicomm.collectives.gpu.algorithms.chain.plan import layout_of as chain_layout
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChunkTemplate
from mpicomm.collectives.gpu.algorithms.memory import (
    ArenaLayout,
    ArenaRegion,
    ChannelMemory,
    escapes_nbytes,
)
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate, sendrecv_memory
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import ABSENT, HEAD_NBYTES, Team
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs.patterns import Pattern
from tests.kernels.build import Change
from tests.kernels.machine import Machine, Place


class ChannelRig:
    """Ranks with arenas and further ``memory``; its beginning has the ``words``, or the arena has them from ``at`` on.

    Subclasses enqueue the work.
    """

    def __init__(
        self,
        machine: Machine,
        words: ChannelMemory,
        arena_nbytes: int,
        memory_nbytes: int,
        *,
        at: int | None = None,
        changes: Sequence[Change],
        timeout_s: float,
    ) -> None:
        self.machine = machine
        self.size = machine.size
        arenas, self.memory = (
            [machine.allocate(rank, nbytes) for rank in range(self.size)] for nbytes in (arena_nbytes, memory_nbytes)
        )
        machine.keep()
        self.teams = [machine.team(arenas, rank, timeout_s) for rank in range(self.size)]
        self._words, self._changes = words, changes
        self._words_of = [place.bytes for place in self.memory]
        if at is not None:
            self._words_of = [place.bytes[at:] for place in arenas]

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        for words in self._words_of:
            words[: 2 * self.size * self._words.channels * 4].view(np.uint32)[:] = epoch
            words[self._words.credits : self._words.slots].view(np.uint64)[:] = epoch << 32

    def epoch(self, rank: int, peer: int, *, sent: bool) -> int:
        """Return the number of chunks that ``rank`` has counted on its first channel to ``peer``, or from it."""
        row = self.size + peer if sent else peer
        return int(self._words_of[rank][: self._words.credits].view(np.uint32)[row * self._words.channels])

    def launch(self, rank: int, launch: Launch, *, threads: int | None = None, nap_us: int) -> None:
        """Enqueue a kernel of a rank; blocks of ``threads`` instead of as many as the package wants."""
        self.machine.enqueue(rank, launch, changes=self._changes, threads=threads, nap_us=nap_us)


class ExchangeRig(ChannelRig):
    """Exchanges of at most ``channels`` blocks. Each launch draws its number of ``threads``; None is the package's."""

    def __init__(
        self,
        machine: Machine,
        channels: int,
        *,
        threads: Sequence[int | None] = (None,),
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.layout = layout = ArenaLayout(machine.size, channels)
        words = ChannelMemory(machine.size, channels)
        super().__init__(
            machine,
            words,
            layout.nbytes,
            layout.slots_nbytes,
            at=layout.counts,
            changes=changes,
            timeout_s=timeout_s,
        )
        self._threads = threads
        self._rng = np.random.default_rng(self.size)
        self._templates = [ChunkTemplate(team, layout) for team in self.teams]

    def run(self, rank: int, exchanges: Sequence[Exchange], signature: Signature, *, nap_us: int = 0) -> None:
        """Enqueue a rank's part of a collective."""
        for step, exchange in enumerate(exchanges):
            slots = self.machine.addresses(self.memory, rank)
            launch = self._templates[rank].launch(exchange, (signature.hash32, step), slots)
            if launch is not None:
                threads = self._threads[int(self._rng.integers(len(self._threads)))]
                self.launch(rank, launch, threads=threads, nap_us=nap_us)


class ChainRig(ChannelRig):
    """Chains. A kernel has at most ``blocks`` blocks for one place; the slots hold messages of ``nbytes``."""

    def __init__(
        self,
        machine: Machine,
        blocks: int,
        *,
        nbytes: int = 1 << 30,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        nowhere: Any = None
        self.layout = layout = chain_layout(nbytes, 1, Domain(Team(), nowhere, blocks))
        super().__init__(machine, layout, HEAD_NBYTES, _with_escapes(layout), changes=changes, timeout_s=timeout_s)
        for place in self.memory:
            place.bytes[layout.slots : layout.slots + layout.slots_nbytes].view(np.uint32)[:] = ABSENT
        self._domains = [self._domain(team, blocks) for team in self.teams]

    def run(self, rank: int, pattern: Pattern, signature: Signature, *, nap_us: int = 0) -> None:
        """Enqueue a rank's part of a chain."""
        launcher = ChainLauncher(pattern.form, self._domains[rank])
        lengths, begins = pattern.form.numbers(pattern.buffers)
        filled = launcher.fill((lengths, begins, max(lengths), signature.hash32, None, None))
        assert filled is not None
        self.launch(rank, launcher.launch_of(filled), nap_us=nap_us)

    def _domain(self, team: Team, blocks: int) -> Domain:
        memory = tuple(self.machine.addresses(self.memory, team.rank))
        region = ArenaRegion(memory, self.layout.slots_nbytes)
        arena: Any = SimpleNamespace(has=lambda request: True, region=lambda request: region)
        return Domain(team, arena, blocks)


class SendrecvRig(ChannelRig):
    """Messages in the order of streams. Two ranks have ``channels`` channels, each way."""

    def __init__(
        self, machine: Machine, channels: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        layout = sendrecv_memory(machine.size, channels)
        super().__init__(machine, layout, HEAD_NBYTES, _with_escapes(layout), changes=changes, timeout_s=timeout_s)
        self._layout = layout

    def message(self, peer: int, place: Place, tag: int | None = 0) -> Message:
        """Return all of a place as a message."""
        return Message(peer, Span(place.address, place.bytes.size), tag)

    def enqueue(
        self,
        rank: int,
        sent: Message | None = None,
        received: Message | None = None,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part; blocks of ``threads`` instead of as many as the package wants."""
        memory = self.machine.addresses(self.memory, rank)
        template = SendrecvTemplate(self.teams[rank], self._layout, memory, sent, received)
        send, receive = (Span(0, 0) if message is None else message.span for message in (sent, received))
        for step in template.steps_of(template.fill(send.pointer, send.count, receive.pointer, receive.count)):
            assert isinstance(step, Launch)
            self.launch(rank, step, threads=threads, nap_us=nap_us)


def _with_escapes(layout: ChannelMemory) -> int:
    return layout.slots + layout.slots_nbytes + escapes_nbytes(layout.slots_nbytes)
