"""Exchanges that store straight into symmetric memory of the peers, and barriers, as launches of direct.cu."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, KernelTemplate, Numbers
from mpicomm.collectives.gpu.algorithms.memory import Domain, launch_tag
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import LINE_NBYTES, MAX_RANKS, PACKET_NBYTES, LLInboxes, Team
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
        ("ll", LLInboxes),
    ]


DIRECT_KERNEL = Variant(Path(__file__).with_name("direct.cu"), "mpicomm_direct", OPTIONS)
BARRIER_KERNEL = replace(DIRECT_KERNEL, options=(*OPTIONS, "-DMPICOMM_BARRIER"))
_FEWEST_THREADS = 64  # one thread for each rank, and one thread that checks the health of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256
_AT_TAGS: int = DirectArguments.team.offset + Team.tags.offset


class DirectLauncher(KernelTemplate, FormLauncher):
    """Carries out the calls of a form into symmetric output."""

    into_memory = needs_symmetric_output = True

    def __init__(self, form: Form, domain: Domain, fewest: int) -> None:
        self.fewest, self.early = fewest, domain.early
        self._rank, self._most_blocks, self.arguments = domain.rank, domain.most_blocks, _arguments(domain)
        absent = MAX_RANKS - domain.size
        words, cuts = f"{domain.size}Q{8 * absent}x", f"{2 * domain.size}Q{16 * absent}x"
        self._fields = struct.Struct(f"={MAX_RANKS}I{words}{words}{cuts}{cuts}")
        exchange, rank = form.one_shot, domain.rank
        assert exchange.targets is not None
        self._sources, self._targets = [-1] * domain.size, [-1] * domain.size
        self._coming = [False] * domain.size
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            target = receive if peer == rank else exchange.targets[peer]
            if send is not None and target is not None and (peer != rank or target != send):
                self._sources[peer], self._targets[peer] = form.piece(send)[0], form.piece(target)[0]
            self._coming[peer] = receive is not None and peer != rank

    def fill(self, numbers: Numbers) -> Filled:
        _, begins, longest, hash32, memory, _ = numbers
        assert memory is not None
        packets, threads = -(-longest // PACKET_NBYTES), _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        blocks = max(1, min(self._most_blocks, -(-packets // threads)))
        # Parts are whole lines, so a part begins at a whole packet.
        cut, nothing = (longest, -(-longest // (blocks * LINE_NBYTES)) * LINE_NBYTES), (0, 0)
        own, places = memory.pointers[self._rank], zip(memory.pointers, self._targets, strict=True)
        # A message without bytes has address 0.
        fields = [launch_tag(hash32, memory=memory)] * MAX_RANKS
        fields += [begins[block] if block >= 0 else 0 for block in self._sources]
        fields += [pointer + begins[block] - own if block >= 0 else 0 for pointer, block in places]
        going = [cut if block >= 0 else nothing for block in self._sources]
        coming = [cut if comes else nothing for comes in self._coming]
        self._fields.pack_into(self.arguments, _AT_TAGS, *fields, *chain.from_iterable((*going, *coming)))
        return None, blocks, threads

    def variant(self, kernel: None) -> Variant:
        return DIRECT_KERNEL


def _arguments(domain: Domain) -> DirectArguments:
    layout = domain.arena.layout
    inboxes = layout.ll_inboxes(domain.team.arenas[domain.rank])
    return DirectArguments(team=domain.team, arrivals=layout.arrivals, ll=inboxes)


def barrier(domain: Domain, tag: int, *, after_copies: bool) -> Launch:
    """Return a launch that ends when all earlier work of all ranks has ended.

    With ``after_copies``, copies may precede it on the stream, so its blocks are not set up early.
    """
    arguments = _arguments(domain)
    arguments.team.tags[:] = [tag] * MAX_RANKS
    return Launch(BARRIER_KERNEL, arguments, 1, _FEWEST_THREADS, domain.early and not after_copies)


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
    if not operation.to_all:  # packets refuse longer messages of such calls
        return min(most_copied, domain.arena.layout.most_inbox_nbytes)
    return most_copied
