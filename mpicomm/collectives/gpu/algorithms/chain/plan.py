"""Messages along a chain of ranks, as launches of chain.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, KernelTemplate, Numbers
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Domain, Request
from mpicomm.kernels.reductions import HOST_SLOTS, options_for
from mpicomm.kernels.team import LANES, MAX_RANKS, PACKET_NBYTES, Team
from mpicomm.kernels.variant import Variant, u32, u64
from mpicomm.mpi.types import is_narrow

# Constants and structures of chain.cu; a test compares them.
CHAIN_THREADS = 256
CHAIN_SLOTS = 2
BATCH_NBYTES = 2 * 1024


class HopArguments(ctypes.Structure):
    """The host's copy of ``Hop`` in chain.cu: a hop of this rank in the chain."""

    _fields_ = [*u64("own", "output"), *u32("receives", "sends")]


class ChainArguments(ctypes.Structure):
    """The host's copy of ``Chain`` in chain.cu."""

    _fields_ = [
        ("team", Team),
        ("hops", HopArguments * 2),
        *u64("nbytes", "batch_nbytes"),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        *u64("credits", "flags", "slots", "slot_nbytes"),
        *u32("batches", "channels", "blocks", "previous", "next", "tag"),
    ]


def chain_kernel(reduction: tuple[str, str] | None, *, host_slots: bool = False) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`.

    ``host_slots`` is whether slots lie in host memory.
    """
    return Variant(
        Path(__file__).with_name("chain.cu"),
        "mpicomm_chain",
        options_for(reduction) + (HOST_SLOTS if host_slots else ()),
    )


# A launch has up to `Domain.most_blocks`, as measured on H200s. Half of them are used if a batch would not be full, or
# if a rank has two hops. A multiprocessor holds two blocks, so the blocks of both hops of a rank run at once.
# On 4 H100s a reduce of 64 MiB to the first rank is slower with all other numbers of blocks, of warps and of packets in
# a batch that were measured. It is also slower if a warp polls only the last packets, passes on one row of packets at a
# time, or gives credit one batch later.
_HALF_OF_BLOCKS = 64
# A receiver gives credit for each slot, and credit travels against the data. On H200s smaller slots slow the data down.
_MOST_SLOT_NBYTES = 32 * 1024
_WARPS = CHAIN_THREADS // LANES
_UNIT_NBYTES = LANES * PACKET_NBYTES  # a packet for each lane


def layout_of(nbytes: int, links: int, domain: Domain) -> ChannelMemory:
    """Return the layout of each rank's memory for a chain of messages of ``nbytes`` over ``links`` links.

    A slot holds all data that one channel carries of a message, up to a limit. All channels lead to one neighbour each
    way. Escapes follow the slots.
    """
    blocks, batch_nbytes = cut(nbytes, links, domain)
    batches = -(-nbytes // (blocks * _WARPS * batch_nbytes))
    slot_nbytes = BATCH_NBYTES
    while slot_nbytes < min(batches * BATCH_NBYTES, _MOST_SLOT_NBYTES):
        slot_nbytes *= 4  # in large steps, because memory of each size stays until the communicator is freed
    return ChannelMemory(1, domain.most_blocks * _WARPS, CHAIN_SLOTS * slot_nbytes)


def cut(nbytes: int, links: int, domain: Domain) -> tuple[int, int]:
    """Return the blocks for one hop and the size of a batch.

    They are the same on all ranks, because both ranks of a channel must cut messages in the same way. If a chain has as
    many links as ranks, it comes back to the first rank, which then has two hops.
    """
    wanted = _HALF_OF_BLOCKS if links == domain.size else max(_HALF_OF_BLOCKS, nbytes // (_WARPS * BATCH_NBYTES))
    blocks = min(wanted, domain.most_blocks)
    batch_nbytes = min(BATCH_NBYTES, -(-nbytes // (blocks * _WARPS * _UNIT_NBYTES)) * _UNIT_NBYTES)
    return min(blocks, -(-nbytes // batch_nbytes)), batch_nbytes


class ChainLauncher(KernelTemplate, FormLauncher):
    """Carries out the calls of a form as chains, each by one launch of chain.cu."""

    def __init__(self, form: Form, domain: Domain) -> None:
        rank, size, hops = domain.rank, domain.size, form.chain.hops
        self._domain = domain
        self._links = form.chain.links
        self._reduction = form.reduction
        self.early = domain.early
        self.arguments = ChainArguments(team=domain.team, previous=(rank - 1) % size, next=(rank + 1) % size)
        for filled, hop in zip(self.arguments.hops, hops, strict=False):
            filled.receives, filled.sends = hop.receives, hop.sends
        self._blocks = [(form.piece(hop.own)[0], form.piece(hop.output)[0]) for hop in hops]

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        layout = layout_of(longest, self._links, self._domain)
        return (Request("collectives: chain", layout.slots_nbytes, words_nbytes=layout.slots, sentinel=True),)

    def fill(self, numbers: Numbers) -> Filled | None:
        _, begins, longest, hash32, *_ = numbers
        domain, links, arguments = self._domain, self._links, self.arguments
        layout = layout_of(longest, links, domain)
        (request,) = self.memory(longest, symmetric=False)
        if not domain.arena.has(request):
            return None
        region = domain.arena.region(request)
        blocks, batch_nbytes = cut(longest, links, domain)
        slot_nbytes = region.slots_nbytes // layout.channels // CHAIN_SLOTS
        at = [*begins, 0]  # block -1 is no block
        for hop, (own, output) in zip(arguments.hops, self._blocks, strict=False):
            hop.own, hop.output = at[own], at[output]
        arguments.nbytes, arguments.batch_nbytes = longest, batch_nbytes
        arguments.memory[: domain.size] = region.pointers
        arguments.credits, arguments.flags, arguments.slots = layout.credits, layout.flags, layout.slots
        arguments.slot_nbytes, arguments.batches = slot_nbytes, slot_nbytes // BATCH_NBYTES
        arguments.channels, arguments.blocks, arguments.tag = layout.channels, blocks, hash32
        return None, blocks * len(self._blocks), CHAIN_THREADS

    def variant(self, kernel: None) -> Variant:
        return chain_kernel(self._reduction, host_slots=self._domain.host_slots)


def serve_chain(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """Each rank sends the data that it receives to the next rank, unchanged or reduced with its own data.

    A chain that reduces in rank order ends on the last rank. For a root in the middle all data would travel twice.
    Partial results travel in the type of the elements. So each rank would round narrow types.
    """
    if form.operation.reduces and (
        form.root not in (0, form.size - 1) or form.op in ("avg", "tree") or is_narrow(form.dtype)
    ):
        return (
            "it needs the first or the last rank as root, and an operation and an element type that need no wider "
            "type to reduce (not avg, tree, float16, bfloat16 or float8)"
        )
    return [ChainLauncher(form, domain)]
