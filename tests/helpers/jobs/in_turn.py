"""Programs that run in one job, one after the other, because to start Python and to import packages takes longer.

`mpiexec -n N python -m tests.helpers.jobs.in_turn JSON`, where the JSON is a list of programs, each with its arguments.
A program is a file, or "-m" and a module.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.jobs.mpiexec import run_job

ENDED = "---- exit code "


def run_in_turn(
    nprocs: int, *programs: Sequence[str | Path], **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, int]]]:
    """Run programs with their arguments. Return the job, and output and exit code of each program that has ended.

    A program that raises, or exits with a text, ends the job, which fails.
    """
    given = json.dumps([list(map(str, program)) for program in programs])
    job = run_job(nprocs, "-m", "tests.helpers.jobs.in_turn", given, **variables)
    ended, said = [], ""
    for line in job.stdout.splitlines(keepends=True):
        if line.startswith(ENDED):
            ended.append((said, int(line.removeprefix(ENDED))))
            said = ""
        else:
            said += line
    return job, ended


def main() -> None:
    """Run the programs; rank 0 prints the largest exit code of any rank."""
    from mpi4py import MPI

    for program in json.loads(sys.argv[1]):
        code = 0
        try:
            if program[0] == "-m":
                sys.argv = program[1:]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.argv = program
                sys.path[0] = str(
                    Path(program[0]).parent
                )  # as Python does, so that a program finds the files beside it
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):  # a program says why it cannot run
                raise
            code = int(end.code or 0)
        code = MPI.COMM_WORLD.allreduce(code, MPI.MAX)
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{ENDED}{code}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
