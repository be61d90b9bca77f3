"""The registration of the backend ``mpicomm`` with PyTorch."""

from __future__ import annotations

import torch.distributed as dist

from mpicomm.torch.callbacks import install_places
from mpicomm.torch.future_tensors import install_quick_look
from mpicomm.torch.gradients import install_fp16_hook
from mpicomm.torch.groups import create
from mpicomm.torch.rendezvous import install_handler
from mpicomm.torch.works_for_cpp import install_conversions

NAME = "mpicomm"


def register() -> None:
    """Register the backend ``mpicomm`` for tensors of the host and of GPUs. Local. A second call does nothing.

    ``import mpicomm.torch`` calls it. PyTorch from 2.14 on also calls it when a program names the backend, because the
    package names this function as an entry point. But PyTorch reads the environment for the ranks before that. So
    without the import the program must set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # PyTorch from 2.15 on records the calls of a group in C++, unless the backend says that it records them itself. A
    # group in Python has no such calls, and PyTorch raises an error when it looks for them.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    install_handler()
    install_conversions()
    install_places()
    install_quick_look()
    install_fp16_hook()
