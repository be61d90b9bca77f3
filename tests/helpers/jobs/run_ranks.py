"""`python -m tests.helpers.jobs.run_ranks N ARGUMENTS...` runs pytest on N ranks; exits with 0 only if every rank did.

The exit code of mpiexec is not enough, because it is 0 if a rank calls os._exit(0) in the middle of a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.jobs.mpiexec import OPEN_MPI_ON_ANY_MACHINE, mpiexec_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S

# The last resort for a fault that no limit inside a rank can end: code that hangs while it holds the GIL.
JOB_LIMIT_S = 6 * HANG_S

PYTEST = ("-m", "mpi4py", "-m", "pytest", "--with-mpi", "--timeout", f"{HANG_S:g}", "--timeout-method=thread")
# One cache cannot have several writers; the ranks set up faulthandler themselves.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:faulthandler")


def main(nprocs: int, arguments: list[str]) -> int:
    """Run the job, print the last words of the ranks, and return the exit code."""
    with tempfile.TemporaryDirectory(prefix="mpicomm-test-") as results:
        command = mpiexec_command(nprocs, *PYTEST, *WITHOUT, *arguments)
        variables = {**sharing_of_cores(nprocs), **OPEN_MPI_ON_ANY_MACHINE}
        environment = {**variables, **os.environ, "TEST_RESULTS": results}
        try:
            code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=JOB_LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            code = 1
        problems = [f"mpiexec exited with {code}"] if code else []
        for rank in range(nprocs):
            status = _read(Path(results, f"rank-{rank}"))
            if status != "0":
                problems.append(f"rank {rank} " + (f"exited with {status}" if status else "did not reach its end"))
            if last_words := _read(Path(results, f"last-words-{rank}")):
                sys.stdout.write(f"---- last words of rank {rank}\n{last_words}\n")
    sys.stdout.write(f"{nprocs} ranks: {'; '.join(problems) or 'passed'}\n")
    return 1 if problems else 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
