"""The cost of mpicomm's collectives over several groups: one function for each schedule of two levels.

In the formulae L is the ranks of a group, G the groups, N = L * G, n the bytes of the largest buffer of a rank, as the
bench counts sizes, and T(n) a measured time of one group. A *rail* is made of the ranks with the same number in their
groups. Each rank has its own network card. What the model leaves out: the time in which a GPU reduces what has come
from other groups, the time in which a host starts a network step, and floats of 16 bits, which cross the network as
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpicomm.bench.model.group import Group
from mpicomm.bench.model.network import Network
from mpicomm.errors import InvalidUsageError
from mpicomm.internode.schedules import PIECE_NBYTES


@dataclass(frozen=True)
class System:
    """``groups`` groups, each like ``group``, with ``network`` between them."""

    group: Group
    groups: int
    network: Network

    @property
    def ranks(self) -> int:
        """L."""
        return self.group.ranks

    @property
    def size(self) -> int:
        """N."""
        return self.ranks * self.groups

    def step_us(self, nbytes: float) -> float:
        """Return the time of a step in which each rank sends so many bytes to one rank of each other group."""
        return self.network.step_us(self.groups - 1, nbytes)


@dataclass(frozen=True)
class Cost:
    """The time that one piece of a call takes on each level, in microseconds."""

    group_us: float
    network_us: float


@dataclass(frozen=True)
class Prediction:
    """A predicted time and the schedule that it is of."""

    time_us: float
    schedule: str


def allreduce_one_step(s: System, n: float) -> Cost:
    """All-reduce in the group; each rank sends that whole result along its rail: T + alpha + (G - 1) * n / beta."""
    return Cost(s.group.us("allreduce", n), s.step_us(n))


def allreduce_two_steps(s: System, n: float) -> Cost:
    """Reduce-scatter in the group, then along the rail; all-gather along the rail, then in the group.

    A shard is n / L and each rank of a rail reduces 1 / G of it: 2 * (alpha + (G - 1) * n / (L * G) / beta).
    """
    in_group_us = s.group.us("reduce_scatter", n) + s.group.us("allgather", n)
    return Cost(in_group_us, 2 * s.step_us(n / s.size))


def allgather(s: System, n: float) -> Cost:
    """Each rank sends its block, n / N, along its rail; the group then gathers the blocks of each group in turn."""
    return Cost(s.groups * s.group.us("allgather", n / s.groups), s.step_us(n / s.size))


def reduce_scatter(s: System, n: float) -> Cost:
    """The group reduces the blocks of each group in turn; each rank sends blocks of n / N along its rail."""
    return Cost(s.groups * s.group.us("reduce_scatter", n / s.groups), s.step_us(n / s.size))


def bcast_one_step(s: System, n: float) -> Cost:
    """The root sends all along its rail, through its card alone; each group broadcasts."""
    return Cost(s.group.us("bcast", n), s.step_us(n))


def bcast_two_steps(s: System, n: float) -> Cost:
    """The root scatters shards, n / L, in its group; a card sends a part of its shard to each other group; they gather.

    The other groups exchange their parts along the rails: a second network step, if there are two or more.
    """
    part = n / s.ranks / (s.groups - 1)
    exchanged_us = s.network.step_us(s.groups - 2, part) if s.groups > 2 else 0.0
    return Cost(s.group.us("scatter", n) + s.group.us("allgather", n), s.step_us(part) + exchanged_us)


def reduce(s: System, n: float) -> Cost:
    """Reduce-scatter in each group; each rail brings its shards, n / L, to the root's group, which gathers."""
    return Cost(s.group.us("reduce_scatter", n) + s.group.us("gather", n), s.step_us(n / s.ranks))


def alltoall(s: System, n: float) -> Cost:
    """Every rank sends a block, n / N, straight to each of the L * (G - 1) ranks of other groups and in its group."""
    return Cost(s.group.us("alltoall", n / s.groups), s.step_us(s.ranks * n / s.size))


def gather(s: System, n: float) -> Cost:
    """The ranks of other groups send their blocks straight to the root's card; the root's group gathers."""
    return Cost(s.group.us("gather", n / s.groups), s.step_us(s.ranks * n / s.size))


def scatter(s: System, n: float) -> Cost:
    """The root's card sends the blocks to the ranks of other groups; the root's group scatters."""
    return Cost(s.group.us("scatter", n / s.groups), s.step_us(s.ranks * n / s.size))


SCHEDULES: dict[str, dict[str, Callable[[System, float], Cost]]] = {
    "allreduce": {"one step": allreduce_one_step, "two steps": allreduce_two_steps},
    "allgather": {"rails": allgather},
    "reduce_scatter": {"rails": reduce_scatter},
    "bcast": {"one step": bcast_one_step, "two steps": bcast_two_steps},
    "reduce": {"rails": reduce},
    "alltoall": {"straight": alltoall},
    "gather": {"straight": gather},
    "scatter": {"straight": scatter},
}
"""The schedules by collective and name."""


def predict(system: System, collective: str, nbytes: float) -> Prediction:
    """Return the time of the fastest schedule; with one group, the measured time of the group.

    Raises `InvalidUsageError` for a collective without schedules or without measured times.
    """
    if collective not in SCHEDULES:
        raise InvalidUsageError(f"--model has no schedule of {collective}: use one of {', '.join(SCHEDULES)}")
    if system.groups == 1:
        return Prediction(system.group.us(collective, nbytes), "one group")
    found = [Prediction(in_pieces(schedule, system, nbytes), name) for name, schedule in SCHEDULES[collective].items()]
    return min(found, key=lambda prediction: prediction.time_us)


def in_pieces(schedule: Callable[[System, float], Cost], system: System, nbytes: float) -> float:
    """Return the time of all pieces: the first fills both levels, each later one takes as long as the slower level.

    A last piece that is shorter counts for its share.
    """
    piece = min(nbytes, PIECE_NBYTES)
    cost = schedule(system, piece)
    later = nbytes / piece - 1
    return cost.group_us + cost.network_us + later * max(cost.group_us, cost.network_us)
