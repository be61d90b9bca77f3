"""One rig for collectives: ranks with arenas of any size, and a launcher of the package that carries out each call.

`packet_rig`, `direct_rig`, `exchange_rig` and `chain_rig` make it with the launchers of one kernel. A `ProgramRig` has
those that the package chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.base import Copy, Form, FormLauncher, Step
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainLauncher
from mpicomm.collectives.gpu.algorithms.chain.plan import layout_of as chain_layout
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChunkLauncher
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction
from mpicomm.collectives.gpu.algorithms.copies.schedule import Reduce
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectLauncher, barrier
from mpicomm.collectives.gpu.algorithms.memory import (
    PARITIES,
    ArenaLayout,
    ArenaRegion,
    ChannelMemory,
    Domain,
    Inboxes,
    Request,
)
from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES, STAGES, Protocol
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    Configs,
    Geometry,
    PacketConfig,
    large_inboxes,
    row_configs,
    wire_format_of,
)
from mpicomm.collectives.gpu.algorithms.packets.plan import PacketLauncher
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import (
    SENDRECV_PART_NBYTES,
    SENDRECV_SLOTS,
    SendrecvTemplate,
    sendrecv_memory,
    sendrecv_request,
)
from mpicomm.collectives.gpu.decision import Decision
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.team import ABSENT, Team
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped
from tests.helpers.inputs.launch_numbers import begin_after, old_flags
from tests.helpers.inputs.patterns import Pattern
from tests.kernels.machine import Array, Machine, Place
from tests.kernels.mistakes import Changes

SMALL = Geometry(blocks=2, workers=32)
INBOX_NBYTES = 6 * SMALL.threads * SLOT_NBYTES  # so that a message of more than six steps uses inboxes again
LARGE_INBOX_NBYTES = 144 << 10  # of a program: six steps of packets in as many blocks, and a little
STARTS = {"2^30": 2**30 - 1, "2^32": 2**32 - 100}
"""Launches after which numbers begin again."""
_DIRECT_INBOX_NBYTES = 512  # of packets, whose old flags direct.cu wipes
_STAGING_NBYTES = 1 << 20
_MOST_STAGED_NBYTES = 96 << 10  # less than a message, so that regions are used again
_NOWHERE: Any = None  # no call gets there

Launcher = Callable[[Pattern, Form, Domain], FormLauncher]


class Layout(ArenaLayout):
    """The package's layout, with inboxes of any size."""

    def __init__(self, size: int, channels: int, ll_inbox_nbytes: int, sentinel_inbox_nbytes: int) -> None:
        self.ll_inbox_nbytes, self.sentinel_inbox_nbytes = ll_inbox_nbytes, sentinel_inbox_nbytes
        super().__init__(size, channels)


class _Arena:
    """An arena as one rank sees it; all requests of one purpose share one region."""

    def __init__(self, layout: ArenaLayout, arenas: Sequence[int], regions: dict[str, ArenaRegion]) -> None:
        self.layout = layout
        self.ll = Inboxes(tuple(base + layout.ll for base in arenas), layout.ll_inbox_nbytes)
        self.sentinels = Inboxes(tuple(base + layout.sentinels for base in arenas), layout.sentinel_inbox_nbytes)
        # The ordinary inboxes, which are used again more often.
        large = ArenaRegion(self.sentinels.pointers, PARITIES * STAGES * layout.size * self.sentinels.nbytes)
        self._regions = {large_inboxes(layout, 1, STAGES).what: large, **regions}

    def has(self, request: Request) -> bool:
        return True

    def region(self, request: Request) -> ArenaRegion:
        return self._regions[request.what]


@dataclass
class Channels:
    """The words of the channels of a kernel, which each rank has at ``words``."""

    memory: ChannelMemory
    words: Sequence[Array]

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        memory = self.memory
        for words in self.words:
            words[: 2 * memory.size * memory.channels * 4].view(np.uint32)[:] = epoch
            words[memory.credits : memory.slots].view(np.uint64)[:] = epoch << 32


