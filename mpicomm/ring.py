"""``python -m mpicomm.ring``: every rank moves bytes to and from its neighbours in a ring, checks each, and is timed.

Rank r writes into the memory of rank r+1 (put) and reads from the memory of rank r-1 (get). It does both through mapped
memory, as a kernel of the user does, and with copies. The options are the same as in nccl-tests.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator, RankInfo
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.cli.options import header, paths, setting
from mpicomm.cli.pattern import Pattern

DIRECTIONS = ("put", "get")

_CHECKS = 4  # patterns per size and direction; half go through mapped memory, half through copies
_POISON = 0xA5


@dataclass(frozen=True)
class Measurement:
    """The result for a size and direction: wrong bytes on all ranks, and the slowest rank's time for an iteration."""

    nbytes: int
    wrong: int
    time_us: float

    @property
    def algbw_gb_s(self) -> float:
        """The bytes that each rank moved, divided by the time, in GB/s."""
        return self.nbytes / self.time_us * 1e-3


class RingWindow:
    """A window of memory on each rank, which its neighbours write and read, and a private array."""

    def __init__(self, comm: Communicator, pattern: Pattern, xp: Any, nbytes: int) -> None:
        self._comm = comm
        self._pattern = pattern
        self._nbytes = nbytes
        self._window = comm.empty((nbytes,), np.uint8)
        self._own = xp.empty(nbytes, np.uint8)
        self._next = (comm.rank + 1) % comm.size
        self._previous = (comm.rank - 1) % comm.size

    def measure(self, direction: str, iterations: int, warmup: int) -> Measurement:
        """Check, then time one direction. Collective."""
        check, step = (self._check_put, self._put) if direction == "put" else (self._check_get, self._get)
        # The allgather also keeps ranks from timed writes until all windows are checked.
        wrong = sum(self._comm.allgather(check()))
        return Measurement(self._nbytes, wrong, self._time_us(step, iterations, warmup))

    def close(self) -> None:
        """Free the window. Collective."""
        self._window.close()

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

    def _time_us(self, step: Callable[[], None], iterations: int, warmup: int) -> float:
        for _ in range(warmup):
            step()
        self._meet()
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        self._comm.check()
        elapsed_s = time.perf_counter() - start
        slowest_s: float = max(self._comm.allgather(elapsed_s))
        return slowest_s / iterations * 1e6


def table_head(directions: Iterable[str]) -> list[str]:
    """Return the head of the table in the format of nccl-tests."""
    blocks = list(directions)
    return [
        f"{'':>12}" + "".join(f"{name:>16}{'':>14}" for name in blocks),
        f"{'size':>12}" + f"{'time':>12}{'algbw':>9}{'#wrong':>9}" * len(blocks),
        f"{'(B)':>12}" + f"{'(us)':>12}{'(GB/s)':>9}{'':>9}" * len(blocks),
    ]


def table_row(nbytes: int, measurements: Iterable[Measurement]) -> str:
    """Return one line of the table."""
    return f"{nbytes:>13}" + "".join(f"{m.time_us:>12.2f}{m.algbw_gb_s:>9.2f}{m.wrong:>9}" for m in measurements)


def report(
    ranks: Sequence[RankInfo],
    options: argparse.Namespace,
    results: dict[int, dict[str, Measurement]],
) -> dict[str, Any]:
    """Return the results and the setting of the run, for the JSON file."""
    return {
        **setting(ranks, options),
        "results": [
            {
                "nbytes": nbytes,
                **{
                    direction: {"time_us": m.time_us, "algbw_gb_s": m.algbw_gb_s, "wrong": m.wrong}
                    for direction, m in row.items()
                },
            }
            for nbytes, row in results.items()
        ],
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.ring",
        description="Every rank moves bytes to and from its neighbours in a ring, checks each, and is timed.",
    )
    arguments.add_sweep_arguments(result, smallest=1 << 10, factor=4)
    result.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: both")
    arguments.add_communicator_arguments(result)
    arguments.add_file_arguments(result)
    return result


def main() -> int:
    """Run the command line on this rank. Collective."""
    options = command_line.parse_args(parser())
    comm = command_line.open_communicator(options.device, options.handle)
    command_line.require_one_node(comm, "the ring goes through mapped memory and needs all ranks on one node")
    swept = command_line.swept_sizes(options, comm)
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)

    show = command_line.show
    ranks = comm.allgather(comm.describe())
    for line in (*header("ring", ranks, options.handle), *paths([info.links for info in ranks]), ""):
        show(f"# {line}".rstrip())
    show(*(f"#{line}".rstrip() for line in table_head(directions)))

    xp = importlib.import_module("numpy" if comm.device == "cpu" else "cupy")
    pattern = Pattern(xp)
    results: dict[int, dict[str, Measurement]] = {}
    for nbytes in swept:
        ring = RingWindow(comm, pattern, xp, nbytes)
        results[nbytes] = {
            direction: ring.measure(direction, options.iters, options.warmup_iters) for direction in directions
        }
        ring.close()
        show(table_row(nbytes, results[nbytes].values()))

    wrong = sum(m.wrong for row in results.values() for m in row.values())
    return command_line.finish(comm, options.json, report(ranks, options, results), wrong)


if __name__ == "__main__":
    command_line.run(main)
