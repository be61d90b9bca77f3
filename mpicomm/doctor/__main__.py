"""``python -m mpicomm.doctor``: finds what keeps ranks from working, and says the mend. Exit code 1 for a fault."""

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
from mpicomm.doctor.facts import Facts
from mpicomm.doctor.report import CHECKS, examine, lines, record
from mpicomm.errors import CollectiveTimeoutError

# Modules that load MPI are imported in functions, when it is clear that it loads.

_START_S = 60.0  # MPI may wait for ever for a rank that does not start
_FORWARD_S = 1.0  # an MPI launcher drops output of a job that ends badly if it has not forwarded it yet


def main() -> NoReturn:
    """Run the command line on this rank, and exit. Collective."""
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


def _examine_ranks(facts: Facts) -> int:
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
        sys.stdout.write(f"FAULT answer: {error}\n      mend: look at that process, with `py-spy dump --pid PID`\n")
        sys.stdout.flush()
        time.sleep(_FORWARD_S)
        world.Abort(1)
    time.sleep(2 * _FORWARD_S)
    os._exit(1)


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.doctor",
        description="Find what keeps ranks from working, and say the mend. Exit code 1 for a fault. "
        "python -m mpicomm.info shows devices, paths and versions.",
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


if __name__ == "__main__":
    main()
