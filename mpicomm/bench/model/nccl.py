"""The times of NCCL's ring and tree over several groups, by the same model.

The part in a group is NCCL's own measured time there, from runs with ``--compare nccl``. Sources:

* Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
  and Distributed Computing 69 (2009): 2 (N - 1) steps, in each of which every rank sends n / N bytes.
* Tree: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
  Computing 35 (2009): two trees, each for half of the data, in pieces.
* NCCL's own numbers of steps, src/graph/tuning.cc: a ring crosses the network 2 (G - 1) times, a tree 2 log2(G) times.

The L network cards of a group carry L rings or trees, so that a card has 1 / L of the data. Switches that reduce, and
NCCL's other algorithms, are not in the model.
"""

from __future__ import annotations

from mpicomm.bench.model.schedules import System

ROUNDS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1, "bcast": 1, "reduce": 1}
"""How often the data go round the ring."""
PIPELINED = ("bcast", "reduce")
"""The collectives whose ring is a chain: it carries all data through each rank, from the root or to it."""


def ring_us(system: System, collective: str, nbytes: float) -> float | None:
    """Return the predicted time of NCCL's ring; None where NCCL has no ring or was not measured.

    latency = launch + G * (hops of one group) + rounds * (G - 1) * alpha
    transfer = rounds * (N - 1) / N * n / L / beta, or that of the group if it is longer

    Launch is the smallest call of mpicomm in the group, and the hops of a group are NCCL's smallest call less the
    launch. A chain pays alpha for each piece that it is cut into: `Network.chain_us`.
    """
    nccl = system.group.nccl_times(collective)
    if collective not in ROUNDS or nccl is None:
        return None
    if system.groups == 1:
        return nccl.at(nbytes)
    rounds, network, crossings = ROUNDS[collective], system.network, system.groups - 1
    launch_us = system.group.times(collective).latency_us
    latency_us = launch_us + system.groups * max(0.0, nccl.latency_us - launch_us)
    in_group_us = nccl.at(nbytes) - nccl.latency_us
    if collective in PIPELINED:
        return latency_us + max(network.chain_us(crossings, nbytes / system.ranks), in_group_us)
    sent = rounds * (system.size - 1) / system.size * nbytes / system.ranks
    return latency_us + rounds * crossings * network.latency_us + max(network.transfer_us(sent), in_group_us)


def tree_us(system: System, collective: str, nbytes: float) -> float | None:
    """Return the predicted time of NCCL's two trees; None but for an all-reduce, or where NCCL was not measured.

    latency = NCCL's smallest call in the group, in which data go along the group's ranks and back
    network = a chain of 2 * ceil(log2(G)) steps, or the transfer in the group if it is longer

    Each card sends and receives 2 * n / L bytes: half of the data up and down as an inner node of one tree, and as much
    as a leaf of the other and to the second child.
    """
    nccl = system.group.nccl_times(collective)
    if collective != "allreduce" or nccl is None:
        return None
    if system.groups == 1:
        return nccl.at(nbytes)
    depth = (system.groups - 1).bit_length()  # log2, rounded up
    network_us = system.network.chain_us(2 * depth, 2 * nbytes / system.ranks)
    return nccl.latency_us + max(network_us, nccl.at(nbytes) - nccl.latency_us)
