"""The launch that applies an epilogue behind the steps that reduce."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import CallEpilogue
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import Faults
from mpicomm.mpi.span import Span


def finish_launches(finish: CallEpilogue, reduced: Span, faults: Faults, multiprocessors: int) -> list[Launch]:
    """Return the launch that makes elements of the ``reduced`` ones; none for no elements. Local.

    It does nothing once an earlier kernel of the device has failed.
    """
    if reduced.count == 0:
        return []
    call = finish.epilogue.behind(reduced.pointer, finish.pointer, faults.failed, multiprocessors)
    return [Launch(call.variant, call.arguments, blocks=call.blocks, threads=call.threads)]
