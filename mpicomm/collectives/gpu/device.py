"""The device of an engine: its facts, scratch memory that grows, and the launches around the steps of an algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpicomm import environment
from mpicomm.cluster.agreement import Group
from mpicomm.collectives.packed import PackJob, table_of
from mpicomm.devices.base import Scratch
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, PackTable, blocks_for
from mpicomm.kernels.team import Team
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span


@dataclass(frozen=True)
class DeviceFacts:
    """The facts about a rank's device that the ranks exchange."""

    multiprocessors: int
    total_nbytes: int
    uuid: bytes
    takes_turns: bool
    """Whether the device runs only one process at a time, so that a kernel has all multiprocessors."""


def device_facts(backend: GpuBackend) -> DeviceFacts:
    """Return the facts about this rank's device. Local."""
    takes_turns = not environment.multi_process_service()
    return DeviceFacts(backend.multiprocessors, backend.total_nbytes, backend.info.uuid, takes_turns)


def multiprocessors_of(devices: Sequence[DeviceFacts], on_a_device: int) -> tuple[int, int]:
    """Return the multiprocessors that each rank has on the smallest device, and how many ranks run there side by side.

    ``on_a_device`` is the highest number of ranks that share a device.
    """
    # All blocks of all ranks must run at once, because they wait for each other. So a launch has only the blocks that
    # the smallest device can hold. Ranks that run side by side on a device share its multiprocessors. Otherwise one
    # rank's waiting blocks could keep out the blocks for which they wait.
    side_by_side = 1 if all(each.takes_turns for each in devices) else on_a_device
    return max(1, min(each.multiprocessors for each in devices) // side_by_side), side_by_side


def team_of(backend: GpuBackend, node: Group, arenas: Iterable[int]) -> Team:
    """Return the team of this rank. ``arenas`` has the address of each rank's arena."""
    team = Team(faults=backend.faults, timeout_ns=backend.timeout_ns, size=node.size, rank=node.rank)
    for index, (arena, name) in enumerate(zip(arenas, node.ranks, strict=True)):
        team.arenas[index], team.names[index] = arena, name
    return team


class GrowingScratch:
    """Memory that grows by powers of two. All of it lives as long as this object."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._parts = [Scratch(0, 0, None)]

    @property
    def largest(self) -> Scratch:
        """The part that the next calls use; a part without bytes before the first `of`."""
        return self._parts[-1]

    @property
    def nbytes(self) -> int:
        """The bytes of all memory."""
        return sum(part.nbytes for part in self._parts)

    def of(self, nbytes: int) -> Span | None:
        """Return memory of at least ``nbytes`` bytes; None for 0 bytes. Local."""
        if nbytes == 0:
            return None
        if self.largest.nbytes < nbytes:
            # Smaller parts stay, because a captured graph may use them. Sizes are powers of two, so all parts together
            # have at most twice the bytes of the largest part.
            self._parts.append(self._backend.scratch(1 << (nbytes - 1).bit_length()))
        return Span(self.largest.pointer, 0)


def pack_launches(backend: GpuBackend, jobs: Sequence[PackJob], packed: int, *, unpacks: bool) -> list[Launch]:
    """Return the launch for all ``jobs``; their packed memory begins at ``packed``. No launch for no bytes. Local."""
    table = table_of(jobs)
    return [pack_launch(backend, table, 0, packed, unpacks=unpacks)] if table.units else []


def pack_launch(backend: GpuBackend, table: PackTable, memory: int, packed: int, *, unpacks: bool) -> Launch:
    """Return the launch for a table. Its regions begin at ``memory``, its packed memory begins at ``packed``. Local."""
    arguments = table.arguments(backend.pack_table(table), memory, packed, backend.faults.failed, unpacks=unpacks)
    blocks = blocks_for(table.units, backend.multiprocessors)
    return Launch(PACK_KERNEL, arguments, blocks=blocks, threads=PACK_THREADS)
