"""The libraries to compare with, one module each: ``missing`` names the package to install, ``open_peer`` opens it."""

from __future__ import annotations

import importlib
from types import ModuleType

PEERS = {
    "nccl": "nccl",
    "nccl-symmetric": "nccl_symmetric",
    "torch": "torch_symmetric",
    "nvshmem": "nvshmem_host",
    "mpi": "plain_mpi",
}
"""Their names on the command line, and their modules."""


def module_of(name: str) -> ModuleType:
    """Return the module of a peer, without an import of the library itself."""
    return importlib.import_module(f"mpicomm.bench.peers.{PEERS[name]}")
