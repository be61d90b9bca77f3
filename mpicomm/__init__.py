"""mpicomm: MPI ranks, one per GPU, open each other's memory and run collectives directly on it.

`Communicator` is an mpi4py communicator; see the README for a first program.
"""

import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    from mpicomm.api.window import Win
    from mpicomm.experts.arrays import Received
    from mpicomm.experts.experts import Experts
    from mpicomm.world import install, uninstall

# These commands decide themselves whether to start MPI, and when; the modules below load and start it.
if {"mpicomm.doctor", "mpicomm.trace"}.isdisjoint(sys.orig_argv):
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        # With the name of this package `python -m` prints one line and no traceback.
        raise ImportError(
            f"mpicomm needs mpi4py and an MPI library that mpi4py can load ({' '.join(str(error).split())}): "
            "pip install mpi4py mpich, or see what python -m mpicomm.doctor says",
            name="mpicomm",
        ) from None

    from mpicomm import epilogues
    from mpicomm.api.communicator import Communicator
    from mpicomm.api.redistribution import Redistribution
    from mpicomm.api.splits import Split
    from mpicomm.errors import (
        BackendUnavailableError,
        CollectiveTimeoutError,
        HandleError,
        InvalidUsageError,
        KernelCompileError,
        MpicommError,
        PeerError,
    )
    from mpicomm.kernels.variant import include_dir
    from mpicomm.mpi.ops import AVG, Op, tree_sum
    from mpicomm.symmetric.array import SymmetricArray
    from mpicomm.symmetric.create import SharedEvent

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
    "Redistribution",
    "SharedEvent",
    "Split",
    "SymmetricArray",
    "Win",
    "__version__",
    "epilogues",
    "include_dir",
    "install",
    "tree_sum",
    "uninstall",
]

__version__ = "0.1.0"

if not typing.TYPE_CHECKING:  # a type checker would take every name for a name of this module
    _AT_FIRST_USE = {
        "Experts": "mpicomm.experts.experts",
        "Received": "mpicomm.experts.arrays",
        "Win": "mpicomm.api.window",
        "install": "mpicomm.world",
        "uninstall": "mpicomm.world",
    }
    """The modules of names that few programs use. A module loads when a program first reads its name."""

    def __getattr__(name: str) -> object:
        """Return a name that no program has read before."""
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_AT_FIRST_USE[name]), name)
        return value

    def __dir__() -> list[str]:
        """Return the public names, also those that no program has read yet."""
        return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]
