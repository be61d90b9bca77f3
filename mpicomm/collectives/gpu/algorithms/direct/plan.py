"""Exchanges that store straight into symmetric memory of the peers, and barriers, as launches of direct.cu."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, KernelTemplate, Numbers
from mpicomm.collectives.gpu.algorithms.memory import Domain, launch_tag
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import LINE_NBYTES, MAX_RANKS, PACKET_NBYTES, FlaggedInboxes, Team
from mpicomm.kernels.variant import Launch, Variant, u64

# Constants and structures of direct.cu; a test compares them.
DIRECT_THREADS = 512


class Cut(ctypes.Structure):
    """The host's copy of ``Cut`` in direct.cu: a message from one rank to another, cut into parts for blocks."""

    _fields_ = [*u64("nbytes", "part")]


class DirectArguments(ctypes.Structure):
    """The host's copy of ``Direct`` in direct.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ctypes.c_uint64 * MAX_RANKS),
        ("targets", ctypes.c_uint64 * MAX_RANKS),
        ("going", Cut * MAX_RANKS),
        ("coming", Cut * MAX_RANKS),
        *u64("arrivals"),
        ("flagged", FlaggedInboxes),
    ]


DIRECT_KERNEL = Variant(Path(__file__).with_name("direct.cu"), "mpicomm_direct", OPTIONS)
BARRIER_KERNEL = replace(DIRECT_KERNEL, options=(*OPTIONS, "-DMPICOMM_BARRIER"))
_FEWEST_THREADS = 64  # one thread for each rank, and one thread that checks the health of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256
_AT_TAGS: int = DirectArguments.team.offset + Team.tags.offset


class DirectTemplate(KernelTemplate):
    """Launches of direct.cu for this rank of ``domain``.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between. `barrier` returns a launch with separate arguments.
    """

    def __init__(self, domain: Domain) -> None:
        self._rank, self._size, self._most_blocks = domain.rank, domain.size, domain.most_blocks
        self.early = domain.early
        team, layout = domain.team, domain.arena.layout
        flagged = layout.flagged_inboxes(team.arenas[self._rank])
        self.arguments = DirectArguments(team=team, arrivals=layout.arrivals, flagged=flagged)
        self._without_messages = bytes(self.arguments)
        absent = MAX_RANKS - self._size
        words, cuts = f"{self._size}Q{8 * absent}x", f"{2 * self._size}Q{16 * absent}x"
        self._fields = struct.Struct(f"={MAX_RANKS}I{words}{words}{cuts}{cuts}")

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
        packets, threads = -(-longest // PACKET_NBYTES), _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        blocks = max(1, min(self._most_blocks, -(-packets // threads)))
        # Parts are whole lines, so a part begins at a whole packet.
        parts = {nbytes: -(-nbytes // (blocks * LINE_NBYTES)) * LINE_NBYTES for nbytes in {*going, *coming}}
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
        return Launch(BARRIER_KERNEL, arguments, 1, _FEWEST_THREADS, self.early and not after_copies)


class DirectLauncher(DirectTemplate, FormLauncher):
    """Carries out the calls of a form into symmetric output."""

    into_memory = needs_symmetric_output = True

    def __init__(self, form: Form, domain: Domain, fewest: int) -> None:
        super().__init__(domain)
        self.fewest = fewest
        exchange, rank = form.one_shot, domain.rank
        assert exchange.lands is not None
        self._sources, self._targets = [-1] * domain.size, [-1] * domain.size
        self._coming = [False] * domain.size
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            target = receive if peer == rank else exchange.lands[peer]
            if send is not None and target is not None and (peer != rank or target != send):
                self._sources[peer], self._targets[peer] = form.piece(send)[0], form.piece(target)[0]
            self._coming[peer] = receive is not None and peer != rank

    def fill(self, numbers: Numbers) -> Filled:
        _, begins, longest, hash32, memory, _ = numbers
        assert memory is not None
        own, places = memory.pointers[self._rank], zip(memory.pointers, self._targets, strict=True)
        return self.write(
            [begins[block] if block >= 0 else 0 for block in self._sources],
            [pointer + begins[block] - own if block >= 0 else 0 for pointer, block in places],
            [longest if block >= 0 else 0 for block in self._sources],
            [longest if comes else 0 for comes in self._coming],
            longest,
            launch_tag(hash32, memory=memory),
        )


def serve_direct(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """Every rank stores its data straight into the symmetric output of its peers, between two barriers."""
    if domain.size == 1:
        return "there is one rank"
    return [DirectLauncher(form, domain, int(most_copied_nbytes(form.operation, domain)) + 1)]


def most_copied_nbytes(operation: Operation, domain: Domain) -> float:
    """Return the most bytes of one message that packets carry, also into symmetric output.

    Up to there packets are faster, although a rank copies their data out of its inboxes: they save two barriers. Their
    other costs grow with the bytes that a rank sends, and with the number of ranks that send to it at once.
    """
    size = domain.size
    most_copied = (76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2) * domain.link_speed
    if operation.traffic == "one-way":  # packets refuse longer messages of such calls
        return min(most_copied, domain.arena.layout.most_inbox_nbytes)
    return most_copied
