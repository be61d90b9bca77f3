"""`python -m tests.helpers.jobs.run_ranks N ARGUMENTS...` runs pytest on N ranks; exits with 0 only if every rank did.

The exit code of mpiexec is not enough, because it is 0 if a rank calls os._exit(0) in the middle of a test.
"""

from __future__ import annotations

import itertools
import os
import re
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
        places = []
        for rank in range(nprocs):
            status = _read(Path(results, f"rank-{rank}"))
            last_words = _read(Path(results, f"last-words-{rank}"))
            if last_words:
                sys.stdout.write(f"---- last words of rank {rank}\n{last_words}\n")
            if status and status != "0":
                problems.append(f"rank {rank} exited with {status}")
            elif not status:
                problems.append(f"rank {rank} did not reach its end")
                places.append(f"rank {rank} {_read(Path(results, f'place-{rank}')) or 'did not start'}")
                places.extend(f"    {line}" for line in _gist(last_words))
    # The last lines of a part that failed are what scripts/test repeats at its end.
    sys.stdout.write("\n".join([*places, f"{nprocs} ranks: {'; '.join(problems) or 'passed'}", ""]))
    return 1 if problems else 0


def _gist(last_words: str) -> list[str]:
    """Return the error in the last words of a rank, or where the main thread stood.

    faulthandler writes the stack of the main thread last, with the innermost frame first.
    """
    lines = last_words.splitlines()
    if said := [line for line in lines if line.startswith(("E  ", "Fatal Python error"))]:
        return said[:2]
    frames = list(itertools.takewhile(lambda line: line.startswith("  File "), reversed(lines)))[::-1]
    if not frames:
        return lines[-1:]
    in_tests = [line for line in frames if re.search(r"/test_\w+\.py\"", line)]
    return [line.strip() for line in dict.fromkeys([frames[0], *in_tests[-1:]])]


def _read(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
