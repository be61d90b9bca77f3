"""``python -m mpicomm.doctor``: finds what keeps ranks from working, and says the fix. Exit code 1 for a fault."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from typing import NoReturn

import mpi4py

from mpicomm import environment
from mpicomm.cli import arguments
from mpicomm.doctor import before_mpi
from mpicomm.doctor.check import Check
from mpicomm.doctor.facts import RankFacts
from mpicomm.doctor.report import CHECKS, examine, lines, record
from mpicomm.doctor.running import job_of, jobs_of_user
from mpicomm.doctor.running_report import report, watch
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError

# Modules that load MPI are imported in functions, when it is clear that it loads.

_START_S = 60.0  # MPI may wait for ever for a rank that does not start
_RUNNING = frozenset(("--pid", "--job"))
_FORWARD_S = 1.0  # an MPI launcher drops output of a job that ends badly if it has not forwarded it yet


def main() -> NoReturn:
    """Run the command line on this rank, and exit. Collective, but for options that look at a running job."""
    if _RUNNING.intersection(argument.partition("=")[0] for argument in sys.argv[1:]):
        _look_at_running(_parser())
    facts = before_mpi.gather()
    early = [(check, faults) for check, faults in examine([facts], _before_mpi()) if faults]
    if early:
        if environment.local_id() == 0:
            said = [f"Before MPI starts on {facts.host}:", *lines(early)]
            sys.stderr.write("".join(f"{line}\n" for line in said))
            sys.stderr.flush()
        # MPI may end the process, and then the launcher drops what it has not forwarded, also that of slower ranks.
        time.sleep(_FORWARD_S)
    if facts.mpi_error:
        sys.exit(1)
    _start_mpi()
    from mpicomm.cli import options as command_line

    command_line.run(lambda: _examine_ranks(facts))


def _look_at_running(parser: argparse.ArgumentParser) -> NoReturn:
    """Look at jobs that run on this machine, without MPI. Exit code 2 where there is none to look at."""
    options = parser.parse_args()
    if options.json:
        parser.error("--json FILE: with --pid and --job it takes no file, and writes to standard output")
    try:
        looks = watch(
            jobs_of_user if options.pid is None else lambda: [job_of(options.pid)],
            options.longer_than,
        )
    except InvalidUsageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    sys.exit(report(looks, options.longer_than, as_json=options.json is None))


def _before_mpi() -> list[Check]:
    return [check for check in CHECKS if check.before_mpi]


def _start_mpi() -> None:
    from mpi4py import MPI

    if MPI.Is_initialized():
        return
    # As `import mpi4py.MPI` does in a program, so that the level of threads is that of programs.
    level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
    # It shows where MPI waits and ends the process, from a thread that does not need the interpreter.
    faulthandler.dump_traceback_later(_START_S, exit=True)
    MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}", MPI.THREAD_MULTIPLE))
    faulthandler.cancel_dump_traceback_later()


def _examine_ranks(facts: RankFacts) -> int:
    """Examine all ranks of the job, and report on one. Collective."""
    from mpi4py import MPI

    from mpicomm.cli import options as command_line
    from mpicomm.doctor.between_ranks import gather

    options = command_line.parse_args(_parser())
    try:
        job = gather(facts, environment.timeout_s(None), options.device, options.handle)
    except CollectiveTimeoutError as error:
        _end_without(error)
    results = examine(job)
    if MPI.COMM_WORLD.rank == 0 and (MPI.COMM_WORLD.size > 1 or facts.launch.rank == 0):
        if options.json is False:
            sys.stdout.write("".join(f"{line}\n" for line in lines(results)))
        elif options.json is None:
            sys.stdout.write(json.dumps(record(job, results), indent=2) + "\n")
        else:
            arguments.write_json(options.json, record(job, results))
    return int(any(faults for _, faults in results))


def _end_without(error: CollectiveTimeoutError) -> NoReturn:
    """End the job where a rank does not answer: the first of the others names it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank == min({*range(world.size)} - {*error.ranks}):
        sys.stdout.write(f"FAULT answer: {error}\n      fix: look at that process, with `py-spy dump --pid PID`\n")
        sys.stdout.flush()
        time.sleep(_FORWARD_S)
        world.Abort(1)
    time.sleep(2 * _FORWARD_S)
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.doctor",
        description="Find what keeps ranks from working, and say the fix. Exit code 1 for a fault. "
        "python -m mpicomm.info shows devices, paths and versions.",
        allow_abbrev=False,
    )
    running = result.add_argument_group(
        "a job that hangs",
        "Started without mpirun, these show what each rank on this machine does, and which rank the others wait for. "
        "Exit code 1 where a rank waits for another one, 2 where there is no such job.",
    )
    which = running.add_mutually_exclusive_group()
    which.add_argument("--pid", type=int, metavar="PID", help="the job of a rank, or of an mpirun")
    which.add_argument("--job", action="store_true", help="all jobs of this user on this machine")
    running.add_argument(
        "--longer-than",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="waits of so many seconds count for the exit code; default: 2",
    )
    arguments.add_communicator_arguments(result)
    result.add_argument(
        "--json",
        nargs="?",
        const=None,
        default=False,
        type=arguments.output_file_or_stdout,
        metavar="FILE",
        help="write one JSON object, by default to standard output",
    )
    return result


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= environment.LONGEST_TIMEOUT_S:
        raise ValueError
    return seconds


if __name__ == "__main__":
    main()
