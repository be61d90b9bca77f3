"""`python -m tests.helpers.programs.torch_lost_ranks RESULTS`: the errors of calls after a rank has died.

All ranks make groups and a model. Then they reduce, one call after the other, and the last rank kills itself between
two calls. The other ranks go on, and make one call of each kind, each in another group. The file ``limit_s`` of RESULTS
has the timeout of the groups.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from tests.helpers.jobs.survivors import make_calls, run_in_child

CALLS_BEFORE = 20
LEAST_LIMIT_S = 1.0
NAMES = ("all_reduce", "wait", "barrier", "all_gather_object", "recv", "training", "destroy")


def main(results: Path) -> None:
    """Lose a rank, and make the calls."""
    import torch  # imported here, because the rank has to fork before threads and MPI start
    import torch.distributed as dist
    from torch import nn

    import mpicomm.torch  # noqa: F401 - it registers the backend

    dist.init_process_group("mpicomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    # All ranks must come to the first call of a group, which sets it up, within the timeout.
    start = time.monotonic()
    dist.all_reduce(torch.ones(50_000))
    took_s = torch.tensor(time.monotonic() - start)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    limit_s = max(LEAST_LIMIT_S, 5 * float(took_s))
    (results / "limit_s").write_text(str(limit_s))
    limit = timedelta(seconds=limit_s)
    groups = {name: dist.new_group(timeout=limit) for name in NAMES}
    model = nn.parallel.DistributedDataParallel(nn.Linear(5, 5), process_group=groups["training"])

    def reduce_until_the_rank_dies() -> None:
        for number in range(1_000_000):
            if rank == size - 1 and number == CALLS_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(50_000), group=groups["all_reduce"])

    def wait() -> None:
        work = dist.all_reduce(torch.ones(4), group=groups["wait"], async_op=True)
        assert work is not None
        work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": reduce_until_the_rank_dies,
        "wait": wait,
        "barrier": lambda: dist.barrier(groups["barrier"]),
        "all_gather_object": lambda: dist.all_gather_object([None] * size, "x", group=groups["all_gather_object"]),
        "recv": lambda: dist.recv(torch.ones(4), group_src=size - 1, group=groups["recv"]),
        "training": lambda: model(torch.ones(2, 5)).sum().backward(),
        "destroy": lambda: dist.destroy_process_group(groups["destroy"]),
    }
    make_calls(results, rank, [(name, calls[name]) for name in NAMES])


if __name__ == "__main__":
    run_in_child(main, *sys.argv[1:])
