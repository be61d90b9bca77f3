"""A network with one layer on each rank: `mpirun -np 4 python examples/pipeline.py --plot pipeline.svg`.

A batch goes through the ranks in micro-batches, so that all ranks have work at the same time. Each rank puts its output
into the memory of the next rank and signals. On the way back the derivatives go to the previous rank. At the beginning,
in the middle and at the end the pipeline is empty. This is its bubble, which becomes smaller with more micro-batches.
`--plot` draws which micro-batch each rank worked on, and when. The program compares the gradients with the gradients of
one rank.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batches", type=int, default=8, metavar="N")
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the work of all ranks, as in --plot pipeline.svg")
options = parser.parse_args()
if options.micro_batches < 1:
    parser.error(f"--micro-batches {options.micro_batches}: use 1 or more")
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.num_nodes > 1:
    sys.exit("put needs memory of the same node: start all ranks on one node")
xp: Any = np
samples, width = 256, 512  # of a micro-batch
if comm.device != "cpu":
    import cupy

    xp, samples, width = cupy, 1024, 4096

count, first, last = options.micro_batches, comm.rank == 0, comm.rank == comm.size - 1
TOLERANCE = 1e-4  # of the largest gradient, in float32


def random(seed: int, *shape: int) -> Any:
    """Return random numbers, the same on every rank."""
    return xp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype="float32"))


def layer_of(rank: int) -> Any:
    """Return the weights of the layer of a rank."""
    return random(rank + 2, width, width) / width**0.5


def forward(weights: Any, values: Any) -> Any:
    """Return the output of a layer."""
    return xp.tanh(values @ weights)


def backward(weights: Any, values: Any, output: Any, slope: Any) -> tuple[Any, Any]:
    """Return the derivatives of the loss by the weights and by the inputs, for its derivative by the output."""
    slope = slope * (1 - output * output)
    return values.T @ slope, slope @ weights.T


inputs, targets = random(0, count, samples, width), random(1, count, samples, width)
weights = layer_of(comm.rank)
# A slot for each micro-batch. The backward pass needs the inputs again, so they stay where the previous rank put them.
arrived, returned = comm.empty((count, samples, width), "float32"), comm.empty((count, samples, width), "float32")


def mark() -> Any:
    """Return the present time. On a GPU it is an event, which gets the time at which the stream comes here."""
    if xp is np:
        return time.perf_counter()
    event = xp.cuda.Event()
    event.record()
    return event


def run() -> tuple[Any, list[tuple[str, int, Any, Any]]]:
    """Send all micro-batches forward and back. Return this rank's gradient, and the begin and end of each step."""
    outputs: list[Any] = []
    gradient, steps = xp.zeros_like(weights), []
    for i in range(count):
        if not first:
            arrived.wait_signal(comm.rank - 1)
        begin = mark()
        outputs.append(forward(weights, (inputs if first else arrived.local)[i]))
        if not last:
            arrived.put(outputs[i], comm.rank + 1, offset=i * samples * width)
            arrived.signal(comm.rank + 1)  # the next rank sees the signal after the data
        steps.append(("forward", i, begin, mark()))
    for i in reversed(range(count)):
        if not last:
            returned.wait_signal(comm.rank + 1)
        begin = mark()
        slope = outputs[i] - targets[i] if last else returned.local[i]  # the loss is half the squared error
        by_weights, by_inputs = backward(weights, (inputs if first else arrived.local)[i], outputs[i], slope)
        gradient += by_weights
        if not first:
            returned.put(by_inputs, comm.rank - 1, offset=i * samples * width)
            returned.signal(comm.rank - 1)
        steps.append(("backward", i, begin, mark()))
    return gradient, steps


def run_alone() -> Any:
    """Compute all layers on this rank. Return the gradient of this rank's layer."""
    layers = [layer_of(rank) for rank in range(comm.size)]
    gradient = xp.zeros_like(weights)
    for i in reversed(range(count)):
        values = [inputs[i]]
        for layer in layers:
            values.append(forward(layer, values[-1]))
        slope = values[-1] - targets[i]
        for rank in reversed(range(comm.rank, comm.size)):
            by_weights, slope = backward(layers[rank], values[rank], values[rank + 1], slope)
        gradient += by_weights
    return gradient


run()  # loads kernels
comm.check()
comm.Barrier()  # all ranks have read their slots
arrived.local[...] = returned.local[...] = 0  # else a rank that does not wait would find the right values there
comm.check()
comm.Barrier()
origin, origin_s = mark(), time.perf_counter()  # this clock is the same for all ranks of a machine
gradient, steps = run()
comm.check()  # waits for the stream, and raises if a rank did not come


def seconds(at: Any) -> float:
    """Return a time on the clock of all ranks."""
    return float(at if xp is np else origin_s + xp.cuda.get_elapsed_time(origin, at) / 1000)


expected = run_alone()
error = float(np.max(comm.allgather(float(abs(gradient - expected).max() / abs(expected).max()))))
rows = comm.gather([(name, i, seconds(begin), seconds(end)) for name, i, begin, end in steps])
if rows is not None:
    start, end = min(row[0][2] for row in rows), max(row[-1][3] for row in rows)
    busy = sum(step[3] - step[2] for row in rows for step in row)
    idle, least = 1 - busy / (comm.size * (end - start)), (comm.size - 1) / (count + comm.size - 1)
    summary = f"{comm.size} ranks, {count} micro-batches: {1000 * (end - start):.1f} ms, {idle:.0%} of it idle"
    print(f"{summary} ({least:.0%} if all steps take the same time)")
    print(f"gradients of one rank differ by at most {error:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 1.2 + 0.55 * comm.size), layout="constrained")
        axes = figure.subplots()
        for rank, row in enumerate(rows):
            for name, i, begin, finish in row:
                left, duration = 1000 * (begin - start), 1000 * (finish - begin)
                color = "tab:blue" if name == "forward" else "tab:orange"
                label = name if (rank, i) == (0, 0) else ""
                axes.barh(rank, duration, 0.8, left, color=color, edgecolor="white", label=label)
                axes.text(left + duration / 2, rank, i, ha="center", va="center", color="white", clip_on=True)
        axes.set(xlabel="ms", xlim=(0, 1000 * (end - start)), facecolor="0.92")
        axes.set_title(summary, loc="left")
        axes.set_yticks(range(comm.size), [f"rank {rank}" for rank in range(comm.size)])
        axes.invert_yaxis()
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0)
        figure.savefig(options.plot, dpi=150)
comm.Free()
sys.exit(not error <= TOLERANCE)
