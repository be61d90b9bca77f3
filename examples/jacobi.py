"""Heat spreads over a plate, in four ways: `mpirun -np 4 python examples/jacobi.py --plot heat.png`.

Each rank has a tile of the plate. In each time step it needs the edges of the tiles around its tile, and gets them by

1. one Neighbor_alltoallw, with datatypes that say where the edges lie,
2. four Sendrecv with the same datatypes,
3. slices of the neighbours' memory, and signals that say when a rank may read them,
4. one kernel for all, which stores edges in the neighbours' memory while it computes: `relax_all` in jacobi.cu.

All ways give the heat that one rank computes, bit for bit. On GPUs a hundred steps are one CUDA graph. On the host
NumPy computes, and the fourth way does not exist.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

Way = Callable[[Any, Any], None]
"""Computes one step from a plane into the other plane."""

parser = argparse.ArgumentParser()
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the heat, as in --plot heat.png")
options = parser.parse_args()
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.num_nodes > 1:
    sys.exit("ranks read each other's memory only on one node: start all ranks on one node")
xp: Any = np
rows, columns, steps, in_graph = 60, 90, 200, 0  # of a tile
if comm.device != "cpu":
    import cupy

    xp, rows, columns, steps, in_graph = cupy, 512, 512, 500, 100

dims = MPI.Compute_dims(comm.size, 2)
grid: Any = comm.Create_cart(dims)
(above, below), (left, right) = grid.Shift(0, 1), grid.Shift(1, 1)  # MPI.PROC_NULL at the ends of the plate

# A tile, and around it the edges of other tiles. There are two planes, because a step reads one and writes the other.
planes = grid.empty((2, rows + 2, columns + 2), "float64")
first, second = planes.local


def relax(before: Any, after: Any) -> None:
    """Compute the heat one step later: half of a cell itself, and an eighth of each neighbour."""
    inner = after[1:-1, 1:-1]
    xp.add(before[:-2, 1:-1], before[2:, 1:-1], out=inner)  # without temporary arrays
    inner += before[1:-1, :-2]
    inner += before[1:-1, 2:]
    inner *= 0.25
    inner += before[1:-1, 1:-1]
    inner *= 0.5


relax_tile = relax
if xp is not np:  # one kernel, so that the ways differ only in how they move edges
    source = Path(__file__).with_suffix(".cu").read_text()
    # Without -fmad=false a product and a sum could become one rounding, and the last bits would differ.
    compiler = ("-std=c++17", "-fmad=false", f"-I{mpicomm.include_dir()}")
    kernels = xp.RawModule(code=source, options=compiler)
    relax_kernel, relax_all = kernels.get_function("relax"), kernels.get_function("relax_all")
    # A kernel that waits may keep its GPU from loading another kernel. The read of an attribute loads both kernels
    # before.
    assert relax_kernel.num_regs > 0 and relax_all.num_regs > 0
    blocks, threads, shape = (rows // 8,), (128,), (xp.uint32(rows), xp.uint32(columns))

    def relax_tile(before: Any, after: Any) -> None:
        """Compute the heat of a tile one step later."""
        relax_kernel(blocks, threads, (before, after, *shape))


# The first way.
def part(row: int, column: int, height: int, width: int) -> MPI.Datatype:
    """Return the datatype of a part of a plane."""
    return MPI.DOUBLE.Create_subarray([rows + 2, columns + 2], [height, width], [row, column]).Commit()


# MPI's order of the neighbours: above, below, left, right.
sent = [part(1, 1, 1, columns), part(rows, 1, 1, columns), part(1, 1, rows, 1), part(1, columns, rows, 1)]
received = [
    *(part(0, 1, 1, columns), part(rows + 1, 1, 1, columns)),
    *(part(1, 0, rows, 1), part(1, columns + 1, rows, 1)),
]
counts, displacements = [1] * 4, [0] * 4


def alltoallw(before: Any, after: Any) -> None:
    """Exchange all edges in one call."""
    grid.Neighbor_alltoallw([before, counts, displacements, sent], [before, counts, displacements, received])
    relax_tile(before, after)


# The second way.
ABOVE, BELOW, LEFT, RIGHT = range(4)
in_stream_order = {} if xp is np else {"algorithm": "stream"}  # so that a CUDA graph can hold the messages


def sendrecv(before: Any, after: Any) -> None:
    """Send each edge to one side, and receive the edge that comes from the other side."""
    for to, dest, come, origin in (
        (ABOVE, above, BELOW, below),
        (BELOW, below, ABOVE, above),
        (LEFT, left, RIGHT, right),
        (RIGHT, right, LEFT, left),
    ):
        grid.Sendrecv([before, 1, sent[to]], dest, 0, [before, 1, received[come]], origin, 0, **in_stream_order)
    relax_tile(before, after)


# The third way. For each side: the place of an edge in this rank's planes, and its place in the neighbour's planes.
inner = slice(1, -1)
sides = [
    (above, np.s_[0, inner], np.s_[rows, inner]),
    (below, np.s_[rows + 1, inner], np.s_[1, inner]),
    (left, np.s_[inner, 0], np.s_[inner, columns]),
    (right, np.s_[inner, columns + 1], np.s_[inner, 1]),
]
neighbours = [side for side in sides if side[0] != MPI.PROC_NULL]


def slices(before: Any, after: Any) -> None:
    """Read the edges in the neighbours' memory."""
    # The signal says that this rank's cells in `before` are complete. It also says that this rank has read its
    # neighbours' edges in `after`, so that they may overwrite these edges.
    for peer, _, _ in neighbours:
        planes.signal(peer)
    for peer, here, there in neighbours:
        planes.wait_signal(peer)
        before[here] = planes.peer(peer)[0 if before is first else 1][there]
    relax_tile(before, after)


