"""The command line of ``python -m mpicomm.p2p``."""

from __future__ import annotations

import argparse

from mpicomm.cli import arguments
from mpicomm.errors import InvalidUsageError

NBYTES_ON_GPUS, NBYTES_ON_HOST = 256 << 20, 16 << 20


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.p2p",
        description="Measure bandwidth and latency between each two GPUs of this machine, by copy engines and by "
        "kernels, with peer access and through host memory, and check every byte. If mpirun starts several ranks, "
        "measure between each two ranks, on GPUs or on the host, through the memory that they open for each other.",
    )
    count = arguments.count_from
    result.add_argument(
        "-b", "--bytes", type=arguments.parse_size, metavar="SIZE", help="of a copy; default: 256M, 16M on the host"
    )
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    result.add_argument("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    arguments.add_file_arguments(result)
    ranks = result.add_argument_group("between ranks")
    arguments.add_communicator_arguments(ranks)
    return result


def forbid_rank_arguments(options: argparse.Namespace) -> None:
    """Raise `InvalidUsageError` for options that mean nothing in one process."""
    for name in ("device", "handle"):
        if getattr(options, name) != "auto":
            raise InvalidUsageError(
                f"--{name} is for ranks: start them with mpirun -np N python -m mpicomm.p2p, or leave --{name} out"
            )
