"""Ranks count numbers in bins that are spread over their memory: `mpirun -np 4 python examples/histogram.py`.

The bins are windows: each rank has a piece of them in the memory of its device. A counter in the memory of rank 0 says
which chunk of the data comes next. A rank draws a chunk by Fetch_and_op, counts it, and adds the counts to the bins of
all ranks by Accumulate. No rank waits for the rank whose memory it changes, and quick ranks draw more chunks.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

CHUNKS, NUMBERS = 40, 50_000  # numbers of a chunk
BINS, LOWEST, HIGHEST = 4096, -4.0, 4.0
TOLERANCE = 1e-9  # of the share of a bin

parser = argparse.ArgumentParser()
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram, as in --plot histogram.svg")
options = parser.parse_args()
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.num_nodes > 1:
    sys.exit("ranks of several nodes cannot open each other's memory: start all ranks on one node")
xp: Any = np
if comm.device != "cpu":
    import cupy

    xp = cupy


def load(number: int) -> Any:
    """Return chunk ``number`` of the data, as if it came from a file."""
    return np.random.default_rng(number).standard_normal(NUMBERS)


# The first bin of each rank, and the end of the last one.
starts = [BINS * rank // comm.size for rank in range(comm.size + 1)]
own = starts[comm.rank + 1] - starts[comm.rank]
bins = mpicomm.Win.Allocate(8 * own, 8, comm=comm, place="device")
counter = mpicomm.Win.Allocate(8 if comm.rank == 0 else 0, 8, comm=comm, place="device")
for win in (bins, counter):
    win.tomemory()[...] = 0
    win.Fence(MPI.MODE_NOSUCCEED)  # no rank counts before all bins are zero

one, drawn, mine = xp.ones(1, "int64"), xp.zeros(1, "int64"), 0
bins.Lock_all()
counter.Lock_all()
while True:
    counter.Fetch_and_op(one, drawn, 0, op=MPI.SUM)  # no other rank gets the same number
    counter.Flush(0)
    chunk = int(drawn[0])  # on a GPU this waits for the stream
    if chunk >= CHUNKS:
        break
    counts = xp.histogram(xp.asarray(load(chunk)), BINS, (LOWEST, HIGHEST))[0].astype("int64")
    for rank in range(comm.size):
        bins.Accumulate(counts[starts[rank] : starts[rank + 1]], rank, op=MPI.SUM)
    mine += 1
bins.Unlock_all()
counter.Unlock_all()

bins.Fence()  # all ranks have counted
found = xp.zeros(BINS, "int64")
for rank in range(comm.size if comm.rank == 0 else 0):
    bins.Get(found[starts[rank] : starts[rank + 1]], rank)
bins.Fence(MPI.MODE_NOSUCCEED)
comm.check()

shares, difference = comm.gather(mine), 0.0
if shares is not None:
    numbers = np.concatenate([load(chunk) for chunk in range(CHUNKS)])
    expected = np.histogram(numbers, BINS, (LOWEST, HIGHEST))[0]
    counted = found if xp is np else found.get()
    difference = float(abs(counted - expected).max() / numbers.size)
    print(f"{comm.size} ranks counted {CHUNKS} chunks of {NUMBERS} numbers in {BINS} bins of all ranks")
    print(f"chunks of the ranks: {', '.join(map(str, shares))}", end="; ")
    print(f"shares of the bins and NumPy's differ by at most {difference:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        edges = np.linspace(LOWEST, HIGHEST, BINS + 1)
        for rank in range(comm.size):
            piece = slice(starts[rank], starts[rank + 1])
            axes.fill_between(edges[:-1][piece], counted[piece], step="post", label=f"bins of rank {rank}")
        axes.set(xlabel="number", ylabel="count", title="A histogram in the memory of all ranks")
        axes.legend()
        figure.savefig(options.plot, dpi=150)
for win in (bins, counter):
    win.Free()
difference = comm.bcast(difference)
comm.Free()
sys.exit(not difference <= TOLERANCE)
