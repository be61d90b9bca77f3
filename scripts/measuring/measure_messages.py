"""Measure messages of GPU arrays between two ranks.

Run `mpiexec -n 2 python scripts/measuring/measure_messages.py [--json FILE]`. Each way has its line. *MPI matches* is
`Send` and `Recv`. *stream order* is the same with ``algorithm="stream"``, so that kernels match. *by hand* copies to
NumPy arrays, sends the arrays with mpi4py, and copies back. Times are microseconds, and medians of the slower rank:

- issue: the host's time in `Send`, and in `Recv` of messages that MPI has already received.
- one way: half of the time of a message to the other rank and one back, of many in a row.
- exchange: both ranks `Sendrecv` at once, many in a row.
- nonblocking: both ranks `Irecv`, `Isend` and wait for both, many in a row. The data is in place after each wait.

The script checks the received data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from in_turns import median_us
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, measuring_parser

import mpicomm
from mpicomm.sizes import format_size, nbytes_of

WORLD = MPI.COMM_WORLD
RANK, PEER = WORLD.rank, 1 - WORLD.rank
COLUMNS = ["size", "way", "Send, issue", "Recv, issue", "one way", "exchange", "nonblocking"]
Exchange = Callable[[Any, Any], None]
Way = tuple[Callable[[Any], None], Callable[[Any], None], Exchange, Exchange | None]


def ways(comm: mpicomm.Communicator, nbytes: int) -> dict[str, Way]:
    """Return `Send`, `Recv` and `Sendrecv` of each way, and `Irecv` with `Isend`, which stream order lacks."""
    there, back = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def send_by_hand(array: Any) -> None:
        array.get(out=there)
        WORLD.Send(there, PEER)

    def receive_by_hand(array: Any) -> None:
        WORLD.Recv(back, PEER)
        array.set(back)

    def exchange_by_hand(sent: Any, received: Any) -> None:
        sent.get(out=there)
        WORLD.Sendrecv(there, PEER, 0, back, PEER)
        received.set(back)

    def start_and_wait(comm: MPI.Intracomm, sent: Any, received: Any) -> None:
        MPI.Request.Waitall([comm.Irecv(received, PEER), comm.Isend(sent, PEER)])

    def start_by_hand(sent: Any, received: Any) -> None:
        sent.get(out=there)
        start_and_wait(WORLD, there, back)
        received.set(back)

    return {
        "MPI matches": (
            lambda array: comm.Send(array, PEER),
            lambda array: comm.Recv(array, PEER),
            lambda sent, received: comm.Sendrecv(sent, PEER, 0, received, PEER),
            partial(start_and_wait, comm),
        ),
        "stream order": (
            lambda array: comm.Send(array, PEER, algorithm="stream"),
            lambda array: comm.Recv(array, PEER, algorithm="stream"),
            lambda sent, received: comm.Sendrecv(sent, PEER, 0, received, PEER, algorithm="stream"),
            None,
        ),
        "by hand": (send_by_hand, receive_by_hand, exchange_by_hand, start_by_hand),
    }


def issue(way: Way, sent: Any, received: Any, count: int, rounds: int) -> tuple[float, float]:
    """Return the host's microseconds in a send and in a receive; the messages go from rank 0 to rank 1."""
    send, receive, *_ = way
    sends, receives = [], []
    for _ in range(rounds):
        cupy.cuda.Device().synchronize()
        WORLD.Barrier()
        start = time.perf_counter()
        if RANK == 0:
            for _ in range(count):
                send(sent)
            sends.append((time.perf_counter() - start) / count)
            WORLD.Barrier()
        else:
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(count):
                receive(received)
            receives.append((time.perf_counter() - start) / count)
    mine = 1e6 * statistics.median(sends or receives)
    first, second = WORLD.allgather(mine)
    return first, second


def measure(name: str, way: Way, nbytes: int, count: int, rounds: int) -> list[Any]:
    """Return the row of one way at one size."""
    send, receive, exchange, start = way
    sent = cupy.random.default_rng(17 + RANK).integers(0, 256, nbytes, cupy.uint8)
    expected = cupy.random.default_rng(17 + PEER).integers(0, 256, nbytes, cupy.uint8)
    received = cupy.full(nbytes, 0xDB, cupy.uint8)

    def there_and_back() -> None:
        for _ in range(count):
            if RANK == 0:
                send(sent)
                receive(received)
            else:
                receive(received)
                send(sent)

    def all_of(exchange: Exchange) -> None:
        for _ in range(count):
            exchange(sent, received)

    finish = cupy.cuda.Device().synchronize
    one_way = median_us(there_and_back, rounds, finish) / 2 / count
    both = median_us(partial(all_of, exchange), rounds, finish) / count
    started = None if start is None else median_us(partial(all_of, start), rounds, finish) / count
    sending = receiving = None
    if name != "by hand":  # MPI's sends of much data block until the receive has begun
        # In stream order a send of much data waits for the receive, so few are in flight.
        in_flight = max(1, min(count, (8 << 20) // nbytes))
        sending, receiving = issue(way, sent, received, in_flight, 5 * rounds)
    cupy.cuda.Device().synchronize()
    if not WORLD.allreduce(bool((received == expected).all()), MPI.LAND):
        raise SystemExit(f"{name}, {nbytes} bytes: wrong data")
    return [format_size(nbytes), name, sending, receiving, one_way, both, started]


def main() -> None:
    """Measure, and print on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--sizes", default="8,1K,16K,64K,256K,1M,4M,16M")
    parser.add_argument("--count", type=int, default=50, help="messages in a row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="ways, separated by commas")
    options = parser.parse_args()
    if WORLD.size != 2:
        raise SystemExit("messages are measured between two ranks: mpiexec -n 2")
    text = (
        "Times of `Send` and `Recv` of CuPy arrays are us. *MPI matches* and *stream order* are ways of mpicomm. "
        "*by hand* copies to the host and back around mpi4py's calls."
    )
    title, only = "Messages of GPU arrays, 2 ranks", [name for name in options.only.split(",") if name]
    with (
        mpicomm.Communicator(WORLD) as comm,
        Sheet(comm, options, title, COLUMNS, digits=1, group="Messages", text=text) as sheet,
    ):
        for size in options.sizes.split(","):
            for name, way in ways(comm, nbytes_of(size)).items():
                if not only or name in only:
                    sheet.add(*measure(name, way, nbytes_of(size), options.count, options.rounds))
                    comm.check()


main()