class Rig:
    """Ranks with arenas of a ``layout``, memory for ``requests``, and symmetric memory of ``symmetric_nbytes``.

    ``launcher`` makes the launcher of a call. Kernels have up to ``blocks`` blocks. Each launch draws its number of
    ``threads``; None is the package's.
    """

    def __init__(
        self,
        machine: Machine,
        launcher: Launcher,
        layout: ArenaLayout,
        requests: Sequence[Request] = (),
        *,
        symmetric_nbytes: int = 0,
        blocks: int = SMALL.blocks,
        threads: Sequence[int | None] = (None,),
        early: bool = True,
        changes: Changes = (),
        timeout_s: float | None = None,
    ) -> None:
        self.machine, self.size, self.layout = machine, machine.size, layout
        # No wait takes so long, in the time of kernels, but for a mistake. Runs of mistakes often end in this way, and
        # have less time. Without a mistake the same runs pass with half of that.
        timeout_s = timeout_s or (0.5 if changes else 20)
        ranks = range(self.size)
        self.arenas = [machine.allocate(rank, layout.nbytes) for rank in ranks]
        self.regions = {each.what: [machine.allocate(rank, each.nbytes) for rank in ranks] for each in requests}
        self.outputs = [machine.allocate(rank, symmetric_nbytes) for rank in ranks]
        machine.keep()
        self._launcher, self._changes, self._threads = launcher, changes, threads
        self._made: dict[Hashable, Any] = {}
        """The launchers. Calls of a form share one, as in the package, so a call may leave no value in it."""
        self._rng = np.random.default_rng(self.size)
        self._absent = [(self.arenas, layout.absent), *((self.regions[each.what], each.absent) for each in requests)]
        self.words: Channels | None = None
        """The channels of a kernel that has some."""
        self.renew(ranks)
        self.domains = []
        for rank in ranks:
            regions = {
                each.what: ArenaRegion(tuple(machine.addresses(self.regions[each.what], rank)), each.slots_nbytes)
                for each in requests
            }
            arena = _Arena(layout, machine.addresses(self.arenas, rank), regions)
            team = machine.team(self.arenas, rank, timeout_s)
            self.domains.append(Domain(team, arena, blocks, most_staged_nbytes=_MOST_STAGED_NBYTES, early=early))

    def renew(self, ranks: Sequence[int]) -> None:
        """Let the memory of these ranks be as at first, as a suspension between calls does."""
        for places, (begin, end) in self._absent:
            for rank in ranks:
                places[rank].bytes[:] = 0
                places[rank].bytes[begin:end].view(np.uint32)[:] = ABSENT

    def start_at(self, launch: int, *, moved: int | None = None) -> None:
        """Let all ranks have begun and ended this launch; ``moved`` is the last that moved data, if not the same.

        With channels this is the number of chunks that have gone each way.
        """
        if self.words is not None:
            self.words.start_at(launch)
            return
        for arena in self.arenas:
            begin_after(launch, arena.bytes, self.size)
            arrivals = arena.bytes[self.layout.arrivals : self.layout.ll]
            arrivals.view(np.uint64)[:] = launch if moved is None else moved

    def flags(self, rank: int) -> Array:
        """Return the inboxes of the LL protocol of a rank, of either parity, as words."""
        words: Array = self.arenas[rank].bytes[self.layout.ll : self.layout.sentinels].view(np.uint64)
        return words.reshape(PARITIES, -1)

    def fill_with_old_flags(self, rng: np.random.Generator) -> None:
        """Let the inboxes of the LL protocol hold the flags of launches of the last round of numbers."""
        for rank in range(self.size):
            self.flags(rank)[:] = old_flags(self.flags(rank).nbytes, rng).reshape(PARITIES, -1)

    def run(
        self,
        rank: int,
        pattern: Pattern,
        *,
        nap_us: int = 0,
        symmetric: bool = False,
        finish: BoundEpilogue | None = None,
        wire: tuple[Wire, np.dtype[Any]] | None = None,
    ) -> None:
        """Enqueue a rank's part of a collective; ``symmetric`` if its output lies in `outputs`."""
        memory = Mapped(1, 0, tuple(self.machine.addresses(self.outputs, rank))) if symmetric else None
        form = replace(pattern.form, epilogue=finish, wire=wire)
        text, wire_dtype = None if finish is None else finish.text, wire and str(wire[0])
        signature = replace(pattern.signature, epilogue=text, wire_dtype=wire_dtype)
        for step in self.steps(rank, pattern, form, signature.hash32, memory):
            self.enqueue(rank, step, nap_us=nap_us)
            nap_us = 0

    def steps(self, rank: int, pattern: Pattern, form: Form, hash32: int, memory: Mapped | None) -> Sequence[Step]:
        """Return a rank's part of a collective."""
        make = partial(self._launcher, pattern, form, self.domains[rank])
        launcher: FormLauncher = self._once(rank, pattern, form, make)
        lengths, begins = form.numbers(pattern.buffers)
        filled = launcher.fill((lengths, begins, max(lengths, default=0), hash32, memory, form.epilogue))
        assert filled is not None
        return launcher.steps_of(filled)

    def _once(self, rank: int, pattern: Pattern, form: Form, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes for the first call of a form."""
        key = rank, pattern.algorithm, *vars(form).values()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def barrier(self, rank: int, *, tag: int = 1) -> None:
        """Enqueue a rank's part of a barrier."""
        self.enqueue(rank, barrier(self.domains[rank], tag, after_copies=False))

    def enqueue(self, rank: int, step: Step, *, nap_us: int = 0, threads: int | None = None) -> None:
        """Enqueue a step of a rank. Copies run in order with kernels, so forks and joins are nothing here."""
        if isinstance(step, Copy):
            step = local_reduction(Reduce((step.source,), step.target, step.nbytes), ("uint8", "max"))
        if isinstance(step, Launch):
            threads = threads or self._threads[int(self._rng.integers(len(self._threads)))]
            self.machine.enqueue(rank, step, changes=self._changes, threads=threads, nap_us=nap_us)


def packet_rig(
    machine: Machine,
    protocol: Protocol = "sentinel",
    *,
    inbox_nbytes: int = INBOX_NBYTES,
    rig: Callable[..., Any] = Rig,
    in_one_stage: bool = False,
    **options: Any,
) -> Any:
    """Return a rig of packets.cu: the threads of `SMALL` share the work, or rows, if an epilogue normalises these.

    ``in_one_stage`` is whether calls without fan-out have one inbox, of twice the size, in place of two.
    """

    def launcher(pattern: Pattern, form: Form, domain: Domain) -> FormLauncher:
        fans, finish = pattern.algorithm == "two_shot", form.epilogue
        inboxes = domain.arena.ll if protocol == "ll" else domain.arena.sentinels
        if in_one_stage and not fans:
            inboxes = Inboxes(inboxes.pointers, 2 * inboxes.nbytes, 1)
        if finish and finish.row_nbytes:
            configs = row_configs(finish.row_nbytes, domain, fan_out=fans)
        else:
            wire_format, longer = wire_format_of(form), form.is_private
            config = PacketConfig(protocol, inboxes, SMALL, wire_format, domain.size, others_are_longer=longer)
            configs = Configs(lambda nbytes: config)
        return PacketLauncher(form, domain, configs, (0, 0), two_shot=fans, finishes=finish is not None)

    return rig(machine, launcher, Layout(machine.size, 1, inbox_nbytes, inbox_nbytes), **options)


def direct_rig(machine: Machine, nbytes: int, **options: Any) -> Rig:
    """Return a rig of direct.cu with symmetric memory of ``nbytes``."""
    layout = Layout(machine.size, 1, _DIRECT_INBOX_NBYTES, 0)
    # Each thread more takes ThreadSanitizer a while.
    blocks, threads = (2, (64,)) if machine.builds.sanitize else (3, (None,))

    def launcher(pattern: Pattern, form: Form, domain: Domain) -> FormLauncher:
        return DirectLauncher(form, domain, 0)

    more: dict[str, Any] = {"symmetric_nbytes": nbytes, "blocks": blocks, "threads": threads, "early": False}
    return Rig(machine, launcher, layout, **more, **options)


def exchange_rig(machine: Machine, channels: int, **options: Any) -> Rig:
    """Return a rig of exchange.cu with at most ``channels`` blocks."""
    layout = ArenaLayout(machine.size, channels)

    def launcher(pattern: Pattern, form: Form, domain: Domain) -> FormLauncher:
        return ChunkLauncher(form, domain, lambda buffers: [*replace(pattern, buffers=buffers)])

    rig, memory = Rig(machine, launcher, layout, [_slots_of(layout)], **options), ChannelMemory(machine.size, channels)
    rig.words = Channels(memory, [place.bytes[layout.counts :] for place in rig.arenas])
    return rig


def _slots_of(layout: ArenaLayout) -> Request:
    return Request("collectives: slots", layout.slots_nbytes)


def chain_rig(machine: Machine, blocks: int = 1, *, nbytes: int = 1 << 30, **options: Any) -> Rig:
    """Return a rig of chain.cu. A hop has at most ``blocks``; slots are for ``nbytes``."""
    memory, request = _chain_memory(blocks, nbytes)

    def launcher(pattern: Pattern, form: Form, domain: Domain) -> FormLauncher:
        return ChainLauncher(form, domain)

    rig = Rig(machine, launcher, Layout(machine.size, 1, 0, 0), [request], blocks=blocks, **options)
    rig.words = Channels(memory, [place.bytes for place in rig.regions[request.what]])
    return rig


def _chain_memory(blocks: int, nbytes: int) -> tuple[ChannelMemory, Request]:
    memory = chain_layout(nbytes, 1, Domain(Team(), _NOWHERE, blocks))
    return memory, Request("collectives: chain", memory.slots_nbytes, words_nbytes=memory.slots, sentinel=True)


class ProgramRig(Rig):
    """Whole collectives, by the algorithms that the package chooses.

    With ``bare`` there is no memory but the arena, whatever the algorithm of a call.
    """

    def __init__(self, machine: Machine, nbytes: int = 16, *, bare: bool = False, **options: Any) -> None:
        layout = Layout(machine.size, 2, LARGE_INBOX_NBYTES, LARGE_INBOX_NBYTES)
        layout.most_inbox_nbytes = LARGE_INBOX_NBYTES  # longer messages use inboxes again
        staging = Request("collectives: copies", _STAGING_NBYTES)
        requests = [_slots_of(layout), staging, _chain_memory(SMALL.blocks, 1 << 30)[1]]
        super().__init__(machine, _NOWHERE, layout, requests, symmetric_nbytes=nbytes, **options)
        self._bare = bare
        self.requests: list[Request] = []
        """The memory that algorithms have asked for."""

    def steps(self, rank: int, pattern: Pattern, form: Form, hash32: int, memory: Mapped | None) -> Sequence[Step]:
        make = partial(Decision, form, pattern.algorithm, BUILT_IN, self.domains[rank], _NOWHERE)
        decision = self._once(rank, pattern, form, make)
        longest, symmetric = max(form.numbers(pattern.buffers)[0], default=0), memory is not None
        chosen = decision.in_arena() if self._bare else decision.at(longest, symmetric=symmetric)
        self.requests += chosen.launcher.memory(longest, symmetric=symmetric)
        steps: Sequence[Step] | None = decision.steps(chosen, pattern.buffers, hash32, memory, form.epilogue)
        return steps or ()


class SendrecvRig(Rig):
    """Messages in the order of streams. Two ranks have ``channels`` channels, each way."""

    def __init__(self, machine: Machine, channels: int, **options: Any) -> None:
        self._memory = sendrecv_memory(machine.size, channels)
        request = sendrecv_request(self._memory)
        super().__init__(machine, _NOWHERE, Layout(machine.size, 1, 0, 0), [request], **options)
        (self._places,) = self.regions.values()
        self.words: Channels = Channels(self._memory, [place.bytes for place in self._places])

    def begin_after(self, epoch: int, rng: np.random.Generator) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way, and let slots hold packets of old rounds."""
        self.words.start_at(epoch)
        for place in self._places:
            for slots in place.bytes[self._memory.slots :].reshape(-1, self._memory.channel_nbytes):
                packets = slots[: SENDRECV_SLOTS * 2 * SENDRECV_PART_NBYTES]
                packets.view(np.uint64)[:] = old_flags(packets.size, rng, SENDRECV_SLOTS)

    def message(self, peer: int, place: Place, tag: int | None = 0) -> Message:
        """Return all of a place as a message."""
        return Message(peer, Span(place.address, place.bytes.size), tag)

    def exchange(
        self,
        rank: int,
        sent: Message | None = None,
        received: Message | None = None,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part."""
        memory = self.machine.addresses(self._places, rank)
        template = SendrecvTemplate(self.domains[rank], self._memory, memory, sent, received)
        send, receive = (Span(0, 0) if message is None else message.span for message in (sent, received))
        for step in template.steps_of(template.fill(send.pointer, send.count, receive.pointer, receive.count)):
            self.enqueue(rank, step, threads=threads, nap_us=nap_us)
