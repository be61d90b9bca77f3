"""``python -m mpicomm.doctor``: finds why ranks do not work, and shows the fix. Exit code 1 for a fault."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import mpi4py

from mpicomm import environment
from mpicomm.cli import arguments
from mpicomm.doctor.checks import CHECKS, examine, lines, record
from mpicomm.doctor.facts import RankFacts, facts_before_mpi, gather
from mpicomm.doctor.running import Job, job_of, jobs_of_user
from mpicomm.doctor.waits import Look
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.sizes import rich_console, rich_table

# Functions import the modules that load MPI, after it is clear that MPI loads.

_START_S = 60.0  # MPI may wait for ever for a rank that does not start
_RUNNING = frozenset(("--pid", "--job"))
_GLANCE_S = 0.3  # long enough to see whether a process is busy
_LONG_S = 2.0  # shorter waits are not worth an exit code
_FORWARD_S = 1.0  # if a job ends badly, an MPI launcher drops output that it has not forwarded yet


def main() -> NoReturn:
    """Run the command line on this rank, and exit. Collective, except with options that look at a running job."""
    if _RUNNING.intersection(argument.partition("=")[0] for argument in sys.argv[1:]):
        _look_at_running(_parser())
    facts = facts_before_mpi()
    checks = [check for check in CHECKS if check.before_mpi]
    early = [result for result in examine([facts], checks) if result[1]]
    if early:
        if environment.local_id() == 0:
            said = [f"Before MPI starts on {facts.host}:", *lines(early)]
            sys.stderr.write("".join(f"{line}\n" for line in said))
            sys.stderr.flush()
        # MPI may end the process. Then the launcher drops output that it has not forwarded, also output of slower
        # ranks.
        time.sleep(_FORWARD_S)
    if facts.mpi_error:
        sys.exit(1)
    from mpi4py import MPI

    if not MPI.Is_initialized():
        # This is the level of threads that `import mpi4py.MPI` gives a program.
        level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
        # It shows the place of MPI's wait and ends the process, from a thread that does not need the interpreter.
        faulthandler.dump_traceback_later(_START_S, exit=True)
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}", MPI.THREAD_MULTIPLE))
        faulthandler.cancel_dump_traceback_later()
    from mpicomm.cli import options as command_line

    command_line.run(lambda: _examine_ranks(facts))


def _look_at_running(parser: argparse.ArgumentParser) -> NoReturn:
    """Look at jobs that run on this machine, without MPI. Exit code 2 if there is no such job."""
    options = parser.parse_args()
    if options.json is not None:
        parser.error("--json: not allowed with --pid and --job")
    try:
        looks = watch(jobs_of_user if options.pid is None else lambda: [job_of(options.pid)], _LONG_S)
    except InvalidUsageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for look in looks:
        show(look)
    sys.exit(int(any(wait.seconds >= _LONG_S for look in looks for wait in look.waits())))


def watch(find: Callable[[], Sequence[Job]], longest_s: float) -> list[Look]:
    """Look at jobs twice, ``longest_s`` seconds apart if the age of a wait is not known otherwise."""
    before = {rank.process.pid: rank for job in find() for rank in job.ranks}
    looks: list[Look] = []
    for pause_s in (min(_GLANCE_S, longest_s), longest_s):
        time.sleep(pause_s)
        looks = [Look(job, before) for job in find()]
        if all(wait.known or wait.seconds >= longest_s for look in looks for wait in look.waits()):
            break
    return looks


def show(look: Look) -> None:
    """Write a job that runs to standard output."""
    for wait in look.waits():
        sys.stdout.write(f"WAIT for {wait.seconds:.1f} s{'' if wait.known else ' or longer'}: {wait.text}\n")
    if not look.waits():
        sys.stdout.write("no rank waits for another one, as far as calls of mpicomm show\n")
    for pid in dict.fromkeys(pid for wait in look.waits() for pid in wait.pids):
        sys.stdout.write(f"      fix: `py-spy dump --pid {pid}` shows where that rank is\n")
    numbers = "rank", "pid", "number", "begun s ago"
    titles = "communicator", "rank", "pid", "last call", "number", "begun s ago", "waits for", "the process"
    table = rich_table(None, titles, right=numbers)
    for line in look.lines():
        since = "" if line.seconds is None else f"{line.seconds:.1f}"
        cells = str(line.rank), str(line.pid), line.call, str(line.number or ""), since, line.waits_for, line.does
        table.add_row(line.communicator, *cells, style="bold" if line.waits_for else None)
    sys.stdout.flush()
    rich_console(sys.stdout, 160).print(table)


def _examine_ranks(facts: RankFacts) -> int:
    """Examine all ranks of the job. One rank reports. Collective."""
    from mpi4py import MPI

    from mpicomm.cli import options as command_line

    options = command_line.parse_args(_parser())
    try:
        job = gather(facts, environment.timeout_s(None), options.device, options.handle)
    except CollectiveTimeoutError as error:
        _end_without(error)
    results = examine(job)
    if MPI.COMM_WORLD.size > 1 or facts.launch.rank == 0:
        if options.json is None:
            command_line.show(*lines(results))
        else:
            command_line.save(options.json, record(job, results))
    return int(any(faults for _, faults, _ in results))


def _end_without(error: CollectiveTimeoutError) -> NoReturn:
    """End the job if a rank does not answer. The first of the other ranks names it."""
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
    result = arguments.command_parser(
        "doctor",
        "Find why ranks do not work, and show the fix. Exit code 1 for a fault. "
        "python -m mpicomm.info shows devices, paths and versions.",
        json="output",
    )
    running = result.add_argument_group(
        "a job that hangs",
        "Started without mpirun, these options show the state of each rank on this machine, and the rank for which the "
        "others wait. Exit code 1 if a rank waits for another rank for 2 seconds, 2 if there is no such job.",
    )
    which = running.add_mutually_exclusive_group()
    which.add_argument("--pid", type=int, metavar="PID", help="the job of a rank, or of an mpirun")
    which.add_argument("--job", action="store_true", help="all jobs of this user on this machine")
    return result


if __name__ == "__main__":
    main()
