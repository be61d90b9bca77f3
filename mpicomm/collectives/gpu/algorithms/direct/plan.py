"""Exchanges that store straight into symmetric memory of the peers, and barriers, as launches of direct.cu."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from mpicomm.collectives.gpu.algorithms.base import (
    NO_CODES,
    Algorithm,
    Domain,
    Filled,
    FormLauncher,
    KernelTemplate,
    launch_tag,
)
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.direct.arguments import DIRECT_KERNEL, DIRECT_THREADS, DirectArguments, part_of
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.symmetric.registry import Mapped

_MOST_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_FEWEST_THREADS = 64  # one thread for each rank, and one thread that checks the health of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256
_AT_TAGS: int = DirectArguments.team.offset + Team.tags.offset


class DirectTemplate(KernelTemplate):
    """Launches of direct.cu. Every kernel of this rank gets ``team``.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between. `barrier` returns a launch with separate arguments.
    """

    def __init__(self, team: Team, layout: ArenaLayout, most_blocks: int, *, early: bool = True) -> None:
        self._rank, self._size = int(team.rank), int(team.size)
        self._most_blocks = most_blocks
        self.early = early
        flagged = layout.flagged_inboxes(team.arenas[self._rank])
        self.arguments = DirectArguments(team=team, arrivals=layout.arrivals, flagged=flagged)
        self._without_messages = bytes(self.arguments)
        absent = MAX_RANKS - self._size
        words, cuts = f"{self._size}Q{8 * absent}x", f"{2 * self._size}Q{16 * absent}x"
        self._fields = struct.Struct(f"={MAX_RANKS}I{words}{words}{cuts}{cuts}")

    @classmethod
    def of(cls, domain: Domain) -> DirectTemplate:
        """Return a template for this rank of a domain."""
        return DirectTemplate(domain.team, domain.arena.layout, most_blocks_of(domain), early=domain.early)

    def write(
        self,
        sends: Sequence[int],
        targets: Sequence[int],
        going: Sequence[int],
        coming: Sequence[int],
        longest: int,
        tag: int,
    ) -> Filled:
        """Write a call into `arguments`.

        The item of each rank in ``sends`` and ``targets`` is the address of the message to it, and of the place where
        the message belongs, as mapped here. Its item in ``going`` and ``coming`` are the bytes of the message to it and
        of the message from it. A message without bytes has address 0. ``longest`` are the most bytes of a message.
        ``longest`` and ``tag`` are the same on all ranks.
        """
        blocks, threads = self._geometry(-(-longest // PACKET_NBYTES))
        parts = {nbytes: part_of(nbytes, blocks) for nbytes in {*going, *coming}}
        cuts = chain.from_iterable((nbytes, parts[nbytes]) for nbytes in (*going, *coming))
        self._fields.pack_into(self.arguments, _AT_TAGS, *[tag] * MAX_RANKS, *sends, *targets, *cuts)
        return None, blocks, threads

    def variant(self, kernel: None) -> Variant:
        return DIRECT_KERNEL

    def barrier(self, tag: int, *, after_copies: bool) -> Launch:
        """Return a launch that ends when all earlier work of all ranks has ended.

        With ``after_copies``, copies may precede it on the stream, so its blocks are not set up early.
        """
        arguments = DirectArguments.from_buffer_copy(self._without_messages)
        arguments.team.tags[:] = [tag] * MAX_RANKS
        return Launch(DIRECT_KERNEL, arguments, 1, _FEWEST_THREADS, self.early and not after_copies)

    def _geometry(self, packets: int) -> tuple[int, int]:
        """Return the blocks and threads for ``packets`` from one rank to another; the same on all ranks."""
        threads = _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        return max(1, min(self._most_blocks, -(-packets // threads))), threads


class DirectLauncher(DirectTemplate, FormLauncher):
    """Carries out the calls of a form into symmetric output."""

    into_memory = needs_symmetric_output = True

    def __init__(self, form: Form, domain: Domain, fewest: int) -> None:
        super().__init__(domain.team, domain.arena.layout, most_blocks_of(domain), early=domain.early)
        self.fewest = fewest
        exchange, rank = form.one_shot, domain.rank
        assert exchange.lands is not None
        self._sources, self._targets = [-1] * domain.size, [-1] * domain.size
        self._coming = [False] * domain.size
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            target = receive if peer == rank else exchange.lands[peer]
            if send is not None and target is not None and (peer != rank or target != send):
                self._sources[peer], self._targets[peer] = form.piece(send).block, form.piece(target).block
            self._coming[peer] = receive is not None and peer != rank

    def fill(
        self,
        lengths: list[int],
        begins: list[int],
        longest: int,
        hash32: int,
        memory: Mapped | None = None,
        finish: BoundEpilogue | None = None,
    ) -> Filled:
        assert memory is not None
        own = memory.pointers[self._rank]
        return self.write(
            [begins[block] if block >= 0 else 0 for block in self._sources],
            [
                pointer + begins[block] - own if block >= 0 else 0
                for pointer, block in zip(memory.pointers, self._targets, strict=True)
            ],
            [longest if block >= 0 else 0 for block in self._sources],
            [longest if comes else 0 for comes in self._coming],
            longest,
            launch_tag(hash32, memory=memory),
        )


def most_blocks_of(domain: Domain) -> int:
    """Return the most blocks of a launch; the same on all ranks."""
    return min(_MOST_BLOCKS, domain.multiprocessors)


class IntoMemory(Algorithm):
    """Every rank stores its data straight into the symmetric output of its peers, between two barriers."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        return operation.into_all and not operation.reduces

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        if form.wire is not None:
            return NO_CODES
        if domain.size == 1:
            return "there is one rank"
        return [DirectLauncher(form, domain, int(most_copied_nbytes(form.operation, domain)) + 1)]


def most_copied_nbytes(operation: Operation, domain: Domain) -> float:
    """Return the most bytes of one message that packets carry, also into symmetric output."""
    most_copied = _most_copied_nbytes(domain.size) * domain.link_speed
    if operation.traffic == "one-way":  # packets refuse longer messages of such calls
        return min(most_copied, domain.arena.layout.most_inbox_nbytes)
    return most_copied


def _most_copied_nbytes(size: int) -> int:
    """Return the most bytes for which packets are faster, although a rank copies their data out of its inboxes.

    Packets save two barriers. Their other costs grow with the bytes that a rank sends, and with the number of ranks
    that send to it at once.
    """
    return 76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2
