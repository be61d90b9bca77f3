"""mpicomm: MPI ranks, one per GPU, open each other's memory and run collectives directly on it.

`Communicator` is an mpi4py communicator; see the README for a first program.
"""

from mpicomm.collectives.ops import AVG
from mpicomm.communicator import Communicator
from mpicomm.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    HandleError,
    InvalidUsageError,
    KernelCompileError,
    MpicommError,
    PeerError,
)
from mpicomm.events import SharedEvent
from mpicomm.kernels.headers import include_dir
from mpicomm.memory import SymmetricArray

__all__ = [
    "AVG",
    "BackendUnavailableError",
    "CollectiveTimeoutError",
    "Communicator",
    "HandleError",
    "InvalidUsageError",
    "KernelCompileError",
    "MpicommError",
    "PeerError",
    "SharedEvent",
    "SymmetricArray",
    "__version__",
    "include_dir",
]

__version__ = "0.1.0"
