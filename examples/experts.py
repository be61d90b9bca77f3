"""A mixture of experts reads digits: `mpirun -np 4 python examples/experts.py --plot experts.svg`.

A router sends each digit to two of eight experts, which live on different ranks. Each expert is a matrix, and each rank
trains only its own. At the end each rank trains all experts alone, and compares the losses of all steps. The program
runs on GPUs with CuPy, and on the host with NumPy if there are no GPUs. `--torch` trains with PyTorch and
`mpicomm.torch.experts`. On GPUs a CUDA graph reads new digits, which take other routes in each launch.
"""

import argparse
import importlib.util
import sys
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

EXPERTS, TOP_K, PIXELS, STEPS, RATE = 8, 2, 64, 60, 2.0
TRAINED, BATCH = 1440, 336  # of the 1797 digits; the digits of all ranks in a launch of the graph
TOLERANCE = 1e-5  # of a loss, because ranks add in another order than one rank does, in float32

parser = argparse.ArgumentParser()
parser.add_argument("--torch", action="store_true", help="train with PyTorch")
parser.add_argument(
    "--plot", type=Path, metavar="FILE", help="draw the digits of each expert, as in --plot experts.svg"
)
options = parser.parse_args()
for package, asked in (("matplotlib", options.plot), ("torch", options.torch)):
    if asked and not importlib.util.find_spec(package):
        sys.exit(f"--{'torch' if package == 'torch' else 'plot'} needs {package}: pip install {package}")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
xp: Any = np
if comm.device != "cpu":
    import cupy

    xp = cupy
images, shown = shuffle(*load_digits(return_X_y=True), random_state=1)
images = (images / 16).astype("float32")
numbers = np.random.default_rng(1)  # the same on every rank
router = numbers.normal(0, 0.5, (PIXELS, EXPERTS)).astype("float32")
matrices = numbers.normal(0, 0.1, (EXPERTS, PIXELS, PIXELS)).astype("float32")  # an output begins with ten scores
scores = (images - images.mean(axis=0)) @ router
ids = np.argsort(-scores, axis=1)[:, :TOP_K].copy()
weights = np.exp(np.take_along_axis(scores, ids, axis=1) - scores.max(axis=1, keepdims=True))
weights /= weights.sum(axis=1, keepdims=True)

