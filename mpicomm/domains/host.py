"""HostDomains: collectives on host arrays over several peer domains, by the host engine of a domain and MPI."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from mpicomm.collectives.call import Call
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.devices.host import array_at
from mpicomm.domains.mpi_transfers import Transfers
from mpicomm.domains.reductions import combine
from mpicomm.domains.schedules import DEPTH, pieces_of, require_rank_order, run_pipeline, schedule_of
from mpicomm.domains.steps import Combine, DomainLayout, DomainStep, Pack


class HostDomains:
    """Collectives on host arrays of all ranks; ``engine`` serves this rank's domain. Construction is local."""

    def __init__(self, layout: DomainLayout, engine: HostEngine, transfers: Transfers) -> None:
        self._layout = layout
        self._engine = engine
        self._transfers = transfers
        transfers.on_poll = engine.raise_if_aborted
        self._scratch = [np.empty(0, np.uint8)] * DEPTH

    def run(self, call: Call, algorithm: str) -> None:
        """Carry out a call that was read. Collective, blocking; raises as `HostEngine.run` does.

        If a rank of another domain does not come, or makes another call, one rank notices. All ranks of this domain
        raise the error of that rank.
        """
        require_rank_order(call, self._layout)
        scratch = np.empty(call.blocks.nbytes, np.uint8)
        buffers = call.buffers(scratch.ctypes.data)
        schedule = schedule_of(call.operation, call.nbytes or 0, self._layout, algorithm)
        pieces = pieces_of(schedule, buffers, self._layout, [partial(self._memory, turn) for turn in range(DEPTH)])
        signature = call.signature
        start = partial(self._transfers.start, call=signature)
        try:
            self._engine.run_call(lambda: run_pipeline(pieces, self._work, start), signature)
        except BaseException:
            broken = self._engine.broken  # not after errors of the arguments
            if broken is not None:
                self._transfers.publish_error(broken)
            raise

    def _memory(self, turn: int, nbytes: int) -> int:
        if self._scratch[turn].nbytes < nbytes:
            self._scratch[turn] = np.empty(nbytes, np.uint8)
        return int(self._scratch[turn].ctypes.data)

    def _work(self, step: DomainStep | Combine | Pack) -> None:
        if isinstance(step, DomainStep):
            self._engine.execute(step.operation.one_shot(step.buffers))
        elif isinstance(step, Pack):
            for copy in step.copies():
                ctypes.memmove(*copy)
        elif step.count:
            parts = [array_at(source, step.count, step.dtype) for source in step.sources]
            combine(step.op, parts, array_at(step.output, step.count, step.result), step.divisor)
