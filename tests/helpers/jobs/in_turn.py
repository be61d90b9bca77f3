"""Programs that run in one job, one after the other, because to start Python and to import packages takes longer.

`mpiexec -n N python -m mpi4py -m tests.helpers.jobs.in_turn JSON`, where the JSON is a list of programs, each with its
arguments. A program is a file, or "-m" and a module. What it changes by `patch` is as before when the next one begins.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import run_job

ENDED = "---- exit code "
_patched: list[tuple[object, str, Any]] = []


def run_in_turn(
    nprocs: int, *programs: Sequence[str | Path], **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, int]]]:
    """Run programs with their arguments. Return the job, and output and exit code of each program that has ended.

    A program that raises ends the job, which fails. A text with which all ranks exit is output, and the code is 1.
    """
    given = json.dumps([list(map(str, program)) for program in programs])
    job = run_job(nprocs, "-m", "mpi4py", "-m", "tests.helpers.jobs.in_turn", given, **variables)
    ended, said = [], ""
    for line in job.stdout.splitlines(keepends=True):
        if line.startswith(ENDED):
            ended.append((said, int(line.removeprefix(ENDED))))
            said = ""
        else:
            said += line
    return job, ended


def run_named(
    nprocs: int, programs: Mapping[str, Sequence[str | Path]], **variables: str
) -> tuple[dict[str, tuple[str, int]], str]:
    """Run programs as `run_in_turn` does, and require that all end.

    Return output and exit code of each by its name, and what all have said on stderr.
    """
    job, ended = run_in_turn(nprocs, *programs.values(), **variables)
    names = [*programs, "the end of the job"]
    assert job.returncode == 0 and len(ended) == len(programs), f"{names[len(ended)]}: {job.stdout}{job.stderr}"
    return dict(zip(programs, ended, strict=True)), job.stderr


def changed(folder: Path, command: str, code: str) -> Path:
    """Return a program that runs the module of a command after code that calls `patch`, and may replace ``main``."""
    program = folder / f"changed_{len(list(folder.glob('changed_*.py')))}.py"
    program.write_text(
        "from mpi4py import MPI\nimport numpy as np\nimport mpicomm\nfrom mpicomm import SymmetricArray\n"
        f"from mpicomm.cli import options as command_line\nfrom {command} import main\n"
        "from tests.helpers.jobs.in_turn import patch\n"
        f"RANK = MPI.COMM_WORLD.rank\n{code}\ncommand_line.run(main)\n"
    )
    return program


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
        sys.orig_argv = [sys.executable, *program]  # results have the command of their program
        try:
            if program[0] == "-m":
                sys.argv = program[1:]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                sys.argv = program
                sys.path[0] = str(Path(program[0]).parent)  # as Python does, for imports of files beside it
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = int(end.code) if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str) and MPI.COMM_WORLD.rank == 0:  # the program says why it cannot run
                sys.stdout.write(f"{end.code}\n")
        while patched:
            setattr(*patched.pop())
        code = MPI.COMM_WORLD.allreduce(code, MPI.MAX)
        if MPI.COMM_WORLD.rank == 0:
            sys.stdout.write(f"{ENDED}{code}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
