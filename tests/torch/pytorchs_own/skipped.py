"""PyTorch's own tests that do not run with the backend ``mpicomm``, and why."""

from __future__ import annotations

from mpi4py import MPI
from torch import __version__
from torch.cuda import device_count

_VERSION = tuple(map(int, __version__.split(".")[:2]))

SKIPPED = dict.fromkeys(
    ("test_sparse_all_reduce_sum", "test_sparse_all_reduce_sum_cuda"),
    "mpicomm refuses sparse tensors, because it has no reduction of their indices",
) | dict.fromkeys(
    ("test_batch_isend_irecv_mixed_backend_err", "test_nccl_high_priority_stream"),
    "it makes a group of NCCL, which refuses ranks that share a GPU, and does not call the backend",
)

if _VERSION < (2, 14):
    SKIPPED["test_DistributedDataParallel"] = "later versions of PyTorch skip it on Linux, for its issue 77317"

if device_count() < MPI.COMM_WORLD.size:
    SKIPPED |= dict.fromkeys(
        ("test_ddp_logging_data_gpu", "test_DistributedDataParallel_SyncBatchNorm_half"),
        "it uses a GPU by the number of its rank, and ranks share GPUs",
    )

if _VERSION < (2, 14):
    SKIPPED |= dict.fromkeys(
        (
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_wait_all_ranks",
        ),
        "monitored_barrier of this PyTorch refuses every backend whose name is not gloo",
    )
