"""``python -m mpicomm.ring``: every rank moves bytes to and from its neighbours in a ring, checks each, and is timed.

Rank r writes into the memory of rank r+1 (put) and reads from the memory of rank r-1 (get). It does both through mapped
memory, as a kernel of the user does, and with copies. The options are the same as in nccl-tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.compare import OWN
from mpicomm.bench.measure import CheckedCall, Measuring, Trial, machine_of
from mpicomm.bench.operations import POISON, Content
from mpicomm.bench.report import Report, ResultRow
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.symmetric.array import SymmetricArray

DIRECTIONS = ("put", "get")

_CHECKS = 4  # per size and direction; half go through mapped memory, half through copies
_ROUNDS = 3


def trials(comm: Communicator, xp: Any, content: Content, window: SymmetricArray, own: Any) -> dict[str, Trial]:
    """Return the calls by direction: of the windows on the neighbours, and of the private array ``own``.

    ``content`` has twice as many ranks, so that a check finds the data of the check before it.
    """
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size

    def hand_over(to: int, by: int) -> None:
        window.signal(to)
        window.wait_signal(by)

    def put(mapped: bool = False) -> None:
        if mapped:
            xp.add(own, np.uint8(0), out=window.peer(following))
        else:
            window.put(own, following)
        hand_over(following, previous)

    def get(mapped: bool = False) -> None:
        if mapped:
            xp.add(window.peer(previous), np.uint8(0), out=own)
        else:
            window.get(previous, own)
        # The signal tells the owner that it may write again. The wait is for the reader of this rank's window.
        hand_over(previous, following)

    def write(source: Any, target: Any, shift: int) -> None:
        target.fill(POISON)
        content.write(source, shift + rank)

    made = {}
    for name, call, source, target in (("put", put, own, window.local), ("get", get, window.local, own)):
        checks = [
            CheckedCall(
                partial(write, source, target, size * (number // 2)),
                partial(call, mapped=number % 2 == 0),
                partial(content.count_differing, target, size * (number // 2) + previous),
            )
            for number in range(_CHECKS)
        ]
        made[name] = Trial(OWN, call, checks)
    return made


def main() -> int:
    """Run the command line on this rank. Collective."""
    parser = arguments.command_parser(
        "ring", "Every rank moves bytes to and from its neighbours in a ring, checks each, and is timed."
    )
    arguments.add_sweep_arguments(parser, smallest=1 << 10, factor=4)
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: both")
    run = command_line.Run(parser, one_node=True)
    options, comm, swept = run.options, run.comm, run.swept_sizes()
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)
    machine = machine_of(comm)
    effort = {"iterations": options.iters, "warmups": options.warmup_iters, "rounds": _ROUNDS}
    measuring = Measuring(comm, machine, **effort, graphs=False)
    with machine.current():
        content = Content(machine.xp, np.dtype(np.uint8), "sum", 2 * comm.size, swept[-1], reduces=False)

        def measure(nbytes: int) -> ResultRow:
            window = comm.empty((nbytes,), np.uint8)
            by_direction = trials(comm, machine.xp, content, window, machine.xp.empty(nbytes, np.uint8))
            places = {direction: measuring.run([by_direction[direction]]) for direction in directions}
            window.close()  # no `with` block: a rank that fails alone would wait for the others there
            return ResultRow({"nbytes": nbytes}, places, lambda place, time_us: {"algbw": nbytes / time_us * 1e-3})

        report = Report([("size", "(B)", 13)], directions, rates=["algbw"])
        return report.make(run, "ring", [measuring.how], swept, measure)


if __name__ == "__main__":
    command_line.run(main)
