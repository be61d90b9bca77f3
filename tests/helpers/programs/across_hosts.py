"""`python -m tests.helpers.programs.across_hosts RESULTS PLACEMENT`: checks of a Communicator over several hosts.

PLACEMENT is the host of each rank, as in `0,0,1,1`. Each rank writes a line of JSON per check into a file of RESULTS.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.wire import CODED, CODES
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.inputs.communicator_calls import FORMS, MOVEMENTS, OF_ONE_TYPE, REDUCTIONS, Case, Prepared, legal_ops
from tests.helpers.references.reductions import OWN, dtype_named
from tests.helpers.rigs.call_forms import complete
from tests.helpers.rigs.communicators import array_module, communicator, node_ranks, require_memory_works
from tests.helpers.rigs.topologies import CALLS, TOPOLOGIES, NeighborCall, result_of_mpi

COUNTS = (1, 1025, 300_000)
"""Numbers of elements: one packet, several, and more than one chunk of any engine."""
MESSAGE_NBYTES = 1 << 20


class Ranks:
    """A Communicator over the hosts of ``placement``, on one rank."""

    def __init__(self, placement: list[int], device: str = "cpu") -> None:
        self.placement = placement
        self.comm = communicator(device)
        self.here = placement[self.comm.rank]
        self.local = [rank for rank, host in enumerate(placement) if host == self.here]
        """The ranks of this host."""

    def pairs(self) -> Iterator[tuple[int, int]]:
        """All pairs of a sender and a receiver, in the same order on all ranks."""
        return itertools.permutations(range(self.comm.size), 2)


def apart(ranks: Ranks) -> None:
    """Two hosts share no name and no memory, and a message between them takes the network."""
    comm = ranks.comm
    assert socket.gethostname() == f"host{ranks.here}"
    mark = Path(f"/dev/shm/rank-{comm.rank}")
    mark.touch()
    comm.Barrier()
    marks = sorted(path.name for path in mark.parent.glob("rank-*"))
    comm.Barrier()
    mark.unlink()
    assert marks == [f"rank-{rank}" for rank in ranks.local]
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "uts", "ipc", "mnt", "pid")]
    for rank, others in enumerate(MPI.COMM_WORLD.allgather(namespaces)):
        same = [mine == other for mine, other in zip(namespaces, others, strict=True)]
        assert same == [ranks.placement[rank] == ranks.here] * len(same)

    data = np.zeros(MESSAGE_NBYTES, np.uint8)
    for sender, receiver in ranks.pairs():
        comm.Barrier()
        before = _sent_nbytes()
        MPI.COMM_WORLD.Barrier()
        if comm.rank == sender:
            comm.Send(data, receiver)
        elif comm.rank == receiver:
            comm.Recv(data, sender)
        MPI.COMM_WORLD.Barrier()
        if comm.rank == sender:
            takes_network = ranks.placement[receiver] != ranks.here
            assert (_sent_nbytes() - before > MESSAGE_NBYTES // 2) == takes_network


def _sent_nbytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def nodes(ranks: Ranks) -> None:
    """The communicator finds the hosts, and the ranks on each."""
    comm = ranks.comm
    assert comm.num_nodes == len(set(ranks.placement))
    assert comm.local_size == len(ranks.local)
    assert comm.local_rank == ranks.local.index(comm.rank)
    found = comm.describe()
    assert (found.host, found.node) == (f"host{ranks.here}", ranks.here)
    assert [link.path == "other node" for link in found.links] == [host != ranks.here for host in ranks.placement]


def symmetric(ranks: Ranks) -> None:
    """A SymmetricArray is open between the ranks of a host, and refuses others."""
    comm = ranks.comm
    require_memory_works(comm)
    with comm.zeros(5) as array:
        assert node_ranks(array) == ranks.local
        for peer in set(range(comm.size)) - set(ranks.local):
            try:
                array.peer(peer)
            except mpicomm.InvalidUsageError as error:
                assert "is on another node" in str(error)
            else:
                raise AssertionError(f"rank {peer} of another host can be reached")
        following = ranks.local[(comm.local_rank + 1) % comm.local_size]
        previous = ranks.local[comm.local_rank - 1]
        array.peer(following)[...] = comm.rank
        array.signal(following)
        array.wait_signal(previous)
        assert (array.local == previous).all()


def children(ranks: Ranks) -> None:
    """Communicators of all ranks, of ranks of several hosts and of one host know where they are, and work."""
    comm, placement = ranks.comm, ranks.placement
    of_a_host = (ranks.here, ranks.local)
    first_of_hosts = [placement.index(host) for host in sorted(set(placement))]
    firsts = (0, first_of_hosts) if comm.rank in first_of_hosts else (1, [])
    everyone = list(range(comm.size))
    for (color, members), order in itertools.product(((0, everyone), of_a_host, firsts), (1, -1)):
        child: Any = comm.Split(color if members else MPI.UNDEFINED, order * comm.rank)
        if child == MPI.COMM_NULL:
            continue
        with child:
            assert child.num_nodes == len({placement[rank] for rank in members})
            assert child.local_size == len(set(members) & set(ranks.local))
            require_memory_works(child)
            run(child, "run", [Case(name, np.dtype(np.float64), 1025) for name in OF_ONE_TYPE])
    with comm.Dup() as copy:
        assert (copy.num_nodes, copy.local_size) == (comm.num_nodes, comm.local_size)
        require_memory_works(copy)


def run(comm: mpicomm.Communicator, way: str, cases: list[Case]) -> None:
    """Run calls one after the other: blocking, nonblocking or persistent, as the method of `Prepared` says."""
    with array_module(comm) as xp:
        for case in cases:
            prepared = Prepared(case, comm.rank, comm.size, xp)
            complete(getattr(prepared, way)(comm))
            comm.check()
            prepared.check()


def every_form(ranks: Ranks, operation: str) -> None:
    """Every form of argument, every way to call, every root."""
    row, comm = OPERATIONS[operation], ranks.comm
    roots = range(comm.size) if row.rooted else [0]
    places = (False,) if operation == "Bcast" else (False, True)
    for way in ("run", "start", "prepare"):
        choices = itertools.product(FORMS, roots, places, (0, 1025))
        run(
            comm,
            way,
            [
                Case(operation, np.dtype(np.float32), count, "sum", root, form, in_place, seed=seed)
                for seed, (form, root, in_place, count) in enumerate(choices)
            ],
        )


def every_type(ranks: Ranks, name: str) -> None:
    """Every collective, and every reduction that the type has."""
    dtype, root = dtype_named(name), ranks.comm.size - 1
    # The expressions among the operations do not associate, so MPI may give any of several results over two hosts.
    ops = [op for op in legal_ops(name) if op not in OWN]
    calls = [*itertools.product(REDUCTIONS, ops), *((operation, "sum") for operation in MOVEMENTS)]
    run(ranks.comm, "run", [Case(operation, dtype, 1025, op, root) for operation, op in calls])
    if name in CODED:
        coded = [row.name for row in OPERATIONS.values() if row.coded]
        run(ranks.comm, "run", [Case(operation, dtype, 1025, wire=codes) for operation in coded for codes in CODES])


def every_size(ranks: Ranks) -> None:
    """Few elements and many."""
    dtype, root = np.dtype(np.float64), ranks.comm.size - 1
    choices = itertools.product(COUNTS, OF_ONE_TYPE)
    run(ranks.comm, "run", [Case(operation, dtype, count, root=root) for count, operation in choices])


def neighbors(ranks: Ranks) -> None:
    """Collectives of neighbours give the results of MPI's calls on its own communicator."""
    with array_module(ranks.comm) as xp:
        for topology, name in itertools.product(TOPOLOGIES, CALLS):
            made: Any = TOPOLOGIES[topology](ranks.comm)
            call = NeighborCall(name, made)
            sent, received = xp.asarray(call.sent(0)), xp.asarray(call.nothing())
            getattr(made, f"Neighbor_{call.name}")(*call.arguments(sent, received))
            made.check()
            np.testing.assert_array_equal(received, result_of_mpi(made, call, 0))
            call.free()
            made.Free()


