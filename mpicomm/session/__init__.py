"""The device, the groups and the shared memory of one communicator on one rank, and their teardown."""

from mpicomm.session.session import Session

__all__ = ["Session"]
