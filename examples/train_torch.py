"""Data-parallel training of a network that reads digits: `mpirun -np 4 python examples/train_torch.py --mode ddp`.

Each rank computes the gradients of its share of every batch, and all ranks take the mean of these gradients. `--mode`
chooses who averages: `comm`, this program by one Allreduce; `ddp`, PyTorch's DistributedDataParallel; `fsdp`, PyTorch's
fully_shard, which also leaves each rank only a part of the parameters. `--wire-dtype` lets the gradients of `comm` and
`ddp` travel as fp8 or int8. `--check` also trains on one rank, and compares the losses of all steps. The program
runs on GPUs, or on the host if there are no GPUs.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from mpi4py import MPI

import mpicomm

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from sklearn.utils import shuffle
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import mpicomm.torch
except ImportError as error:
    sys.exit(f'this example needs PyTorch and scikit-learn ({error}): pip install -e ".[torch,examples]"')

TOLERANCE = 1e-4  # of a loss, because ranks add the samples of a batch in another order than one rank does, in float32
QUANTIZED_TOLERANCE = {"float8_e4m3fn": 0.02, "int8": 0.005}  # because each step rounds the gradients
TRAINED = 1440  # of the 1797 digits; the others show how well the network reads new digits
BATCH = 240  # of all ranks together

Data = tuple[torch.Tensor, torch.Tensor]


def network() -> nn.Module:
    """Return a network for images of 8 x 8 pixels, with the same parameters on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def digits(device: torch.device) -> Data:
    """Return all images and the digits that they show."""
    images, shown = shuffle(*load_digits(return_X_y=True), random_state=3)
    return torch.tensor(images / 16, dtype=torch.float32, device=device), torch.tensor(shown, device=device)


def gradients_in_one_tensor(model: nn.Module) -> torch.Tensor:
    """Return a tensor that holds the gradients of all parameters, so that one call averages them."""
    parameters = list(model.parameters())
    counts = [parameter.numel() for parameter in parameters]
    gradients = torch.zeros(sum(counts), device=parameters[0].device)
    for parameter, part in zip(parameters, gradients.split(counts), strict=True):
        parameter.grad = part.view_as(parameter)
    return gradients


def train(
    model: nn.Module, epochs: torch.Tensor, data: Data, average: Callable[[], None]
) -> tuple[torch.Tensor, float]:
    """Train on the samples with the numbers in ``epochs``.

    Return the loss of each step, and the seconds of an epoch.
    """
    images, shown = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, ends = [], [time.perf_counter()]
    for batches in epochs:
        for batch in batches:
            optimizer.zero_grad(set_to_none=False)  # it leaves the gradients in the same memory
            loss = nn.functional.cross_entropy(model(images[batch]), shown[batch])
            loss.backward()
            average()
            optimizer.step()
            losses.append(loss.detach())
        losses[-1].item()  # waits for the GPU
        ends.append(time.perf_counter())
    return torch.stack(losses), statistics.median(end - start for start, end in pairwise(ends))


def plot(path: Path, curves: dict[str, torch.Tensor]) -> None:
    """Draw the loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for width, (name, losses) in zip((4, 1), curves.items(), strict=False):
        axes.semilogy(losses.cpu(), linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train, and print the results on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("comm", "ddp", "fsdp"), default="comm")
    parser.add_argument("--wire-dtype", choices=tuple(QUANTIZED_TOLERANCE), help="gradients travel quantized")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare with the losses of one rank")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses, as in --plot loss.svg")
    options = parser.parse_args()
    if options.plot and not importlib.util.find_spec("matplotlib"):
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    wire_dtype = options.wire_dtype
    if wire_dtype and options.mode == "fsdp":
        sys.exit("--wire-dtype is for the modes comm and ddp, because PyTorch itself averages in fsdp")

    if options.mode == "comm":
        comm = mpicomm.Communicator(MPI.COMM_WORLD)
    else:
        dist.init_process_group("mpicomm")  # MPI gives rank, size and address
        comm = mpicomm.torch.communicator()
    if BATCH % comm.size:
        sys.exit(f"{comm.size} ranks cannot share {BATCH} samples equally: start 2, 4 or 8 ranks, for example")
    device = torch.device("cpu" if comm.device == "cpu" else f"cuda:{comm.device}")

    model, gradients = network().to(device), None
    if options.mode == "comm":
        gradients = gradients_in_one_tensor(model)
    elif options.mode == "ddp":
        model = DistributedDataParallel(model)
        if wire_dtype:
            state = mpicomm.torch.AllreduceState(wire_dtype=getattr(torch, wire_dtype))
            model.register_comm_hook(state, mpicomm.torch.allreduce_hook)
    else:
        mesh = init_device_mesh(device.type, (comm.size,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)

    def average() -> None:
        if gradients is not None:  # DDP and FSDP average them in backward()
            comm.Allreduce(MPI.IN_PLACE, gradients, op=mpicomm.AVG, wire_dtype=wire_dtype)

    # All ranks draw the same batches, and each rank takes its share of them.
    order = torch.Generator().manual_seed(2)
    epochs = torch.stack([torch.randperm(TRAINED, generator=order) for _ in range(options.epochs)])
    batches = epochs.view(options.epochs, -1, BATCH).to(device)
    images, shown = data = digits(device)
    losses, seconds = train(model, batches[..., comm.rank :: comm.size], data, average)
    comm.Allreduce(MPI.IN_PLACE, losses, op=mpicomm.AVG)
    curves = {f"{comm.size} ranks": losses}
    with torch.no_grad():
        right = (model(images[TRAINED:]).argmax(1) == shown[TRAINED:]).float().mean().item()
    rate = comm.allreduce(TRAINED / seconds) / comm.size
    lines = [f"{comm.size} ranks, {options.mode}: {rate:.0f} samples/s, loss {losses[-1]:.4f}, {right:.1%} read right"]

    difference, tolerance = 0.0, QUANTIZED_TOLERANCE.get(wire_dtype, TOLERANCE)
    if options.check:
        curves["one rank"], _ = train(network().to(device), batches, data, lambda: None)
        difference = (losses - curves["one rank"]).abs().max().item()
        lines.append(f"losses of one rank differ by at most {difference:.1e}; {tolerance:.0e} is allowed")
    if comm.rank == 0:
        print(*lines, sep="\n")
        if options.plot:
            plot(options.plot, curves)
    if options.mode == "comm":
        comm.Free()
    else:
        dist.destroy_process_group()
    sys.exit(not difference <= tolerance)


if __name__ == "__main__":
    main()
