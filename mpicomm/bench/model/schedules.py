"""The cost of mpicomm's collectives over several groups: one function for each schedule of two levels.

In the formulae L is the ranks of a group, G the groups, N = L * G. n is the bytes of the largest buffer of a rank, as
the bench counts sizes, and T(n) a measured time of one group. A *rail* consists of the ranks with the same number in
their groups. Each rank has its own network card. The model leaves out the time for a GPU to reduce data from other
groups. It leaves out the time for a host to start a network step. It also leaves out that floats of 16 bits cross the
network as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpicomm.bench.model.group import DomainTimes
from mpicomm.bench.model.network import Network
from mpicomm.domains.schedules import PIECE_NBYTES, domains_at_once, pipelined_piece
from mpicomm.errors import InvalidUsageError

PACKING = Network(gb_s=1800, latency_us=1.5)
"""The cost to pack blocks in a GPU's memory, and to unpack them, for an H200: scripts/results/packing-h200.json."""


@dataclass(frozen=True)
class System:
    """``groups`` groups, each like ``group``, with ``network`` between them."""

    group: DomainTimes
    groups: int
    network: Network

    @property
    def ranks(self) -> int:
        """L, the ranks of a group."""
        return self.group.ranks

    @property
    def size(self) -> int:
        """N, all ranks."""
        return self.ranks * self.groups

    def step_us(self, nbytes: float) -> float:
        """Return the time of a step in which each rank sends this number of bytes to one rank of each other group."""
        return self.network.step_us(self.groups - 1, nbytes)


@dataclass(frozen=True)
class Cost:
    """The time of one piece of a call, in microseconds."""

    alone_us: float
    later_us: float
    """The additional time of the call for one more piece."""

    @classmethod
    def of(cls, group_us: float, network_us: float) -> Cost:
        """Return the cost of a piece with these times on both levels.

        A later piece takes as long as the slower level.
        """
        return cls(group_us + network_us, max(group_us, network_us))


Schedule = Callable[[System, float], float]
"""The time of a call with this number of bytes."""


@dataclass(frozen=True)
class Prediction:
    """A predicted time and its schedule."""

    time_us: float
    schedule: str


def allreduce_one_step(s: System, n: float) -> Cost:
    """All-reduce in the group; each rank sends the whole result along its rail: T + alpha + (G - 1) * n / beta."""
    return Cost.of(s.group.us("allreduce", n), s.step_us(n))


def allreduce_two_steps(s: System, n: float) -> Cost:
    """Reduce-scatter in the group, then along the rail; all-gather along the rail, then in the group.

    A shard is n / L, and each rank of a rail reduces 1 / G of it: 2 * (alpha + (G - 1) * n / (L * G) / beta).
    """
    in_group_us = s.group.us("reduce_scatter", n) + s.group.us("allgather", n)
    return Cost.of(in_group_us, 2 * s.step_us(n / s.size))


def bcast_one_step(s: System, n: float) -> Cost:
    """The root sends all data along its rail, through only its card; each group broadcasts."""
    return Cost.of(s.group.us("bcast", n), s.step_us(n))


def bcast_by_rails(s: System, n: float) -> Cost:
    """The root's group broadcasts; its cards send parts of their shards, n / L, to the other groups, which gather.

    The other groups exchange their parts along the rails. Meanwhile the cards of the root's group send the parts of the
    next piece. All cards carry n / L for each piece.
    """
    part = n / s.ranks / (s.groups - 1)
    root_us, others_us, sent_us = s.group.us("bcast", n), s.group.us("allgather", n), s.step_us(part)
    exchanged_us = s.network.step_us(s.groups - 2, part)
    return Cost(root_us + sent_us + exchanged_us + others_us, max(root_us, sent_us, others_us))


def reduce(s: System, n: float) -> Cost:
    """Reduce-scatter in each group; each rail brings its shards, n / L, to the root's group, which gathers."""
    return Cost.of(s.group.us("reduce_scatter", n) + s.group.us("gather", n), s.step_us(n / s.ranks))


