"""``python -m mpicomm.p2p``: the speed of writes and reads of other ranks' memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain

from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.p2p.pairs import Matrix, Pairs, link_matrices
from mpicomm.sizes import format_cell, rich_console, rich_table

_FILE_WIDTH = 1000  # wide enough to fold no cell, if no terminal sets the width
_EXPLAINED = (
    "Bandwidth counts each byte once; within one memory it is read and written there.",
    "Latency: the mean time of many copies in a row.",
    "On GPUs the copies of a round are a CUDA graph.",
    "-: there is nothing to measure.",
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "p2p",
        "Measure bandwidth and latency between each two ranks, through the memory that they open for each other: by "
        "copy engines and by kernels on GPUs, by copies on the host. Every byte is checked.",
    )
    count = arguments.count_from
    result.add_argument(
        "-b", "--bytes", type=arguments.parse_size, metavar="SIZE", help="of a copy; default: 256M, 16M on the host"
    )
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    result.add_argument("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    return result


def report(matrices: Iterable[Matrix], *, shows: bool) -> list[Matrix]:
    """Print each matrix as soon as it is measured. Return the matrices."""
    console, done = rich_console(sys.stdout, _FILE_WIDTH), []
    console.quiet = not shows
    for matrix in matrices:
        done.append(matrix)
        # This is not the title of `Table`, because `Table` folds its title to its width.
        console.print(f"{matrix.title} ({matrix.unit})" if matrix.unit else matrix.title)
        # An attribute says how a rank accesses another one. A measurement says how fast data goes to the other one.
        corner = "from rank \\ to rank" if matrix.unit else "rank \\ peer"
        numbers = [str(number) for number in range(len(matrix.cells))]
        rows = ([number, *map(format_cell, row)] for number, row in zip(numbers, matrix.cells, strict=True))
        console.print(rich_table(None, [corner, *numbers], rows, right=numbers))
    return done


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node="the matrices are of mapped memory and need all ranks on one node")
    options, comm = run.options, run.comm
    options.bytes = options.bytes or (16 << 20 if comm.device == "cpu" else 256 << 20)
    run.introduce("p2p", *_EXPLAINED)
    pairs = Pairs(comm, options)
    matrices = chain(link_matrices([info.links for info in run.ranks]), pairs.matrices())
    measured = report(matrices, shows=comm.rank == 0)
    return run.finish({"matrices": [asdict(matrix) for matrix in measured]}, pairs.wrong, "wrong bytes")


if __name__ == "__main__":
    command_line.run(main)
