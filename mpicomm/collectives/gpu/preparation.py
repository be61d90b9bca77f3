"""From a call on device arrays to a plan of the engine: which algorithm, in which exchanges, with which memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.arena import NoStagingError
from mpicomm.collectives.gpu.choose import can_chain, choose_algorithm
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.mpi.span import Span
from mpicomm.symmetric.registry import Mappings

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine  # needs CuPy
    from mpicomm.collectives.gpu.plan import Plan

_log = logging.getLogger("mpicomm")


def prepare(
    engine: DeviceEngine,
    mappings: Mappings,
    call: Call,
    size: int,
    asked: str,
    scratch_for: Callable[[Call], Span | None],
) -> Plan:
    """Return this rank's part of a call between ``size`` ranks, for which the algorithm ``asked`` was given.

    Collective where the engine's `prepare` is; raises as that and `choose_algorithm`. Where there is no memory for
    copy engines to bring data to, and they were not asked for, another algorithm takes less: a warning says so.
    """
    assert call.dtype is not None  # else it is MPI's
    dtype, output, nbytes = call.dtype, call.common_output, call.nbytes or 0
    memory = None
    if output is not None and output.total:
        memory = mappings.find(output.pointer, output.total * dtype.itemsize)

    def choose(tuning: Tuning) -> str:
        return choose_algorithm(
            tuning,
            asked,
            call.operation,
            nbytes,
            size,
            registered=memory is not None,
            chainable=can_chain(dtype, call.op, call.arguments.root, size),
        )

    def prepared(algorithm: str) -> Plan:
        # A rank cannot store what it has reduced of a Reduce, for copy engines to send it on: all goes to the root.
        two_hops = algorithm == "two_shot" or (algorithm == "copy_engine" and call.operation != "Reduce")
        exchanges = call.exchanges(nbytes if two_hops else None, scratch_for(call), algorithm=algorithm)
        return engine.prepare(exchanges, call.signature, memory, algorithm=algorithm)

    algorithm = choose(engine.tuning)
    try:
        return prepared(algorithm)
    except NoStagingError as error:
        if asked != "auto" or algorithm != "copy_engine":
            raise
        _warn_of_memory(call.operation, str(error))
        return prepared(choose(engine.tuning.without("copy_engine")))


@lru_cache
def _warn_of_memory(operation: str, reason: str) -> None:
    _log.warning("%s goes without copy engines, which is slower, for want of memory: %s", operation, reason)
