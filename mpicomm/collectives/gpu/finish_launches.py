"""The launch that applies an epilogue after the steps that reduce."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import CallEpilogue
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import Faults
from mpicomm.mpi.span import Span


def finish_launches(finish: CallEpilogue, reduced: Span, faults: Faults, multiprocessors: int) -> list[Launch]:
    """Return the launch that applies the epilogue to the ``reduced`` elements; none for no elements. Local.

    The kernel does nothing if an earlier kernel of the device has failed.
    """
    if reduced.count == 0:
        return []
    call = finish.epilogue.following_kernel(reduced.pointer, finish.pointer, faults.failed, multiprocessors)
    return [Launch(call.variant, call.arguments, blocks=call.blocks, threads=call.threads)]