def alltoall(s: System, n: float) -> Cost:
    """Every rank sends a block, n / N, straight to all L * (G - 1) ranks of other groups, and in its group."""
    return Cost.of(s.group.us("alltoall", n / s.groups), s.step_us(s.ranks * n / s.size))


def gather(s: System, n: float) -> Cost:
    """The ranks of other groups send their blocks straight to the root's card; the root's group gathers."""
    return Cost.of(s.group.us("gather", n / s.groups), s.step_us(s.ranks * n / s.size))


def scatter(s: System, n: float) -> Cost:
    """The root's card sends the blocks to the ranks of other groups; the root's group scatters."""
    return Cost.of(s.group.us("scatter", n / s.groups), s.step_us(s.ranks * n / s.size))


def allgather(s: System, n: float) -> float:
    """Each rank sends its block, n / N, along its rail; the group gathers its own blocks, then the others' blocks.

    It takes k groups at once, as many as have blocks for a piece. While it works on some groups, the network carries
    the next: max(T(n / G), W) + ((G - 1) / k - 1) * max(K, W) + K, with W = alpha + k * n / N / beta and K = T(k * n /
    G). If k is more than 1, K also has the time in which a GPU brings the blocks from packed memory to their places.
    """
    return _by_groups(s, "allgather", n, PIECE_NBYTES)


def reduce_scatter(s: System, n: float) -> float:
    """The mirror image of the all-gather: the group reduces and sends the blocks of other groups, then reduces its own.

    Blocks are shorter, because scratch memory holds the partial results of all groups.
    """
    return _by_groups(s, "reduce_scatter", n, PIECE_NBYTES / max(s.ranks, s.groups))


def _by_groups(s: System, collective: str, n: float, block_nbytes: float) -> float:
    """Return the time of parts, one after the other, that have at most this number of bytes of each block."""
    part = min(n, block_nbytes * s.size)
    at_once = domains_at_once(part / s.groups, s.groups)
    own_us, some_us = (s.group.us(collective, count * part / s.groups) for count in (1, at_once))
    if at_once > 1:
        some_us += PACKING.step_us(at_once, part / s.groups)
    network_us = s.network.step_us(at_once, part / s.size)
    slower_us = max(some_us, network_us)
    spared_us = (slower_us - max(own_us, network_us)) + (slower_us - some_us)  # by the first step and by the last one
    return n / part * (((s.groups - 1) / at_once + 1) * slower_us - spared_us)


def cut(cost: Callable[[System, float], Cost], piece_of: Callable[[float], float] = lambda n: PIECE_NBYTES) -> Schedule:
    """Return the time of a schedule that cuts calls into pieces of at most ``piece_of(n)`` bytes.

    A last piece that is shorter counts for its share.
    """

    def time_us(system: System, n: float) -> float:
        piece = min(n, piece_of(n))
        of_piece = cost(system, piece)
        return of_piece.alone_us + (n / piece - 1) * of_piece.later_us

    return time_us


SCHEDULES: dict[str, dict[str, Schedule]] = {
    "allreduce": {"one step": cut(allreduce_one_step), "two steps": cut(allreduce_two_steps)},
    "allgather": {"rails": allgather},
    "reduce_scatter": {"rails": reduce_scatter},
    "bcast": {"one step": cut(bcast_one_step), "rails": cut(bcast_by_rails, pipelined_piece)},
    "reduce": {"rails": cut(reduce)},
    "alltoall": {"straight": cut(alltoall)},
    "gather": {"straight": cut(gather)},
    "scatter": {"straight": cut(scatter)},
}
"""The time of each schedule, by collective and name."""


def predict(system: System, collective: str, nbytes: float) -> Prediction:
    """Return the time of the fastest schedule. For a single group, return the measured time of the group.

    Raises `InvalidUsageError` for a collective without schedules or without measured times.
    """
    if collective not in SCHEDULES:
        raise InvalidUsageError(f"--model has no schedule of {collective}: use one of {', '.join(SCHEDULES)}")
    if system.groups == 1:
        return Prediction(system.group.us(collective, nbytes), "one peer domain")
    found = [Prediction(time_us(system, nbytes), name) for name, time_us in SCHEDULES[collective].items()]
    return min(found, key=lambda prediction: prediction.time_us)