mine = slice(comm.rank, TRAINED, comm.size)  # the digits of this rank
experts = mpicomm.Experts(comm, EXPERTS, PIXELS, -(-TRAINED // comm.size), TOP_K, "float32")
local = slice(experts.local_experts.start, experts.local_experts.stop)


def routed(digits: slice) -> tuple[Any, Any, Any]:
    """Return the images of some digits, and their experts and weights."""
    return xp.array(images[digits]), xp.array(ids[digits]), xp.array(weights[digits])


def loss_and_slope(output: Any, labels: Any) -> tuple[float, Any]:
    """Return the part of the loss of these digits, and its derivative by the output."""
    shifted = output[:, :10] - output[:, :10].max(axis=1, keepdims=True)
    logarithms = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    right = xp.arange(len(labels)), labels
    slope = xp.zeros_like(output)
    slope[:, :10] = xp.exp(logarithms)
    slope[right] -= 1
    return -float(logarithms[right].sum()) / TRAINED, slope / TRAINED


def train(x: Any, ids: Any, weights: Any, labels: Any, matrices: Any) -> list[float]:
    """Train this rank's experts by the digits of all ranks. Return this rank's part of each loss."""
    losses = []
    for _ in range(STEPS):
        received = experts.dispatch(x, ids, weights)
        ends = received.offsets.tolist()
        z = xp.zeros_like(received.x)
        for matrix, (begin, end) in zip(matrices, pairwise(ends), strict=True):
            xp.matmul(received.x[begin:end], matrix, out=z[begin:end])
        loss, slope = loss_and_slope(experts.combine(z, received), labels)
        losses.append(loss)
        back = experts.dispatch(slope, ids, weights)  # the derivatives take the routes of the digits
        for matrix, (begin, end) in zip(matrices, pairwise(ends), strict=True):
            rows = slice(begin, end)
            matrix -= RATE * received.x[rows].T @ (back.x[rows] * back.weights[rows, None])
    return losses


def train_torch(x: Any, ids: Any, weights: Any, labels: Any, matrices: Any) -> list[float]:
    """Do the same with PyTorch, which computes the derivatives."""
    import torch

    import mpicomm.torch

    x, ids, weights, labels, parameters = (torch.from_dlpack(each) for each in (x, ids, weights, labels, matrices))
    parameters.requires_grad_()

    def layer(rows: torch.Tensor, received: mpicomm.Received) -> torch.Tensor:
        ends = received.offsets.tolist()
        parts = [rows[begin:end] @ matrix for matrix, (begin, end) in zip(parameters, pairwise(ends), strict=True)]
        return torch.cat([*parts, rows[ends[-1] :]])

    losses = []
    for _ in range(STEPS):
        output = mpicomm.torch.experts(experts, x, ids, weights, layer)
        loss = torch.nn.functional.cross_entropy(output[:, :10], labels, reduction="sum") / TRAINED
        losses.append(float(loss.detach()))
        (of_matrices,) = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            parameters -= RATE * of_matrices
    return losses


def apply_all(x: Any, ids: Any, weights: Any, matrices: Any) -> Any:
    """Return the outputs of all experts of these digits on one rank."""
    outputs = xp.zeros_like(x)
    for expert, matrix in enumerate(matrices):
        tokens, slots = xp.nonzero(ids == expert)
        outputs[tokens] += weights[tokens, slots, None] * (x[tokens] @ matrix)
    return outputs


def train_alone(x: Any, labels: Any, matrices: Any) -> list[float]:
    """Train all experts by all digits on this rank."""
    routes = xp.asarray(ids[:TRAINED]), xp.asarray(weights[:TRAINED])
    losses = []
    for _ in range(STEPS):
        loss, slope = loss_and_slope(apply_all(x, *routes, matrices), labels)
        losses.append(loss)
        for expert, matrix in enumerate(matrices):
            tokens, slots = xp.nonzero(routes[0] == expert)
            factors = routes[1][tokens, slots, None]
            matrix -= RATE * x[tokens].T @ (slope[tokens] * factors)
    return losses


def read_in_a_graph(matrices: Any) -> Any:
    """Read the digits that training has not seen, some in each launch of one graph. Return the outputs."""
    part = slice(comm.rank * BATCH // comm.size, (comm.rank + 1) * BATCH // comm.size)
    given = routed(part)
    received = experts.dispatch(*given)
    z = xp.zeros_like(received.x)
    y = experts.combine(z, received)
    rows = xp.arange(experts.capacity)

    def forward() -> None:
        experts.dispatch(*given, out=received)
        z.fill(0)
        for number, matrix in enumerate(matrices):  # the host does not know the rows, so the GPU selects them
            here = (rows >= received.offsets[number]) & (rows < received.offsets[number + 1])
            z[...] += xp.where(here[:, None], (received.x[:, :, None] * matrix).sum(axis=1), 0)
        experts.combine(z, received, out=y)

    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        forward()  # takes memory from the pool, which a capture does not allow
        stream.begin_capture()
        forward()
        graph = stream.end_capture()
        outputs = []
        for start in (0, TRAINED):
            for array, content in zip(given, (images, ids, weights), strict=True):
                array.set(content[start:][part])
            graph.launch(stream)
            outputs.append(y.copy())
        comm.check(stream)
    return outputs[1]


train_any = train_torch if options.torch else train
own = xp.array(matrices[local])
losses = train_any(*routed(mine), xp.array(shown[mine]), own)
comm.check()
together = comm.allreduce(np.array(losses))
whole = xp.array(matrices)
alone = train_alone(xp.asarray(images[:TRAINED]), xp.asarray(shown[:TRAINED]), whole)
difference = float(np.abs(together - alone).max())
if xp is not np:
    part = slice(TRAINED + comm.rank * BATCH // comm.size, TRAINED + (comm.rank + 1) * BATCH // comm.size)
    expected = apply_all(*routed(part), whole)
    difference = max(difference, float(abs(read_in_a_graph(own) - expected).max()) / 10)  # of scores of about 10
difference = comm.allreduce(difference, op=MPI.MAX)
if comm.rank == 0:
    read = apply_all(*routed(slice(TRAINED, None)), whole)[:, :10].argmax(axis=1)
    right = float((read == xp.asarray(shown[TRAINED:])).mean())
    print(f"{comm.size} ranks trained {EXPERTS} experts in {STEPS} steps, and read {right:.1%} of new digits")
    if options.plot:
        import matplotlib.pyplot as plt

        counts = np.zeros((EXPERTS, 10), int)
        np.add.at(counts, (ids.ravel(), np.repeat(shown, TOP_K)), 1)
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        for digit in range(10):
            axes.bar(range(EXPERTS), counts[:, digit], bottom=counts[:, :digit].sum(axis=1), label=str(digit))
        axes.set(xlabel="expert", ylabel="tokens", title="Digits that the router sends to each expert")
        axes.legend(title="digit", ncols=2, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(options.plot)
    print(f"the losses differ by at most {difference:.1e}; {TOLERANCE:g} is allowed")
experts.close()
comm.Free()
if not difference <= TOLERANCE:
    sys.exit(1)
