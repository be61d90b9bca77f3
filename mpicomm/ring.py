"""``python -m mpicomm.ring``: every rank moves bytes to and from its neighbours in a ring, checks each, and is timed.

Rank r writes into the memory of rank r+1 (put) and reads from the memory of rank r-1 (get). It does both through mapped
memory, as a kernel of the user does, and with copies. The options are the same as in nccl-tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import CheckedCall, Measuring, Trial, machine_of
from mpicomm.bench.operations import POISON, Content
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.sizes import Columns
from mpicomm.symmetric.array import SymmetricArray

DIRECTIONS = ("put", "get")

_CHECKS = 4  # per size and direction; half go through mapped memory, half through copies


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
        made[name] = Trial(name, call, checks)
    return made


def main() -> int:
    """Run the command line on this rank. Collective."""
    parser = arguments.command_parser(
        "ring", "Every rank moves bytes to and from its neighbours in a ring, checks each, and is timed."
    )
    arguments.add_sweep_arguments(parser, smallest=1 << 10, factor=4)
    parser.add_argument("--direction", choices=(*DIRECTIONS, "both"), default="both", help="default: both")
    run = command_line.Run(parser, one_node="the ring goes through mapped memory and needs all ranks on one node")
    options, comm, swept = run.options, run.comm, run.swept_sizes()
    directions = DIRECTIONS if options.direction == "both" else (options.direction,)

    columns = [("size", "(B)", 13)]
    for direction in directions:
        columns += [(direction, "(us)", 12), ("algbw", "(GB/s)", 9), ("#wrong", "", 9)]
    table = Columns(columns)
    run.introduce("ring", "")
    command_line.show(*table.head())

    machine = machine_of(comm)
    measuring = Measuring(comm, machine, iterations=options.iters, warmups=options.warmup_iters, rounds=1, graphs=False)
    results: list[dict[str, Any]] = []
    wrong = 0
    with machine.current():
        content = Content(machine.xp, np.dtype(np.uint8), "sum", 2 * comm.size, swept[-1], reduces=False)
        for nbytes in swept:
            window = comm.empty((nbytes,), np.uint8)
            by_direction = trials(comm, machine.xp, content, window, machine.xp.empty(nbytes, np.uint8))
            outcomes, _ = measuring.run([by_direction[each] for each in directions])
            window.close()  # no `with` block: a rank that fails alone would wait for the others there
            found = {
                name: {"time_us": each.time_us, "algbw_gb_s": nbytes / each.time_us * 1e-3, "wrong": each.wrong or 0}
                for name, each in outcomes.items()
            }
            results.append({"nbytes": nbytes, **found})
            wrong += sum(int(each["wrong"]) for each in found.values())
            command_line.show(table.line([nbytes, *(cell for each in found.values() for cell in each.values())]))
    return run.finish({"results": results}, wrong)


if __name__ == "__main__":
    command_line.run(main)
