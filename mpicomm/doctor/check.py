"""Check: one thing that goes wrong between ranks, and functions that several checks call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpicomm.doctor.facts import RankFacts

Job = Sequence[RankFacts]
"""The facts of all ranks, in order. Before MPI has started: those of this rank alone."""


@dataclass(frozen=True)
class Check:
    """A trouble between ranks. The document of troubles has a row for each check, with its symptom and its fix."""

    name: str
    title: str
    """The fact that the check has found true where there is no fault."""
    symptom: str
    """The message or the behaviour that the user sees."""
    fix: str
    """A command or a setting."""
    find: Callable[[Job], list[str]]
    """Returns a sentence for each fault, with the ranks and values of this job."""
    before_mpi: bool = False
    """Whether the fault may end the process when MPI starts, so that it has to be found before."""


def by_machine(job: Job) -> list[list[RankFacts]]:
    """Return the ranks of each machine: one kernel, and one host name, by which MPI tells machines."""
    machines: dict[tuple[str, str], list[RankFacts]] = {}
    for one in job:
        machines.setdefault((one.boot_id, one.host), []).append(one)
    return list(machines.values())


def having(job: Job, condition: Callable[[RankFacts], bool]) -> list[int]:
    """Return the ranks that fulfil a condition."""
    return [one.rank for one in job if condition(one)]
