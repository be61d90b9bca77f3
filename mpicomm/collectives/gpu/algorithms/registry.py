"""The algorithms of collectives on GPUs. A new algorithm is an entry here."""

from __future__ import annotations

from functools import lru_cache

from mpicomm.collectives.gpu.algorithms.base import Algorithm
from mpicomm.collectives.gpu.algorithms.chain.plan import serve_chain
from mpicomm.collectives.gpu.algorithms.chunks.plan import serve_chunks, serve_ring
from mpicomm.collectives.gpu.algorithms.copies.plan import CopyLauncher
from mpicomm.collectives.gpu.algorithms.direct.plan import serve_direct
from mpicomm.collectives.gpu.algorithms.packets.plan import serve_any_length, serve_one_shot, serve_two_shot
from mpicomm.collectives.operations import Operation

ALGORITHMS = (
    Algorithm("one_shot", lambda operation: operation.into_all and not operation.reduces, serve_direct),
    Algorithm("one_shot", lambda operation: True, serve_any_length, sends_codes=True),
    Algorithm("one_shot", lambda operation: True, serve_one_shot, sends_codes=True),
    Algorithm("one_shot", lambda operation: True, serve_chunks, sends_codes=True),
    Algorithm("two_shot", lambda operation: operation.two_shot is not None, serve_two_shot, sends_codes=True),
    Algorithm("chain", lambda operation: operation.chain is not None, serve_chain),
    Algorithm("copy_engine", lambda operation: bool(operation.copies), lambda *given: [CopyLauncher(*given)]),
    Algorithm("ring", lambda operation: operation.ring is not None, serve_ring, in_rank_order=False),
)
"""If algorithms share a name, the first that serves a call carries it out."""

NAMES = tuple(dict.fromkeys(algorithm.name for algorithm in ALGORITHMS))
"""The values of ``algorithm=`` that name an algorithm."""


@lru_cache  # every new call asks
def names_for(operation: Operation, *, in_rank_order: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms for a collective; with ``in_rank_order`` only algorithms of "auto"."""
    serving = [each for each in ALGORITHMS if each.serves(operation) and (each.in_rank_order or not in_rank_order)]
    return tuple(dict.fromkeys(algorithm.name for algorithm in serving))
