"""Measure PyTorch's backends mpicomm and gloo on the host: `mpiexec -n N python scripts/measure_torch.py`.

`torch.distributed.all_reduce` of float32 tensors, blocking, and begun with ``async_op=True`` and waited for at once.
Then a step of the network of examples/train_torch.py with DistributedDataParallel. Both backends have groups of the
same ranks in one job, and take turns. A time is the slowest rank's for one of five calls in a row: the median of the
rounds. Before each round the tensor receives other numbers, whose sums are exact. After it each element is compared,
so a call that does nothing is found. ``--kib 64,256`` picks sizes; ``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from result_file import Table, add_tables, command, hardware
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm.torch
from mpicomm.cli.arguments import output_file
from mpicomm.cli.machine import processor

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_torch import BATCH, digits, network

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALLS = 5
"""Calls in a row. Between rounds MPI keeps the cores busy, which makes the first call of threads that sleep slower."""
Call = Callable[[], object]


class Checked:
    """A tensor that all-reduces replace by the sum over all ranks, in rounds with different numbers."""

    def __init__(self, nbytes: int) -> None:
        self._base = torch.arange(nbytes // 4) % 13
        self._round = 0
        self.tensor, self._expected = torch.empty(2, nbytes // 4)

    def fill(self) -> None:
        """Put this rank's numbers into the tensor."""
        self._round = (self._round + 1) % 100
        torch.add(self._base, RANK + self._round, out=self.tensor)
        # Each later call sums the sum again.
        first = (self._base + self._round) * SIZE + SIZE * (SIZE - 1) // 2
        self._expected.copy_(first * SIZE ** (CALLS - 1))

    def check(self) -> None:
        """Exit if the tensor is not the sum over all ranks. It compares at once, or it would miss an early return."""
        if not torch.equal(self.tensor, self._expected):
            sys.exit(f"rank {RANK}: all_reduce of {self.tensor.nbytes} bytes gave a wrong sum")


def measure(ways: dict[str, Call], rounds: int, before: Call, after: Call) -> dict[str, float]:
    """Return the seconds of a call by each way; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + 1):  # the first round sets up memory
        order.append(order.pop(0))
        for name in order:
            before()
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                ways[name]()
            taken = (time.perf_counter() - start) / CALLS
            after()
            seconds[name].append(WORLD.allreduce(taken, MPI.MAX))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def all_reduce(nbytes: int, gloo: dist.ProcessGroup, rounds: int) -> list[Any]:
    """Measure one size, and return its row."""
    checked = Checked(nbytes)
    groups, tensor = {"mpicomm": dist.group.WORLD, "gloo": gloo}, checked.tensor
    ways: dict[str, Call] = {}
    for name, group in groups.items():
        ways[name] = lambda group=group: dist.all_reduce(tensor, group=group)  # type: ignore[misc]
        ways[f"{name}, begun"] = lambda group=group: dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[misc]
    times = {name: 1e6 * value for name, value in measure(ways, rounds, checked.fill, checked.check).items()}
    row: list[Any] = [f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"]
    for begun in ("", ", begun"):
        own, other = times[f"mpicomm{begun}"], times[f"gloo{begun}"]
        row += [round(own, 1), round(other, 1), round(other / own, 2)]
    return row


def training_steps(gloo: dist.ProcessGroup, rounds: int) -> list[list[Any]]:
    """Measure a step of training, check that all ways train alike, and return a row for each way."""
    images, shown = (part[RANK:BATCH:SIZE] for part in digits(torch.device("cpu")))
    hooked = DistributedDataParallel(network())
    hooked.register_comm_hook(None, mpicomm.torch.allreduce_hook)
    models = {
        "gloo": DistributedDataParallel(network(), process_group=gloo),
        "mpicomm": DistributedDataParallel(network()),
        "mpicomm, `allreduce_hook`": hooked,
        "none: gradients stay on their rank": network(),
    }

    def step_of(model: nn.Module) -> Call:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), shown).backward()
            optimizer.step()

        return step

    ways = {name: step_of(model) for name, model in models.items()}
    times = measure(ways, rounds, lambda: None, lambda: None)
    trained = [list(model.parameters()) for model in models.values()][:-1]
    for others in trained[1:]:
        for one, other in zip(trained[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return [[name, round(1e3 * value, 2), round(times["gloo"] / value, 2)] for name, value in times.items()]


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kib", default="4,16,64,256,1024,4096,16384,65536")
    parser.add_argument("--rounds", type=int, default=21, help="of large tensors; small ones and steps have five times")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    torch.set_num_threads(1)  # of each rank, because the ranks share the cores
    dist.init_process_group("mpicomm")
    gloo = dist.new_group(backend="gloo")
    rows = []
    for kib in options.kib.split(","):
        nbytes = int(kib) << 10
        rows.append(all_reduce(nbytes, gloo, options.rounds if nbytes > 1 << 20 else 5 * options.rounds))
    steps = training_steps(gloo, 5 * options.rounds)
    if RANK == 0:
        sys.stdout.write("".join(f"{row}\n" for row in rows + steps))
    if RANK == 0 and options.json is not None:
        add_tables(options.json, tables(rows, steps))
    dist.destroy_process_group()


def tables(rows: list[list[Any]], steps: list[list[Any]]) -> list[Table]:
    """Return the tables of a result file."""
    where, started = hardware([], processor()), command(SIZE)
    software, notes = {"torch": torch.__version__}, []
    cores = len(os.sched_getaffinity(0))
    if cores < SIZE:
        notes.append(f"{SIZE} ranks share {cores} cores, so a rank that waits keeps another from its work.")
    ratio = "gloo's time by mpicomm's"
    calls = Table(
        "Calls",
        f"PyTorch's all_reduce on the host, backends mpicomm and gloo, {SIZE} ranks",
        where,
        columns=["size", "mpicomm, us", "gloo, us", ratio, "begun: mpicomm, us", "begun: gloo, us", ratio],
        rows=rows,
        text='"Begun" is `all_reduce(async_op=True)`, waited for at once. float32; each rank has one thread.',
        notes=notes,
        command=started,
        versions=software,
    )
    training = Table(
        "Calls",
        f"A training step of PyTorch on the host, {SIZE} ranks",
        where,
        columns=["who averages the gradients", "step, ms", "gloo's time by this"],
        rows=steps,
        text=f"DistributedDataParallel, the network of examples/train_torch.py, {BATCH} samples of all ranks together.",
        notes=notes,
        command=started,
        versions=software,
    )
    return [calls, training]


main()
