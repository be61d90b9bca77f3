"""PyTorch's own tests that do not run with the backend ``mpicomm``, and why."""

from __future__ import annotations

from torch import __version__

SKIPPED = {
    "test_sparse_all_reduce_sum": "mpicomm refuses sparse tensors, because it has no reduction of their indices",
}

if tuple(map(int, __version__.split(".")[:2])) < (2, 12):
    SKIPPED |= dict.fromkeys(
        (
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_wait_all_ranks",
        ),
        "monitored_barrier of this PyTorch refuses every backend whose name is not gloo",
    )
