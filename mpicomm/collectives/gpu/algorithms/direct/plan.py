"""Exchanges that store straight into symmetric memory of the peers, and barriers, as launches of direct.cu."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Algorithm, Filled, GpuCall, Lengths, Node, Template, launch_tag
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.landing import landing_place
from mpicomm.collectives.gpu.algorithms.direct.arguments import DIRECT_KERNEL, DIRECT_THREADS, DirectArguments, part_of
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.symmetric.registry import Mapped

_MOST_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_FEWEST_THREADS = 64  # one thread for each rank, and one thread that checks the health of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256
_AT_TAGS: int = DirectArguments.team.offset + Team.tags.offset


class DirectTemplate:
    """A `Template` of direct.cu. Every kernel of this rank gets ``team``.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between. `launch` and `barrier` return launches with separate arguments.
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
    def of(cls, node: Node) -> DirectTemplate:
        """Return a template for this rank of a node."""
        return DirectTemplate(node.team, node.arena.layout, most_blocks_of(node), early=node.early)

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

    def launch(self, exchange: Exchange, memory: Mapped, tag: int, *, nbytes: int) -> Launch:
        """Return the launch for an exchange into symmetric ``memory``; a message has at most ``nbytes``."""
        rank, size, itemsize = self._rank, self._size, exchange.dtype.itemsize
        sends, targets, going, coming = ([0] * size for _ in range(4))
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            if send is not None and send.count:
                target = receive.pointer if receive is not None else 0
                if peer != rank:
                    target = landing_place(exchange, peer, memory, memory.pointers[rank])
                if target not in (0, send.pointer):
                    sends[peer], targets[peer], going[peer] = send.pointer, target, send.count * itemsize
            if receive is not None and peer != rank:
                coming[peer] = receive.count * itemsize
        kernel, blocks, threads = self.write(sends, targets, going, coming, nbytes, tag)
        arguments = DirectArguments.from_buffer_copy(self.arguments)
        return Launch(self.variant(kernel), arguments, blocks, threads, self.early)

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


class DirectCalls(DirectTemplate):
    """An `EvenTemplate`: the calls of a form with equal blocks, into symmetric output."""

    def __init__(self, form: Form, node: Node) -> None:
        super().__init__(node.team, node.arena.layout, most_blocks_of(node), early=node.early)
        exchange, rank = form.one_shot, node.rank
        assert exchange.lands is not None
        self._sources, self._targets = [(0, 0)] * node.size, [(-1, 0)] * node.size
        self._going, self._coming = [False] * node.size, [False] * node.size
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            target = receive if peer == rank else exchange.lands[peer]
            if send is not None and target is not None and (peer != rank or target != send):
                self._sources[peer], self._targets[peer] = form.piece(send), (peer, form.piece(target).part)
                self._going[peer] = True
            self._coming[peer] = receive is not None and peer != rank

    def fill(self, send: int, receive: int, nbytes: int, hash32: int, memory: Mapped | None) -> Filled:
        assert memory is not None
        buffers, outputs = (0, send, receive), (*memory.pointers, 0)
        return self.write(
            [buffers[buffer] + part * nbytes for buffer, part in self._sources],
            [outputs[peer] + part * nbytes for peer, part in self._targets],
            [nbytes if goes else 0 for goes in self._going],
            [nbytes if comes else 0 for comes in self._coming],
            nbytes,
            launch_tag(hash32, memory=memory),
        )


def most_blocks_of(node: Node) -> int:
    """Return the most blocks of a launch; the same on all ranks."""
    return min(_MOST_BLOCKS, node.multiprocessors)


class IntoMemory(Algorithm):
    """Every rank stores its data straight into the symmetric output of its peers, between two barriers."""

    name = "one_shot"
    into_memory = True

    def serves(self, operation: Operation) -> bool:
        return operation.into_all and not operation.reduces

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        return (int(most_copied_nbytes(form.operation, node)) + 1, inf) if symmetric else None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        if call.memory is None:
            return "the output is not symmetric memory on all ranks"
        if node.size == 1:
            return "there is one rank"
        most_copied = most_copied_nbytes(call.operation, node)
        return None if call.one_shot.longest_nbytes > most_copied else "packets are faster for so few bytes"

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        assert call.memory is not None
        exchange, tag = call.one_shot, call.tag(into_memory=True)
        yield DirectTemplate.of(node).launch(exchange, call.memory, tag, nbytes=exchange.longest_nbytes)

    def template(self, form: Form, node: Node) -> Template | None:
        return DirectCalls(form, node)


def most_copied_nbytes(operation: Operation, node: Node) -> float:
    """Return the most bytes of one message that packets carry, also into symmetric output."""
    most_copied = _most_copied_nbytes(node.size) * node.link_speed
    if operation.traffic == "one-way":  # packets refuse longer messages of such calls
        return min(most_copied, node.arena.layout.most_inbox_nbytes)
    return most_copied


def _most_copied_nbytes(size: int) -> int:
    """Return the most bytes for which packets are faster, although a rank copies their data out of its inboxes.

    Packets save two barriers. Their other costs grow with the bytes that a rank sends, and with the number of ranks
    that send to it at once.
    """
    return 76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2
