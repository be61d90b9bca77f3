"""OneNode: collectives on host arrays between ranks of one node."""

from __future__ import annotations

from mpicomm.collectives.call import Call
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.host.selection import schedule


class OneNode:
    """Carries out calls with ``engine``, which serves all ``size`` ranks."""

    def __init__(self, engine: HostEngine, size: int) -> None:
        self._engine = engine
        self._size = size

    def run(self, call: Call, algorithm: str) -> None:
        """Carry out a call that was read. Collective, blocking; raises as `HostEngine.run` does."""
        scratch = self._engine.scratch(call.scratch_nbytes)
        self._engine.run(schedule(call, algorithm, self._size, scratch), call.signature)
