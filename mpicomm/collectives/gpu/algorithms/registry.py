"""The algorithms of collectives on GPUs. A new algorithm is an entry here."""

from __future__ import annotations

from functools import lru_cache

from mpicomm.collectives.gpu.algorithms.base import Algorithm
from mpicomm.collectives.gpu.algorithms.chain.plan import serve_chain
from mpicomm.collectives.gpu.algorithms.chunks.plan import serve_chunks, serve_ring
from mpicomm.collectives.gpu.algorithms.copies.plan import CopyLauncher, local_reduction_kernel
from mpicomm.collectives.gpu.algorithms.direct.plan import BARRIER_KERNEL, serve_direct
from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, Steps, flags_can_carry, packet_kernel
from mpicomm.collectives.gpu.algorithms.packets.plan import serve_any_length, serve_one_shot, serve_two_shot
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.variant import Variant

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


@lru_cache
def usual_kernels(reduction: Reduction | None, size: int, *, host_slots: bool) -> tuple[Variant, ...]:
    """Return the kernels that most programs use between ``size`` ranks, with a reduction if given, the likeliest first.

    ``host_slots`` is as in `packet_kernel`. Raises as `options_for`.
    """

    def packets(reduction: Reduction | None, protocol: Protocol, steps: Steps, *, fan_out: bool = False) -> Variant:
        return packet_kernel(reduction, size, protocol, steps, fan_out=fan_out, host_slots=host_slots)

    if size == 1:
        return ()
    moves = packets(None, "sentinel", "one"), packets(None, "flagged", "one"), packets(None, "sentinel", "few")
    if reduction is None:
        return *moves, BARRIER_KERNEL
    shards = size > 2  # then long reductions are in two shots
    return (
        packets(reduction, "sentinel", "few", fan_out=shards),
        moves[0],
        BARRIER_KERNEL,
        local_reduction_kernel(reduction),
        packets(reduction, "sentinel", "one"),
        *[packets(reduction, "flagged", "one")] * flags_can_carry(reduction[0]),
        packets(reduction, "sentinel", "laps", fan_out=shards),
        *[packets(reduction, "sentinel", "one", fan_out=True)] * shards,
        *moves[1:],
    )
