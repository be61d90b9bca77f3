"""The algorithms of collectives on GPUs. A new algorithm is a line here."""

from __future__ import annotations

from functools import lru_cache

from mpicomm.collectives.gpu.algorithms.base import Algorithm
from mpicomm.collectives.gpu.algorithms.chain.plan import AlongRanks
from mpicomm.collectives.gpu.algorithms.chunks import plan as chunks
from mpicomm.collectives.gpu.algorithms.copies.plan import CopyEngines
from mpicomm.collectives.gpu.algorithms.direct.plan import IntoMemory
from mpicomm.collectives.gpu.algorithms.packets import plan as packets
from mpicomm.collectives.operations import OPERATIONS, Operation

ALGORITHMS: tuple[Algorithm, ...] = (
    IntoMemory(),
    packets.AnyLengthPackets(),
    packets.PacketOneShot(),
    chunks.ChunkedOneShot(),
    packets.PacketTwoShot(),
    AlongRanks(),
    CopyEngines(),
    chunks.Ring(),
)
"""If algorithms share a name, the first that serves a call carries it out."""

NAMES = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))
"""The values of ``algorithm=`` that name an algorithm."""


@lru_cache  # every new call asks
def names_for(operation: Operation, *, in_rank_order: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms for a collective; with ``in_rank_order`` only algorithms of "auto"."""
    serving = [each for each in ALGORITHMS if each.serves(operation) and (each.in_rank_order or not in_rank_order)]
    return tuple(dict.fromkeys(algorithm.name for algorithm in serving))


def operations_for(name: str) -> tuple[str, ...]:
    """Return the collectives that an algorithm of that name serves."""
    return tuple(
        operation.name
        for operation in OPERATIONS.values()
        if any(algorithm.name == name and algorithm.serves(operation) for algorithm in ALGORITHMS)
    )
