"""mpicomm.torch: the backend ``mpicomm`` of ``torch.distributed``.

Under mpirun ``torch.distributed.init_process_group("mpicomm")`` takes rank and size from MPI. Its groups carry tensors
of the host and of GPUs over memory that the ranks have opened for each other. Only this room and the bench import
PyTorch.
"""

from mpicomm.torch.process_group import communicator
from mpicomm.torch.registration import register
from mpicomm.torch.training import (
    AllreduceState,
    allgather_matmul,
    allreduce_hook,
    experts,
    matmul_allreduce,
    matmul_reduce_scatter,
    split_of,
)

register()

__all__ = [
    "AllreduceState",
    "allgather_matmul",
    "allreduce_hook",
    "communicator",
    "experts",
    "matmul_allreduce",
    "matmul_reduce_scatter",
    "register",
    "split_of",
]
