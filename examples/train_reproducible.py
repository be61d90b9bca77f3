"""Training whose losses do not depend on the number of ranks: `mpirun -np 4 python examples/train_reproducible.py`.

Each batch has 16 leaves, and each rank computes the gradients of its leaves, one by one. `tree_sum` adds these leaves,
and an all-reduce with `order="tree"` adds the sums of the ranks, along the same binary tree. So 1, 2, 4, 8 and 16 ranks
get the same bits. At the end each rank trains on all leaves without the others, and compares every loss. The program
runs on GPUs with CuPy, and on the host with NumPy if there are no GPUs.
"""

import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

LEAVES = 16
SAMPLES = 32  # of a leaf
STEPS = 50
INPUTS, HIDDEN = 8, 32

comm = mpicomm.Communicator(MPI.COMM_WORLD, leaves=LEAVES)
if LEAVES % comm.size:
    sys.exit(f"{comm.size} ranks cannot hold {LEAVES} leaves in equal blocks: start 1, 2, 4, 8 or 16 ranks")
xp: Any = np
if comm.device != "cpu":
    import cupy

    xp = cupy


def gradient(network: Any, leaf: tuple[Any, Any]) -> Any:
    """Return the gradient of the squared error on the samples of a leaf; the error itself is its last element."""
    inputs, wanted = leaf
    inner, outer = network[: INPUTS * HIDDEN].reshape(INPUTS, HIDDEN), network[INPUTS * HIDDEN :]
    hidden = xp.tanh(inputs @ inner)
    error = hidden @ outer - wanted
    slope = 2 / (LEAVES * SAMPLES) * error
    of_inner = inputs.T @ (xp.outer(slope, outer) * (1 - hidden * hidden))
    squares = (error * error).sum(keepdims=True) / (LEAVES * SAMPLES)
    return xp.concatenate([of_inner.ravel(), hidden.T @ slope, squares])


def train(leaves: Sequence[tuple[Any, Any]], add: Callable[[Any], Any]) -> Any:
    """Train on some leaves, with ``add`` to add the gradients of other ranks; return the losses of all steps."""
    network = xp.asarray(np.random.default_rng(1).normal(0, 0.3, (INPUTS + 1) * HIDDEN).astype("float32"))
    losses = []
    for _ in range(STEPS):
        total = add(mpicomm.tree_sum(xp.stack([gradient(network, leaf) for leaf in leaves])))
        losses.append(total[-1])
        network = network - xp.float32(0.1) * total[:-1]
    return xp.stack(losses)


def add_over_ranks(mine: Any) -> Any:
    """Return the sum of the gradients of all ranks."""
    total = xp.empty_like(mine)
    comm.Allreduce(mine, total, order="tree")
    return total


# All ranks draw the same samples, and each rank takes a block of leaves.
rng = np.random.default_rng(0)
inputs = rng.normal(0, 1, (LEAVES, SAMPLES, INPUTS)).astype("float32")
leaves = [(xp.asarray(leaf), xp.asarray(np.sin(leaf.sum(axis=1)))) for leaf in inputs]
own = LEAVES // comm.size
losses = train(leaves[comm.rank * own : (comm.rank + 1) * own], add_over_ranks)
of_one = train(leaves, lambda total: total)
same = losses.tobytes() == of_one.tobytes()
if comm.rank == 0:
    print(f"{comm.size} ranks: loss {float(losses[0]):.4f} to {float(losses[-1]):.4f}, ", end="")
    print(f"{'every bit' if same else 'NOT'} as of one rank; SHA-256 {sha256(losses.tobytes()).hexdigest()[:16]}")
comm.Free()
sys.exit(not same)
