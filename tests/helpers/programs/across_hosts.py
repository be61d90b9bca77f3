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
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.wire import WIRE_DTYPES
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, REDUCTIONS, Case, Prepared
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.communicators import array_module, communicator, complete, node_ranks, require_memory_works

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


def memory(ranks: Ranks) -> None:
    """Ranks of a host open their memory to each other, also in communicators of all ranks and of a host."""
    comm, hosts = ranks.comm, len(set(ranks.placement))
    require_memory_works(comm)
    with comm.zeros(5) as array:
        assert node_ranks(array) == ranks.local
    for color, num_nodes in ((0, hosts), (ranks.here, 1)):
        child = comm.Split(color, -comm.rank)
        assert isinstance(child, mpicomm.Communicator)
        with child:
            assert (child.num_nodes, child.local_size) == (num_nodes, len(ranks.local))
            require_memory_works(child)
            run(child, "run", [Case(name, np.dtype(np.float64), 1025) for name in OF_ONE_TYPE])


def run(comm: mpicomm.Communicator, way: str, cases: list[Case]) -> None:
    """Run calls one after the other: blocking, nonblocking or persistent, as the method of `Prepared` says."""
    with array_module(comm) as xp:
        for case in cases:
            prepared = Prepared(case, comm.rank, comm.size, xp)
            complete(getattr(prepared, way)(comm))
            comm.check()
            prepared.check()


def collectives(ranks: Ranks) -> None:
    """Every collective with few elements and many, and in each way to call it.

    MPI carries out those of its own types. The narrow floats, and averages of them, are mpicomm's.
    """
    root, narrow = ranks.comm.size - 1, dtype_named("float16")
    for way, count in (*(("run", count) for count in COUNTS), ("start", 1025), ("prepare", 1025)):
        cases = [Case(name, np.dtype(np.float64), count, root=root) for name in OF_ONE_TYPE]
        cases += [Case(name, narrow, count, "avg" if name in REDUCTIONS else "sum", root) for name in OF_ONE_TYPE]
        run(ranks.comm, way, cases)
    names = [row.name for row in OPERATIONS.values() if row.quantizable]
    run(
        ranks.comm, "run", [Case(name, np.dtype(np.float32), 1025, wire=wire) for name in names for wire in WIRE_DTYPES]
    )


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


CHECKS: dict[str, Callable[[Ranks], None]] = {
    "apart": apart,
    "nodes": nodes,
    "memory": memory,
    "collectives": collectives,
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
