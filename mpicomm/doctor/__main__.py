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
from mpicomm.doctor.running import RunningJob, job_of, jobs_of_user
from mpicomm.doctor.waits import WaitReport
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError
from mpicomm.sizes import rich_console, rich_table

# Functions import the modules that load MPI, after it is clear that MPI loads.

_START_S = 60.0  # MPI may wait for ever for a rank that does not start
_RUNNING = frozenset(("--pid", "--job"))
_SHORT_SAMPLE_S = 0.3  # long enough to see whether a process is busy
_LONG_WAIT_S = 2.0  # a shorter wait does not set the exit code
_FORWARD_S = 1.0  # if a job ends badly, an MPI launcher drops output that it has not forwarded yet


def main() -> NoReturn:
    """Run the command line on this rank, and exit. Collective, except with options for a running job."""
    if _RUNNING.intersection(argument.partition("=")[0] for argument in sys.argv[1:]):
        _examine_running(_parser())
    facts = facts_before_mpi()
    checks = [check for check in CHECKS if check.before_mpi]
    early = [result for result in examine([facts], checks) if result[1]]
    if early:
        if environment.local_id() == 0:
            report = [f"Before MPI starts on {facts.host}:", *lines(early)]
            sys.stderr.write("".join(f"{line}\n" for line in report))
            sys.stderr.flush()
        # MPI may end the process. Then the launcher drops output that it has not forwarded, also output of slower
        # ranks.
        time.sleep(_FORWARD_S)
    if facts.mpi_error:
        sys.exit(1)
    from mpi4py import MPI

    if not MPI.Is_initialized():
        # The thread level that `import mpi4py.MPI` gives a program.
        level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
        # Shows where MPI waits and ends the process, from a thread that does not need the GIL.
        faulthandler.dump_traceback_later(_START_S, exit=True)
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}", MPI.THREAD_MULTIPLE))
        faulthandler.cancel_dump_traceback_later()
    from mpicomm.cli import options as command_line

    command_line.run(lambda: _examine_ranks(facts))


def _examine_running(parser: argparse.ArgumentParser) -> NoReturn:
    """Examine jobs that run on this machine, without MPI. Exit code 2 if there is no such job."""
    options = parser.parse_args()
    if options.json is not None:
        parser.error("--json: not allowed with --pid and --job")
    try:
        reports = sample(jobs_of_user if options.pid is None else lambda: [job_of(options.pid)], _LONG_WAIT_S)
    except InvalidUsageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for report in reports:
        show(report)
    sys.exit(int(any(wait.seconds >= _LONG_WAIT_S for report in reports for wait in report.waits())))


def sample(find: Callable[[], Sequence[RunningJob]], longest_s: float) -> list[WaitReport]:
    """Sample jobs twice, ``longest_s`` seconds apart if the age of a wait is not known otherwise."""
    before = {rank.process.pid: rank for job in find() for rank in job.ranks}
    reports: list[WaitReport] = []
    for pause_s in (min(_SHORT_SAMPLE_S, longest_s), longest_s):
        time.sleep(pause_s)
        reports = [WaitReport(job, before) for job in find()]
        if all(wait.exact or wait.seconds >= longest_s for report in reports for wait in report.waits()):
            break
    return reports


def show(report: WaitReport) -> None:
    """Write the waits in a running job to standard output."""
    waits = report.waits()
    for wait in waits:
        sys.stdout.write(f"WAIT for {wait.seconds:.1f} s{'' if wait.exact else ' or longer'}: {wait.text}\n")
    if not waits:
        sys.stdout.write("no rank waits for another one, as far as calls of mpicomm show\n")
    for pid in dict.fromkeys(pid for wait in waits for pid in wait.pids):
        sys.stdout.write(f"      fix: `py-spy dump --pid {pid}` shows where that rank is\n")
    numbers = "rank", "pid", "number", "begun s ago"
    titles = "communicator", "rank", "pid", "last call", "number", "begun s ago", "waits for", "the process"
    table = rich_table(None, titles, right=numbers)
    for row in report.rows():
        since = "" if row.seconds is None else f"{row.seconds:.1f}"
        cells = str(row.rank), str(row.pid), row.call, str(row.number or ""), since, row.waits_for, row.process_state
        table.add_row(row.communicator, *cells, style="bold" if row.waits_for else None)
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
