"""Launches around the steps of an algorithm: they pack and unpack derived datatypes, and apply an epilogue."""

from __future__ import annotations

from collections.abc import Sequence

from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.pack_tables import PackJob, table_of
from mpicomm.devices.base import GpuBackend
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, PackTable, blocks_for
from mpicomm.kernels.team import Faults
from mpicomm.mpi.arguments import Span


def pack_launches(backend: GpuBackend, jobs: Sequence[PackJob], packed: int, *, unpacks: bool) -> list[Launch]:
    """Return the launch for all ``jobs``; their packed memory begins at ``packed``. No launch for no bytes. Local."""
    table = table_of(jobs)
    return [pack_launch(backend, table, 0, packed, unpacks=unpacks)] if table.units else []


def pack_launch(backend: GpuBackend, table: PackTable, memory: int, packed: int, *, unpacks: bool) -> Launch:
    """Return the launch for a table. Its regions begin at ``memory``, its packed memory begins at ``packed``. Local."""
    arguments = table.arguments(backend.pack_table(table), memory, packed, backend.faults.failed, unpacks=unpacks)
    blocks = blocks_for(table.units, backend.multiprocessors)
    return Launch(PACK_KERNEL, arguments, blocks=blocks, threads=PACK_THREADS)


def finish_launches(finish: BoundEpilogue, reduced: Span, faults: Faults, multiprocessors: int) -> list[Launch]:
    """Return the launch that applies the epilogue to the ``reduced`` elements; none for no elements. Local.

    The kernel does nothing if an earlier kernel of the device has failed.
    """
    if reduced.count == 0:
        return []
    call = finish.following_kernel(reduced.pointer, faults.failed, multiprocessors)
    return [Launch(call.variant, call.arguments, blocks=call.blocks, threads=call.threads)]
