"""mpicomm.torch: the backend ``mpicomm`` of ``torch.distributed``.

Under mpirun ``torch.distributed.init_process_group("mpicomm")`` takes rank and size from MPI. Its groups carry tensors
of the host and of GPUs over memory that the ranks have opened for each other. Only this room and the bench import
PyTorch.
"""

from mpicomm.torch.experts import experts
from mpicomm.torch.gradients import AllreduceState, allreduce_hook
from mpicomm.torch.groups import communicator
from mpicomm.torch.products import allgather_matmul, matmul_allreduce, matmul_reduce_scatter
from mpicomm.torch.registration import register

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
]
