"""The launcher of this process, as its environment variables describe it. Imports no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class JobLaunch:
    """The launcher of this process, as its environment variables describe it. Without a launcher ``size`` is 0."""

    family: str = ""
    """"MPICH" (Hydra, Intel MPI), "Open MPI" or "Slurm"."""
    rank: int = 0
    size: int = 0
    local_size: int = 1


def launch_of(variables: Mapping[str, str]) -> JobLaunch:
    """Return the launcher that these environment variables describe."""
    for family, size, rank, local_size in (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
        # These are variables of the job step. A batch script, which is one process, also has SLURM_NTASKS.
        ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        ranks = _count(variables.get(size, ""))
        if ranks:
            # Slurm writes "8(x2)" for two nodes with 8 tasks each.
            local = _count(variables.get(local_size, "").partition("(")[0])
            return JobLaunch(family, _count(variables.get(rank, "")) or 0, ranks, local or 1)
    return JobLaunch()


def _count(text: str) -> int | None:
    """Return the number in a variable, which may be of another process and hold anything; None for no such number."""
    return int(text) if text.isdecimal() and len(text) < 10 else None
