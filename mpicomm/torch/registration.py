"""Registers the backend ``mpicomm`` with PyTorch."""

from __future__ import annotations

import torch.distributed as dist

from mpicomm.torch.groups import create
from mpicomm.torch.rendezvous import install_handler

NAME = "mpicomm"


def register() -> None:
    """Register the backend ``mpicomm`` for tensors of the host and of GPUs. Local; a second call does nothing.

    ``import mpicomm.torch`` calls it. So does PyTorch from 2.14 on when a program names the backend, because the
    package names this function as an entry point.
    """
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    install_handler()