ways: dict[str, Way] = {"Neighbor_alltoallw": alltoallw, "Sendrecv": sendrecv, "slices of peers' memory": slices}

# The fourth way. The kernel counts its steps, and so knows the plane of each step, also in a CUDA graph.
OWN_KERNEL = "one kernel for all"
if xp is not np:
    flags = grid.zeros((4, *blocks), "uint64")
    counted, failed = xp.zeros(blocks, "uint64"), xp.zeros(1, "uint32")
    around, timeout_ns = xp.array([above, below, left, right], "int32"), xp.uint64(10**10)
    addresses = (planes.pointers, flags.pointers)
    arguments = (*addresses, xp.uint32(grid.rank), around, counted, *shape, timeout_ns, failed)
    ways[OWN_KERNEL] = lambda before, after: relax_all(blocks, threads, arguments)

# The whole plate with its rim: cold, with hot discs, and hot at the top.
plate = np.zeros((dims[0] * rows + 2, dims[1] * columns + 2))
down, across = np.ogrid[: plate.shape[0], : plate.shape[1]]
for height, width, radius in np.random.default_rng(5).random((12, 3)):
    distance = np.hypot(down - height * plate.shape[0], across - width * plate.shape[1])
    plate[distance < (0.03 + 0.1 * radius) * min(plate.shape)] = 0.4 + 0.6 * radius
plate[[0, -1]] = plate[:, [0, -1]] = 0
plate[0] = 1
row, column = (position * length for position, length in zip(grid.coords, (rows, columns), strict=True))
own = np.s_[row : row + rows + 2, column : column + columns + 2]
begin = xp.array(plate[own])

whole, other = xp.array(plate), xp.array(plate)
for _ in range(steps // 2):  # each rank computes the whole plate
    relax(whole, other)
    relax(other, whole)


def go_back() -> None:
    """Let all ranks set their planes to the beginning."""
    grid.Barrier()  # after it no rank uses this rank's planes
    first[...] = second[...] = begin
    if xp is not np:
        xp.cuda.Device().synchronize()
    grid.Barrier()


def two_steps(way: Way) -> None:
    """Compute two steps. The result is in the first plane again."""
    way(first, second)
    way(second, first)


def microseconds(way: Way) -> float:
    """Compute all steps from the beginning. Return the time of one step."""
    go_back()
    two_steps(way)  # sets up memory, and loads kernels
    grid.check()
    if xp is np:
        go_back()
        start = time.perf_counter()
        for _ in range(steps // 2):
            two_steps(way)
        return (time.perf_counter() - start) / steps * 1e6
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(in_graph // 2):
            two_steps(way)
        graph = stream.end_capture()
    graph.launch(stream)  # the first launch takes longer
    grid.check(stream)
    go_back()
    start = time.perf_counter()
    for _ in range(steps // in_graph):
        graph.launch(stream)
    grid.check(stream)  # waits for the stream, and raises if a rank did not come
    seconds = time.perf_counter() - start  # before CuPy compiles the next line for the first time
    assert not failed.any(), "a rank did not come"
    return seconds / steps * 1e6


times = {}
for name, way in ways.items():
    times[name] = grid.allreduce(microseconds(way), op=MPI.MAX)
    same = bool((first[1:-1, 1:-1] == whole[own][1:-1, 1:-1]).all())
    assert grid.allreduce(same, op=MPI.LAND), f"{name}: one rank computes other heat"

if grid.rank == 0:
    print(f"{dims[0]} x {dims[1]} ranks of {rows} x {columns} cells: the heat of one rank, bit for bit")
    print(*(f"{name:24} {time:8.1f} us a step" for name, time in times.items()), sep="\n")
    if xp is np:
        print(f"{OWN_KERNEL:24} needs a GPU on every rank")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 5), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(whole.tolist(), cmap="inferno", vmin=0, vmax=1)
        figure.colorbar(image, label="temperature")
        for line in range(1, dims[0]):
            axes.axhline(line * rows + 0.5, color="white", linewidth=0.5)
        for line in range(1, dims[1]):
            axes.axvline(line * columns + 0.5, color="white", linewidth=0.5)
        axes.set(title=f"Heat after {steps} steps, and the tiles of {grid.size} ranks", xticks=[], yticks=[])
        figure.savefig(options.plot, dpi=150)
for datatype in (*sent, *received):
    datatype.Free()
grid.Free()
comm.Free()
