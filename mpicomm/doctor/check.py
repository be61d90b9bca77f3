"""Check: a fault that may occur between ranks, and functions that several checks call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpicomm.doctor.facts import RankFacts

Job = Sequence[RankFacts]
"""The facts of all ranks, in order. Before MPI has started, only the facts of this rank."""


@dataclass(frozen=True)
class Check:
    """A fault that may occur between ranks. mpicomm/docs/troubles.md has a row with its symptom and its fix."""

    name: str
    title: str
    """The statement that is true without a fault."""
    fix: str
    """A command or a setting."""
    find: Callable[[Job], list[str] | None]
    """Returns a sentence for each fault, with the ranks and values of this job; None if there is nothing to check."""
    nothing: str = ""
    """Why there may be nothing to check."""
    before_mpi: bool = False
    """Whether the fault may end the process when MPI starts, so that the doctor must find it before."""


def by_machine(job: Job) -> list[list[RankFacts]]:
    """Return the ranks of each machine: one kernel, and one host name, because MPI tells machines by host names."""
    machines: dict[tuple[str, str], list[RankFacts]] = {}
    for one in job:
        machines.setdefault((one.boot_id, one.host), []).append(one)
    return list(machines.values())


def having(job: Job, condition: Callable[[RankFacts], bool]) -> list[int]:
    """Return the ranks that fulfil a condition."""
    return [one.rank for one in job if condition(one)]
