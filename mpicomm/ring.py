"""``python -m mpicomm.ring``: every rank moves bytes to and from its neighbours in a ring, checks each, and is timed.

Rank r writes into the memory of rank r+1 (put) and reads from the memory of rank r-1 (get). It does both through mapped
memory, as a kernel of the user does, and with copies. The options are the same as in nccl-tests.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.cli.pattern import Pattern
from mpicomm.sizes import Columns
from mpicomm.symmetric.array import SymmetricArray

DIRECTIONS = ("put", "get")

_CHECKS = 4  # patterns per size and direction; half go through mapped memory, half through copies
_POISON = 0xA5


class RingWindow:
    """A window of memory on each rank, which its neighbours write and read, and a private array."""

    def __init__(self, comm: Communicator, pattern: Pattern, window: SymmetricArray, own: Any) -> None:
        self._comm, self._pattern, self._window, self._own = comm, pattern, window, own
        self._next = (comm.rank + 1) % comm.size
        self._previous = (comm.rank - 1) % comm.size

    def measure(self, direction: str, iterations: int, warmup: int) -> dict[str, Any]:
        """Check, then time one direction: the slowest rank's time of an iteration. Collective."""
        check, step = (self._check_put, self._put) if direction == "put" else (self._check_get, self._get)
        # The allgather also keeps ranks from timed writes until all windows are checked.
        wrong = sum(self._comm.allgather(check()))
        for _ in range(warmup):
            step()
        self._meet()
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        self._comm.check()
        time_us = max(self._comm.allgather(time.perf_counter() - start)) / iterations * 1e6
        return {"time_us": time_us, "algbw_gb_s": self._window.nbytes / time_us * 1e-3, "wrong": wrong}

    def _put(self) -> None:
        self._window.put(self._own, self._next)
        self._hand_over(self._next, self._previous)

    def _get(self) -> None:
        self._window.get(self._previous, self._own)
        # The signal tells the owner that it may write again. The wait is for the reader of this rank's window.
        self._hand_over(self._previous, self._next)

    def _check_put(self) -> int:
        rank, wrong = self._comm.rank, 0
        for iteration in range(_CHECKS):
            self._window.local.fill(_POISON)
            self._meet()  # no rank writes to a window before its owner has poisoned it
            if iteration % 2:
                self._pattern.write(self._own, rank, iteration)
                self._put()
            else:
                self._pattern.write(self._window.peer(self._next), rank, iteration)
                self._hand_over(self._next, self._previous)
            wrong += self._pattern.count_wrong(self._window.local, self._previous, iteration)
        return wrong

    def _check_get(self) -> int:
        rank, wrong = self._comm.rank, 0
        for iteration in range(_CHECKS):
            self._own.fill(_POISON)
            self._meet()  # no owner overwrites a window before its reader is done with it
            self._window.local.fill(_POISON)
            self._pattern.write(self._window.local, rank, iteration)
            self._hand_over(self._next, self._previous)
            if iteration % 2:
                self._window.get(self._previous, self._own)
                wrong += self._pattern.count_wrong(self._own, self._previous, iteration)
            else:
                wrong += self._pattern.count_wrong(self._window.peer(self._previous), self._previous, iteration)
        return wrong

    def _hand_over(self, to: int, by: int) -> None:
        self._window.signal(to)
        self._window.wait_signal(by)

    def _meet(self) -> None:
        self._comm.check()
        self._comm.barrier()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.measuring_parser(
        "ring", "Every rank moves bytes to and from its neighbours in a ring, checks each, and is timed."
    )
    arguments.add_sweep_arguments(result, smallest=1 << 10, factor=4)
    result.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: both")
    return result


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node="the ring goes through mapped memory and needs all ranks on one node")
    options, comm, swept = run.options, run.comm, run.swept_sizes()
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)

    columns = [("size", "(B)", 13)]
    for direction in directions:
        columns += [(direction, "(us)", 12), ("algbw", "(GB/s)", 9), ("#wrong", "", 9)]
    table = Columns(columns)
    run.introduce("ring", *command_line.paths([info.links for info in run.ranks]), "")
    command_line.show(*table.head())

    xp = importlib.import_module("numpy" if comm.device == "cpu" else "cupy")
    pattern = Pattern(xp)
    results: list[dict[str, Any]] = []
    wrong = 0
    for nbytes in swept:
        window = comm.empty((nbytes,), np.uint8)
        ring = RingWindow(comm, pattern, window, xp.empty(nbytes, np.uint8))
        found = {each: ring.measure(each, options.iters, options.warmup_iters) for each in directions}
        window.close()  # no `with` block: a rank that fails alone would wait for the others there
        results.append({"nbytes": nbytes, **found})
        wrong += sum(each["wrong"] for each in found.values())
        command_line.show(table.line([nbytes, *(cell for each in found.values() for cell in each.values())]))
    return run.finish({"results": results}, wrong)


if __name__ == "__main__":
    command_line.run(main)
