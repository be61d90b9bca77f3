"""The libraries to compare with, one module each: its function ``missing`` names the package to install."""

from __future__ import annotations

import importlib
from types import ModuleType

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Machine
from mpicomm.bench.peers.base import Peer

PEERS = {
    "nccl": ("nccl", "Nccl"),
    "nccl-symmetric": ("nccl_symmetric", "SymmetricNccl"),
    "torch": ("torch_symmetric", "TorchSymmetric"),
    "nvshmem": ("nvshmem_host", "Nvshmem"),
    "mpi": ("plain_mpi", "PlainMpi"),
}
"""Their names on the command line, their modules, and their classes."""


def module_of(name: str) -> ModuleType:
    """Return the module of a peer, without an import of the library itself."""
    return importlib.import_module(f"mpicomm.bench.peers.{PEERS[name][0]}")


def open_peer(name: str, comm: Communicator, machine: Machine) -> Peer:
    """Open a peer on all ranks. Collective."""
    peer: Peer = getattr(module_of(name), PEERS[name][1])(comm, machine)
    return peer
