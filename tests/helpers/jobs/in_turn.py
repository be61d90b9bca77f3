"""Programs that run in one job, one after the other, because to start Python and to import packages takes longer.

`mpiexec -n N python -m tests.helpers.jobs.in_turn JSON`, where the JSON is a list of programs, each with its arguments.
A program is a file, or "-m" and a module. What it changes by `patch` is as before when the next one begins.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import run_job

ENDED = "---- exit code "
_patched: list[tuple[object, str, Any]] = []


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


def run_changed(
    folder: Path, nprocs: int, command: str, *changes: tuple[str, Sequence[str]], **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, int]]]:
    """Run the module of a command once for each change, in one job, as `run_in_turn` does.

    A change is code, which calls `patch` and may replace ``main``, and the options of the command.
    """
    programs: list[list[str | Path]] = []
    for number, (code, options) in enumerate(changes):
        program = folder / f"changed_{number}.py"
        program.write_text(
            "from mpi4py import MPI\nimport numpy as np\nimport mpicomm\nfrom mpicomm import SymmetricArray\n"
            f"from mpicomm.cli import options as command_line\nfrom {command} import main\n"
            "from tests.helpers.jobs.in_turn import patch\n"
            f"RANK = MPI.COMM_WORLD.rank\n{code}\ncommand_line.run(main)\n"
        )
        programs.append([program, *options])
    return run_in_turn(nprocs, *programs, **variables)


def patch(owner: Any, name: str, changed: Any) -> Any:
    """Replace an attribute until this program ends. Return the attribute."""
    attribute = getattr(owner, name)
    _patched.append((owner, name, attribute))
    setattr(owner, name, changed)
    return attribute


def main() -> None:
    """Run the programs; rank 0 prints the largest exit code of any rank."""
    from mpi4py import MPI

    from tests.helpers.jobs.in_turn import _patched as patched  # of the module that programs import, not of this one

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
        while patched:
            setattr(*patched.pop())
        code = MPI.COMM_WORLD.allreduce(code, MPI.MAX)
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{ENDED}{code}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
