"""Data-parallel training with only CuPy or NumPy: `mpirun -np 4 python examples/train_cupy.py --plot loss.svg`.

Each rank computes the gradients of its share of every batch, from the last layer to the first. As soon as a layer has
its gradient, Iallreduce begins to add it over all ranks. Meanwhile this rank computes the gradient of the layer before.
At the end each rank trains on whole batches without the others, and compares the losses of all steps. The program runs
on GPUs with CuPy, and on the host with NumPy if there are no GPUs. train_torch.py does the same with PyTorch.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

try:
    from sklearn.datasets import load_digits
    from sklearn.utils import shuffle
except ImportError as error:
    sys.exit(f'this example needs scikit-learn ({error}): pip install -e ".[examples]"')

DTYPE = "float64"  # in float32 the rounding errors of the first steps grow until they hide a wrong sum
TOLERANCE = 1e-9  # of a loss, because ranks add the samples of a batch in another order than one rank does
TRAINED = 1440  # of the 1797 digits; the others show how well the network reads new digits
BATCH = 240  # of all ranks together
WIDTHS = (64, 512, 512, 10)  # the pixels of an image, two hidden layers, the ten digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses, as in --plot loss.svg")
options = parser.parse_args()
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")
if options.epochs < 1:
    parser.error(f"--epochs {options.epochs}: use 1 or more")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if BATCH % comm.size:
    sys.exit(f"{comm.size} ranks cannot share {BATCH} samples equally: start 2, 4 or 8 ranks, for example")
xp: Any = np
if comm.device != "cpu":
    import cupy

    xp, beside = cupy, cupy.cuda.Stream(non_blocking=True)


def add_over_ranks(gradient: Any) -> MPI.Request:
    """Begin to add the gradients of all ranks, in place."""
    if xp is np:
        return comm.Iallreduce(MPI.IN_PLACE, gradient)
    beside.wait_event(xp.cuda.get_current_stream().record())  # the current stream computes the gradient
    return comm.Iallreduce(MPI.IN_PLACE, gradient, stream=beside)  # the current stream goes on with the next layer


def forward(network: list[Any], images: Any) -> list[Any]:
    """Return the inputs of all layers, and the output of the last layer."""
    values = [images]
    for layer in network:  # its last row is the bias
        values.append(values[-1] @ layer[:-1] + layer[-1])
        if layer is not network[-1]:
            xp.maximum(values[-1], 0, out=values[-1])
    return values


def cross_entropy(output: Any, shown: Any) -> tuple[Any, Any]:
    """Return this rank's part of the loss of a batch, and its derivative by ``output``."""
    shifted = output - output.max(axis=1, keepdims=True)
    logarithms = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    right = xp.arange(len(shown)), shown
    derivative = xp.exp(logarithms)
    derivative[right] -= 1
    return -logarithms[right].sum() / BATCH, derivative / BATCH  # so the sum over ranks is the mean of the batch


def train(epochs: Any, data: tuple[Any, Any], *, alone: bool) -> tuple[list[Any], Any, float]:
    """Train on the samples with the numbers in ``epochs``.

    Return network, loss of each step, and seconds of an epoch.
    """
    images, shown = data
    rng = np.random.default_rng(1)  # the same network on every rank
    shapes = [(inputs + 1, outputs) for inputs, outputs in pairwise(WIDTHS)]
    network = [xp.asarray(rng.normal(0, shape[0] ** -0.5, shape).astype(DTYPE)) for shape in shapes]
    gradients, momenta = [xp.zeros_like(layer) for layer in network], [xp.zeros_like(layer) for layer in network]
    losses, ends = [], [time.perf_counter()]
    for batches in epochs:
        for batch in batches:
            values = forward(network, images[batch])
            loss, slope = cross_entropy(values[-1], shown[batch])
            requests: list[MPI.Request] = []
            for i in reversed(range(len(network))):
                xp.matmul(values[i].T, slope, out=gradients[i][:-1])
                slope.sum(axis=0, out=gradients[i][-1])
                if not alone:
                    requests.insert(0, add_over_ranks(gradients[i]))
                if i:
                    slope = (slope @ network[i][:-1].T) * (values[i] > 0)
            for i in reversed(range(len(network))):
                if not alone:
                    requests[i].Wait()  # the sums of the layers before may still be in progress
                momenta[i] *= 0.9
                momenta[i] += gradients[i]
                network[i] -= 0.1 * momenta[i]
            losses.append(loss)
        float(losses[-1])  # waits for the GPU
        ends.append(time.perf_counter())
    return network, xp.stack(losses), statistics.median(end - start for start, end in pairwise(ends))


# All ranks draw the same batches, and each rank takes its share of them.
images, shown = shuffle(*load_digits(return_X_y=True), random_state=3)
data = images, shown = xp.asarray((images / 16).astype(DTYPE)), xp.asarray(shown)
order = np.random.default_rng(2)
drawn = np.stack([order.permutation(TRAINED) for _ in range(options.epochs)])
epochs = xp.asarray(drawn.reshape(options.epochs, -1, BATCH))
network, losses, seconds = train(epochs[..., comm.rank :: comm.size], data, alone=False)
comm.Allreduce(MPI.IN_PLACE, losses)
right = float((forward(network, images[TRAINED:])[-1].argmax(axis=1) == shown[TRAINED:]).mean())
slowest = comm.allreduce(seconds, op=MPI.MAX)

of_one = train(epochs, data, alone=True)[1]
difference = float(abs(losses - of_one).max())
if comm.rank == 0:
    rate = f"{TRAINED / slowest:.0f} samples/s"
    print(f"{comm.size} ranks on {xp.__name__}: {rate}, loss {float(losses[-1]):.4f}, {right:.1%} read right")
    print(f"losses of one rank differ by at most {difference:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for curve, width, name in ((losses, 4, f"{comm.size} ranks"), (of_one, 1, "one rank")):
            axes.semilogy(curve.tolist(), linewidth=width, label=name)
        axes.set(xlabel="step", ylabel="loss", title="Training on handwritten digits")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(options.plot, dpi=150)
comm.Free()
sys.exit(not difference <= TOLERANCE)