def alltoallw(ranks: Ranks) -> None:
    """Each pair of ranks has another element type."""
    comm = ranks.comm
    dtypes = [np.dtype(("int16", "int32", "float64")[(comm.rank + peer) % 3]) for peer in range(comm.size)]
    types = [MPI.Datatype.fromcode(dtype.char) for dtype in dtypes]
    ones, places = [1] * comm.size, [8 * peer for peer in range(comm.size)]
    with array_module(comm) as xp:
        send, receive = Placed(xp, np.zeros(8 * comm.size, np.uint8)), Placed(xp, np.zeros(8 * comm.size, np.uint8))
        content, expected = np.zeros(8 * comm.size, np.uint8), np.zeros(8 * comm.size, np.uint8)
        for peer, (dtype, place) in enumerate(zip(dtypes, places, strict=True)):
            content[place:].view(dtype)[0] = 100 * comm.rank + peer
            expected[place:].view(dtype)[0] = 100 * peer + comm.rank
        send.set(content)
        comm.Alltoallw([send.array, ones, places, types], [receive.array, ones, places, types])
        comm.check()
        assert receive.get().tolist() == expected.tolist()


def barrier(ranks: Ranks) -> None:
    """No rank leaves before the last one has come, in any order of the ranks."""
    comm = ranks.comm
    for late, wait in itertools.product(range(comm.size), (comm.Barrier, lambda: comm.Ibarrier().Wait())):
        time.sleep(0.02 if comm.rank == late else 0.0)
        come = time.monotonic()  # the hosts have one kernel, and so one clock
        wait()
        times = MPI.COMM_WORLD.allgather((come, time.monotonic()))
        assert max(come for come, _ in times) <= min(gone for _, gone in times)


