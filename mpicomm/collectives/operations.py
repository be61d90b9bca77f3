"""The table of MPI's collectives."""

from __future__ import annotations

INTO_ALL = ("Allreduce", "Bcast", "Allgather", "Alltoall")
"""The operations whose output all ranks have alike, so that others may store into it."""
