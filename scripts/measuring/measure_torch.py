"""Measure PyTorch's backends mpicomm and gloo, or NCCL on GPUs.

Run `mpiexec -n N python scripts/measuring/measure_torch.py`. It times `torch.distributed.all_reduce` of float32
tensors, blocking, and with ``async_op=True`` and a wait right after it. Then it times a step of
DistributedDataParallel: with the network of examples/train_torch.py, and on GPUs with a network that has 268 MB of
gradients.

Both backends have groups of the same ranks in one job, and take turns. A time is the slowest rank's for one of five
calls in a row: the median of the rounds. Before each round the tensor receives other numbers with exact sums. After the
round the script compares each element, so it finds a call that does nothing. ``--kib 64,256`` picks sizes; ``--json
FILE`` adds the rows to a result file.

``--gpu`` takes tensors of GPUs. There a call is issued when it returns, and done later: the table has both times. Ranks
may share a GPU, but NCCL refuses ranks of one host that do. Then each rank counts as another host, by NCCL_HOSTID, and
NCCL sends through sockets, so only the host's time to issue can be compared.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI
from needed import torch
from result_file import Sheet, measuring_parser
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm.torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from train_torch import BATCH, digits, network

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
CALLS = 5
"""Calls in a row. The first call of threads that sleep is slower, because MPI keeps the cores busy between rounds."""
Call = Callable[[], object]


class Checked:
    """A tensor that all-reduces replace by the sum over all ranks, in rounds with different numbers."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._base = torch.arange(nbytes // 4, device=device) % 13
        self._round = 0
        self.tensor, self._expected = torch.empty(2, nbytes // 4, device=device)

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


@dataclass(frozen=True)
class Peer:
    """The backend beside mpicomm, with a group of the same ranks, and the device of the tensors."""

    name: str
    group: Any
    device: torch.device

    def finish(self) -> None:
        """Wait for the GPU, if the tensors are there."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(
    ways: dict[str, Call], rounds: int, peer: Peer, before: Call, after: Call
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds until a call by each way is issued, and until it is done; the ways take turns."""
    issued: dict[str, list[float]] = {name: [] for name in ways}
    done: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + 1):  # the first round sets up memory
        order.append(order.pop(0))
        for name in order:
            before()
            peer.finish()
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                ways[name]()
            called = time.perf_counter()
            peer.finish()
            ended = time.perf_counter()
            after()
            issued[name].append(WORLD.allreduce((called - start) / CALLS, MPI.MAX))
            done[name].append(WORLD.allreduce((ended - start) / CALLS, MPI.MAX))
    return medians(issued), medians(done)


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of all rounds except the first."""
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def all_reduce(nbytes: int, peer: Peer, rounds: int) -> list[Any]:
    """Measure one size, and return its row."""
    checked = Checked(nbytes, peer.device)
    groups, tensor = {"mpicomm": dist.group.WORLD, peer.name: peer.group}, checked.tensor
    ways: dict[str, Call] = {}
    for name, group in groups.items():
        ways[name] = lambda group=group: dist.all_reduce(tensor, group=group)  # type: ignore[misc]
        ways[f"{name}, begun"] = lambda group=group: dist.all_reduce(tensor, group=group, async_op=True).wait()  # type: ignore[misc]
    row: list[Any] = [f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"]
    issued, done = measure(ways, rounds, peer, checked.fill, checked.check)
    for times in (issued, done) if peer.device.type == "cuda" else (done,):
        for begun in ("", ", begun"):
            own, other = 1e6 * times[f"mpicomm{begun}"], 1e6 * times[f"{peer.name}{begun}"]
            row += [own, other, other / own]
    return row


def large_network() -> nn.Module:
    """Return a network for the same images with 67 million parameters, the same ones on every rank."""
    torch.manual_seed(1)
    inner = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 4096), nn.GELU(), *inner, nn.Linear(4096, 10))


@dataclass(frozen=True)
class Training:
    """A network, and how many samples all ranks together have in a step."""

    network: str
    make: Callable[[], nn.Module]
    samples: int

    def share(self, device: torch.device) -> Iterator[torch.Tensor]:
        """Return this rank's images and the digits that they show."""
        for part in digits(device):
            yield part[torch.arange(RANK, self.samples, SIZE, device=device) % len(part)]


SMALL = Training("the network of examples/train_torch.py", network, BATCH)
LARGE = Training("a network of 67 million parameters", large_network, 4096)


