"""The launch that applies an epilogue behind the steps that reduce."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Finish
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.epilogue import EPILOGUE_THREADS, EpilogueArguments, blocks_for, epilogue_kernel
from mpicomm.kernels.team import Faults
from mpicomm.mpi.span import Span


def finish_launches(finish: Finish, reduced: Span, faults: Faults, multiprocessors: int) -> list[Launch]:
    """Return the launch that makes elements of the ``reduced`` ones; none for no elements. Local.

    It does nothing once an earlier kernel of the device has failed.
    """
    epilogue = finish.epilogue
    if reduced.count == 0:
        return []
    arguments = EpilogueArguments(reduced.pointer, finish.pointer, faults.failed, finish.operands())
    variant = epilogue_kernel(epilogue.dtype.name, epilogue.result.name, epilogue.code)
    nbytes = reduced.count * max(epilogue.dtype.itemsize, epilogue.result.itemsize)
    return [Launch(variant, arguments, blocks=blocks_for(nbytes, multiprocessors), threads=EPILOGUE_THREADS)]
