"""The times of NCCL's ring and tree over several groups, by the same model.

The part in a group is NCCL's own measured time there, from runs with ``--compare nccl``. Sources:

* Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
  and Distributed Computing 69 (2009): 2 (N - 1) steps, and in each step every rank sends n / N bytes.
* Tree: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
  Computing 35 (2009): two trees, each for half of the data, in pieces.
* NCCL's own numbers of steps, src/graph/tuning.cc: a ring crosses the network 2 (G - 1) times, a tree 2 log2(G) times.

The L network cards of a group carry L rings or trees, so that a card has 1 / L of the data. The model leaves out
switches that reduce, and NCCL's other algorithms.
"""

from __future__ import annotations

from mpicomm.bench.model.schedules import System

ROUNDS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1, "bcast": 1, "reduce": 1}
"""The number of times that the data goes round the ring."""
PIPELINED = ("bcast", "reduce")
"""The collectives with a chain as their ring: it carries all data through each rank, from the root or to the root."""


def ring_us(system: System, collective: str, nbytes: float) -> float | None:
    """Return the predicted time of NCCL's ring, or None if NCCL has no ring or was not measured.

        latency = launch + G * (hops of one group) + rounds * (G - 1) * alpha
        transfer = rounds * (N - 1) / N * n / L / beta, or the transfer of the group if it is longer

    Launch is the smallest call of mpicomm in the group. The hops of a group are NCCL's smallest call less the launch. A
    chain pays alpha for each of its pieces: `Network.chain_us`.
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
    """Return the predicted time of NCCL's two trees, or None without NCCL's times or for another collective.

        latency = NCCL's smallest call in the group, in which data goes along the group's ranks and back
        network = a chain of 2 * ceil(log2(G)) steps, or the transfer in the group if it is longer

    Each card sends and receives 2 * n / L bytes. An inner node of one tree carries half of the data up and down. As a
    leaf of the other tree and for the second child it carries as much.
    """
    nccl = system.group.nccl_times(collective)
    if collective != "allreduce" or nccl is None:
        return None
    if system.groups == 1:
        return nccl.at(nbytes)
    depth = (system.groups - 1).bit_length()  # log2, rounded up
    network_us = system.network.chain_us(2 * depth, 2 * nbytes / system.ranks)
    return nccl.latency_us + max(network_us, nccl.at(nbytes) - nccl.latency_us)