def training_steps(training: Training, peer: Peer, rounds: int) -> list[list[Any]]:
    """Measure a step of training, check that all ways train alike, and return a row for each way."""
    images, shown = training.share(peer.device)

    def model() -> nn.Module:
        return training.make().to(peer.device)

    hooked = DistributedDataParallel(model())
    hooked.register_comm_hook(None, mpicomm.torch.allreduce_hook)
    models = {
        peer.name: DistributedDataParallel(model(), process_group=peer.group),
        "mpicomm": DistributedDataParallel(model()),
        "mpicomm, `allreduce_hook`": hooked,
        "none: gradients stay on their rank": model(),
    }

    def step_of(model: nn.Module) -> Call:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), shown).backward()
            optimizer.step()

        return step

    ways = {name: step_of(model) for name, model in models.items()}
    _, times = measure(ways, rounds, peer, lambda: None, lambda: None)
    trained = [list(model.parameters()) for model in models.values()][:-1]
    for others in trained[1:]:
        for one, other in zip(trained[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    return [[name, 1e3 * value, times[peer.name] / value] for name, value in times.items()]


def main() -> None:
    """Measure and print on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--kib", default="4,16,64,256,1024,4096,16384,65536")
    parser.add_argument("--rounds", type=int, default=21, help="of large tensors; small ones and steps have five times")
    parser.add_argument("--gpu", action="store_true", help="on GPUs, against NCCL")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of each rank, because the ranks share the cores
    dist.init_process_group("mpicomm")
    peer = peer_on_gpus() if options.gpu else Peer("gloo", dist.new_group(backend="gloo"), torch.device("cpu"))
    on_gpus = peer.device.type == "cuda"
    software, notes = {"torch": torch.__version__}, []
    cores = len(os.sched_getaffinity(0))
    if cores < SIZE:
        notes.append(f"{SIZE} ranks share {cores} cores, so a rank that waits keeps another from its work.")
    ratio, place = f"{peer.name}'s time by mpicomm's", "GPUs" if on_gpus else "the host"
    columns = ["mpicomm, us", f"{peer.name}, us", ratio]
    columns += [f"begun: {columns[0]}", f"begun: {columns[1]}", ratio]
    text = (
        '"Begun" is `all_reduce(async_op=True)` and a wait right after it. Tensors are float32, and each rank has one '
        "thread."
    )
    if on_gpus:
        columns = [f"issued: {name}" for name in columns] + [f"done: {name}" for name in columns]
        text += " A call is issued when it returns to the program, and done when its kernels have ended."
        software["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if ranks_share_gpus():
            notes.append(
                "Ranks use one GPU in turns of some milliseconds. NCCL goes through sockets, because NCCL_HOSTID makes "
                "each rank a host, so only the host's time to issue can be compared."
            )
    comm = mpicomm.torch.communicator()
    more: dict[str, Any] = {"notes": notes, "versions": software}
    title = f"PyTorch's all_reduce on {place}, backends mpicomm and {peer.name}, {SIZE} ranks"
    with Sheet(comm, options, title, ["size", *columns], text=text, **more) as sheet:
        for kib in options.kib.split(","):
            nbytes = int(kib) << 10
            sheet.add(*all_reduce(nbytes, peer, options.rounds if nbytes > 1 << 20 else 5 * options.rounds))
    columns = ["who averages the gradients", "step, ms", f"{peer.name}'s time by this"]
    for training, rounds in ((SMALL, 5 * options.rounds), *([(LARGE, options.rounds)] if on_gpus else [])):
        title = f"A training step of PyTorch on {place}, {SIZE} ranks, {training.network}"
        text = f"DistributedDataParallel trains on {training.samples} samples of all ranks together, in float32."
        with Sheet(comm, options, title, columns, text=text, **more) as sheet:
            for row in training_steps(training, peer, rounds):
                sheet.add(*row)
    dist.destroy_process_group()


def peer_on_gpus() -> Peer:
    """Return a group of NCCL. Ranks may share a GPU."""
    device = mpicomm.torch.communicator().device
    if device == "cpu":
        sys.exit("--gpu needs a GPU and a PyTorch for GPUs")
    torch.cuda.set_device(device)
    if ranks_share_gpus():
        os.environ["NCCL_HOSTID"] = f"rank {RANK}"
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1, device=f"cuda:{device}"), group=group)  # NCCL sets itself up
    return Peer("NCCL", group, torch.device("cuda", device))


def ranks_share_gpus() -> bool:
    """Return whether there are fewer GPUs than ranks. Collective."""
    return len(set(WORLD.allgather(str(torch.cuda.get_device_properties().uuid)))) < SIZE


main()
