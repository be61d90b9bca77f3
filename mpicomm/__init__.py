"""mpicomm: MPI ranks, one per GPU, open each other's memory and run collectives directly on it.

`Communicator` is an mpi4py communicator; see the README for a first program.
"""

import sys

# These commands decide themselves whether to start MPI, and when; the modules below load and start it.
if {"mpicomm.doctor", "mpicomm.p2p", "mpicomm.trace"}.isdisjoint(sys.orig_argv):
    from mpicomm import epilogues
    from mpicomm.api.communicator import Communicator
    from mpicomm.api.window import Win
    from mpicomm.errors import (
        BackendUnavailableError,
        CollectiveTimeoutError,
        HandleError,
        InvalidUsageError,
        KernelCompileError,
        MpicommError,
        PeerError,
    )
    from mpicomm.experts.experts import Experts
    from mpicomm.experts.received import Received
    from mpicomm.install import install, uninstall
    from mpicomm.kernels.headers import include_dir
    from mpicomm.mpi.ops import AVG
    from mpicomm.mpi.own_ops import Op
    from mpicomm.symmetric.array import SymmetricArray
    from mpicomm.symmetric.events import SharedEvent

__all__ = [
    "AVG",
    "BackendUnavailableError",
    "CollectiveTimeoutError",
    "Communicator",
    "Experts",
    "HandleError",
    "InvalidUsageError",
    "KernelCompileError",
    "MpicommError",
    "Op",
    "PeerError",
    "Received",
    "SharedEvent",
    "SymmetricArray",
    "Win",
    "__version__",
    "epilogues",
    "include_dir",
    "install",
    "uninstall",
]

__version__ = "0.1.0"
