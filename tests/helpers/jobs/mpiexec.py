"""Run a program on several ranks from a test that is one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.jobs.pace import HANG_S

ROOT = Path(__file__).parents[3]

OPEN_MPI_ON_ANY_MACHINE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Variables that let mpiexec of Open MPI take the user root, and more ranks than there are cores."""

_SLEEPS = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "10000",
}
"""Variables that let a rank sleep between its polls while it waits in MPICH or in Open MPI."""

_QUICK_START = {"UCX_MEM_MMAP_HOOK_MODE": "none"}
"""Variables that save 40 ms of each start of MPICH, in which UCX spins while it patches functions of the C library.

UCX patches them to see which memory the program unmaps. The ranks of run_ranks.py, which are few and map most, have it
as users have.
"""


def mpiexec_command(nprocs: int, *arguments: str) -> list[str]:
    """Return the command that runs this Python with ``arguments`` on ``nprocs`` ranks."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    assert mpiexec, "there is no mpiexec, neither beside the Python interpreter nor on the PATH"
    return [mpiexec, "-n", str(nprocs), sys.executable, *arguments]


def sharing_of_cores(nprocs: int) -> dict[str, str]:
    """Return the variables for a job of ``nprocs`` ranks, beside which other tests run."""
    variables = {"OMP_NUM_THREADS": "1"}  # ranks compute at once; more threads of a rank only wait for each other
    if nprocs >= (os.cpu_count() or 1):
        # Without them a rank that waits in MPI keeps its core, which the awaited rank or another test needs.
        variables |= _SLEEPS
    return variables


def environment(**variables: str) -> dict[str, str]:
    """Return an environment for jobs: this checkout's package, nothing of MPICOMM_*, MPI on any machine and soon."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MPICOMM_")}
    return {
        **own,
        "PYTHONPATH": str(ROOT),
        **OPEN_MPI_ON_ANY_MACHINE,
        **_QUICK_START,
        **variables,
    }


def run_command(*command: str | Path, cwd: str | Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that reads nothing and return the result."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def run_job(nprocs: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with ``arguments`` on ``nprocs`` ranks and return the result.

    The ``stderr`` has no notices of Open MPI's mpiexec, which says there which rank ended the job.
    """
    job = subprocess.run(
        mpiexec_command(nprocs, *arguments),
        env={**sharing_of_cores(nprocs), **environment(**variables)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    job.stderr = re.sub(r"-{60,}\nprterun .*?-{60,}\n", "", job.stderr, flags=re.DOTALL)
    return job
