"""The group of torch.distributed with NCCL that the peers from PyTorch use."""

from __future__ import annotations

from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.cli import options as command_line


def begin_group(comm: Communicator, **options: Any) -> None:
    """Begin the default group, with NCCL, over the ranks of ``comm``. Collective, blocking.

    ``options`` go to ``init_process_group``. The caller destroys the group. If rank 0 cannot serve the store of the
    group, all ranks raise RuntimeError.
    """
    import torch.distributed as dist

    stores: list[Any] = []

    def serve() -> int:
        # The store must not wait for the other ranks, because they do not know its port yet.
        stores.append(dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False))
        return int(stores[0].port)

    port = command_line.on_first_rank(comm, serve)
    store = stores[0] if stores else dist.TCPStore("127.0.0.1", port, comm.size, False)
    dist.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size, **options)
