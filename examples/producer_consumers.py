"""One rank loads data, and the others train on it in place: `mpirun -np 4 python examples/producer_consumers.py`.

Each consumer trains the same model with another learning rate. The producer writes the batches into a ring of slots in
its memory. The consumers compute with them there, through `peer(0)`: on GPUs their kernels read over NVLink or PCIe. So
there is only one copy of a batch, and no rank sends or receives it. Two things order the accesses:

* signals, which are counted: the producer signals a full slot to each consumer, and each consumer signals back after it
  has read the slot. On GPUs both happen inside the streams, and no host waits.
* a shared event, for data that is written once: the samples with which consumers test their models at the end.
"""

import argparse
import importlib.util
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

PRODUCER = 0
BATCHES, SLOTS = 60, 3
FEATURES, SAMPLES = 255, 2048  # of a batch: a row for each feature, and a last row with the values to predict
TOLERANCE = 1e-4  # of a loss, in float32

parser = argparse.ArgumentParser()
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses, as in --plot loss.svg")
options = parser.parse_args()
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
consumers = range(1, comm.size)
if not consumers:
    sys.exit("this example needs a producer and a consumer: start at least 2 ranks")
if comm.num_nodes > 1:
    sys.exit("ranks of several nodes cannot read each other's memory: start all ranks on one node")
xp: Any = np
if comm.device != "cpu":
    import cupy

    xp = cupy


def load(number: int) -> Any:
    """Return batch ``number``, as if it came from a file: features, and a weighted sum of them with some noise."""
    rng = np.random.default_rng(number)
    batch = rng.standard_normal((FEATURES + 1, SAMPLES), dtype="float32")
    batch[-1] = np.sin(np.arange(FEATURES, dtype="float32")) @ batch[:-1] + 0.1 * batch[-1]
    return xp.asarray(batch)


def loss_of(weights: Any, batch: Any) -> tuple[Any, Any]:
    """Return the mean squared error of a model, and its derivative. It reads the batch without a copy."""
    error = weights @ batch[:-1] - batch[-1]
    return (error * error).mean(), batch[:-1] @ error * (2 / SAMPLES)


# Every rank has a ring, because a symmetric array has the same shape everywhere. Only the producer's ring is used.
ring = comm.empty((SLOTS, FEATURES + 1, SAMPLES), "float32")
test = comm.empty((FEATURES + 1, SAMPLES), "float32")
written = comm.shared_event()


def produce() -> None:
    """Write all batches into the ring of this rank."""
    for number in range(BATCHES):
        if number >= SLOTS:
            for consumer in consumers:
                ring.wait_signal(consumer)  # the consumer has read the earlier batch in this slot
        ring.local[number % SLOTS] = load(number)
        for consumer in consumers:
            ring.signal(consumer)  # the slot is full


def consume(rate: float) -> tuple[Any, Any]:
    """Train a model on the batches in the ring of the producer. Return the model and the loss of each batch."""
    batches = ring.peer(PRODUCER)  # the memory itself, as a NumPy or CuPy array
    weights, losses = xp.zeros(FEATURES, "float32"), xp.empty(BATCHES, "float32")
    for number in range(BATCHES):
        ring.wait_signal(PRODUCER)
        losses[number], slope = loss_of(weights, batches[number % SLOTS])
        ring.signal(PRODUCER)  # on a GPU: when the stream has come here, so the kernels above have read the slot
        weights -= rate * slope
    return weights, losses


def consume_alone(rate: float) -> Any:
    """Train on batches that this rank loads itself. Return the loss of each batch."""
    weights, losses = xp.zeros(FEATURES, "float32"), xp.empty(BATCHES, "float32")
    for number in range(BATCHES):
        losses[number], slope = loss_of(weights, load(number))
        weights -= rate * slope
    return losses


if comm.rank == PRODUCER:
    test.local[...] = load(BATCHES)
    written.record()  # marks the copy above in the current stream
comm.Barrier()  # the hosts know that the producer has recorded the event; the copy may still be in progress

rate, result, difference = 0.04 * 8 ** ((comm.rank - 1) / max(1, comm.size - 2)), None, 0.0  # from 0.04 to 0.32
if comm.rank == PRODUCER:
    produce()
else:
    tracemalloc.start()  # it counts NumPy's memory
    weights, losses = consume(rate)
    written.wait(PRODUCER)  # later work of the current stream comes after the copy
    tested = loss_of(weights, test.peer(PRODUCER))[0]
    comm.check()  # waits for the stream, and raises if the producer did not come
    allocated = tracemalloc.get_traced_memory()[1] if xp is np else xp.get_default_memory_pool().total_bytes()
    tracemalloc.stop()
    difference = float(abs(losses - consume_alone(rate)).max())
    result = rate, losses.tolist(), float(tested), allocated
comm.Barrier()  # the producer keeps its memory until all have read it

results, difference, copied = comm.gather(result), float(np.max(comm.allgather(difference))), False
if results is not None:
    rates, curves, errors, allocations = zip(*results[1:], strict=True)
    best, batch, most = int(np.argmin(errors)), ring.nbytes / SLOTS / 2**20, max(allocations) / 2**20
    copied = most >= batch
    where = f"{len(rates)} of {comm.size} ranks read {BATCHES} batches of {batch:.0f} MiB in {SLOTS} slots of rank 0"
    print(f"{where}, in place: each allocated {most:.2f} MiB at most")
    print(f"learning rate {rates[best]:.2f} has the least error, {errors[best]:.4f}", end="; ")
    print(f"losses with own batches differ by at most {difference:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for rank, (rate, curve) in enumerate(zip(rates, curves, strict=True), start=1):
            axes.semilogy(curve, label=f"rank {rank}, learning rate {rate:.2f}")
        axes.set(xlabel="batch", ylabel="loss", title="Consumers train on the batches of one producer")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(options.plot, dpi=150)
comm.Free()
sys.exit(copied or not difference <= TOLERANCE)
