"""The crossover: the bytes from which mapped memory is faster than MPI for collectives between two ranks.

It is 256 KiB if the cores of both ranks share a cache, and some MiB if the data passes from one cache to another. So
two processes measure it once, when they first use mapped memory. All communicators of the two processes use the same
crossover. Either both processes know it or neither does. The choice changes no result, because a sum of two numbers has
one order. Between more ranks it could change results, so their sizes are fixed: see `selection`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.host.one_node import OneNode
from mpicomm.collectives.operations import ALLREDUCE
from mpicomm.log import logger
from mpicomm.sizes import format_size

Array = npt.NDArray[Any]

_SIZES = tuple((256 << 10) << step for step in range(5))  # 256 KiB to 4 MiB
_ROUNDS = 4
_GAIN = 1.05
"""The least gain for mapped memory, because its code is in the cache here, but not at a call in a program."""

Processes = frozenset[tuple[str, int]]
"""The hosts and the numbers of the two processes."""

_allreduce = MPI.Intracomm.Allreduce
_known: dict[Processes, int] = {}


def known(processes: Processes) -> int:
    """Return the crossover that two processes have measured; 0 before that. Local."""
    return _known.get(processes, 0)


def learn(comm: MPI.Intracomm, engine: HostEngine, processes: Processes) -> int:
    """Return the crossover of two processes. The first call measures it and is collective over both; else local."""
    if processes not in _known:
        _known[processes] = measure(comm, engine)
    return _known[processes]


def measure(comm: MPI.Intracomm, engine: HostEngine) -> int:
    """Return the bytes of an all-reduce from which mapped memory is faster than MPI. Collective over two ranks.

    Blocks for some 20 ms. Both ranks return the same number. Raises as `HostEngine.run` does.
    """
    send, receive = np.ones(_SIZES[-1] // 4, np.float32), np.zeros(_SIZES[-1] // 4, np.float32)
    # The first round does not count, because it sets up connections and touches the slots for the first time.
    rounds = [[_times(comm, engine, send[: n // 4], receive[: n // 4]) for n in _SIZES] for _ in range(_ROUNDS)][1:]
    own = np.array(rounds).min(axis=0)
    slowest = np.empty_like(own)
    _allreduce(comm, own, slowest, MPI.MAX)
    crossover = 2 * _SIZES[-1]
    for nbytes, (by_mpi, mapped) in reversed(list(zip(_SIZES, slowest, strict=True))):
        if by_mpi < _GAIN * mapped:
            break
        crossover = nbytes
    logger.info(
        "collectives of host arrays on two ranks use mapped memory from %s, as measured", format_size(crossover)
    )
    return crossover


def _times(comm: MPI.Intracomm, engine: HostEngine, send: Array, receive: Array) -> tuple[float, float]:
    """Return the seconds of an all-reduce by MPI and of an all-reduce through mapped memory."""

    def mapped() -> None:
        call = Call(ALLREDUCE, Arguments(send, receive, MPI.SUM), comm.rank, comm.size)
        OneNode(engine, comm.size).run(call, "auto")

    return _time(lambda: _allreduce(comm, send, receive, MPI.SUM)), _time(mapped)


def _time(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