def messages(ranks: Ranks) -> None:
    """Each rank sends to each, small and large, in several ways to send and to receive."""
    comm, status = ranks.comm, MPI.Status()
    with array_module(comm) as xp:
        for (sender, receiver), count in itertools.product(ranks.pairs(), (0, 1, 1025, 300_000)):
            content = values(np.dtype(np.float64), count, sender, receiver, wild=True)
            tag = 10 * sender + receiver
            if comm.rank == sender:
                data = Placed(xp, content)
                comm.Send(data.array, receiver, tag)
                comm.Isend(data.array, receiver, tag).Wait()
                comm.Ssend(data.array, receiver, tag)
            elif comm.rank == receiver:
                rooms = [Placed(xp, np.zeros(count, np.float64)) for _ in range(3)]
                comm.Recv(rooms[0].array, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                comm.Irecv(rooms[1].array, sender, tag).Wait()
                comm.Probe(sender, tag)
                comm.Recv(rooms[2].array, sender, tag)
                comm.check()
                assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (sender, tag, count)
                assert [room.get().tobytes() for room in rooms] == [content.tobytes()] * 3
            comm.Barrier()
        for distance, count in itertools.product(range(1, comm.size), (3, 300_000)):
            right, left = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
            data = Placed(xp, np.full(count, comm.rank, np.float64))
            room = Placed(xp, np.zeros(count, np.float64))
            comm.Sendrecv(data.array, right, 7, room.array, left, 7)
            comm.check()
            assert (room.get() == left).all()


CHECKS: dict[str, Callable[[Ranks], None]] = {
    "apart": apart,
    "nodes": nodes,
    "symmetric": symmetric,
    "children": children,
    **{f"every form: {name}": partial(every_form, operation=name) for name in OF_ONE_TYPE},
    **{f"every call: {name}": partial(every_type, name=name) for name in COVERED},
    "every size": every_size,
    "neighbors": neighbors,
    "alltoallw": alltoallw,
    "barrier": barrier,
    "messages": messages,
}


def main(results: Path, placement: list[int]) -> None:
    """Run all checks."""
    ranks = Ranks(placement)
    with (results / f"rank-{ranks.comm.rank}").open("w", buffering=1) as file:
        for name, check in CHECKS.items():
            try:
                check(ranks)
            except Exception:
                file.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise  # otherwise ranks that failed would not meet the others in the next check
            file.write(json.dumps([name, ""]) + "\n")
    ranks.comm.Free()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(host) for host in sys.argv[2].split(",")])
