"""Heat flows over a plane, and each rank has a tile of it: `mpirun -np 4 python examples/halo_exchange.py`.

In each step a rank receives the edges of the four tiles around its own tile. Datatypes say where the edges lie in the
array, so one call moves all edges without a copy before or after it. On GPUs a hundred steps are one CUDA graph,
because kernels carry the call out and the host has nothing to do between steps. Last, the program times the exchange
alone, beside the usual way: it packs the edges into an array for a Neighbor_alltoallv, and unpacks them.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

xp: Any
comm = mpicomm.Communicator(MPI.COMM_WORLD)
if comm.device == "cpu":
    xp, rows, columns = np, 60, 40  # of a tile
else:
    import cupy

    xp, rows, columns = cupy, 1024, 1024

dims = MPI.Compute_dims(comm.size, 2)
grid: Any = comm.Create_cart(dims, periods=[True, True])  # heat that flows out at one side comes in at the other


def part(row: int, column: int, height: int, width: int) -> MPI.Datatype:
    """Return the datatype of a part of a tile. The tile has the cells of its neighbours all around it."""
    return MPI.DOUBLE.Create_subarray([rows + 2, columns + 2], [height, width], [row, column]).Commit()


# MPI's order of the neighbours: above, below, left, right.
sent = [part(1, 1, 1, columns), part(rows, 1, 1, columns), part(1, 1, rows, 1), part(1, columns, rows, 1)]
received = [
    *(part(0, 1, 1, columns), part(rows + 1, 1, 1, columns)),
    *(part(1, 0, rows, 1), part(1, columns + 1, rows, 1)),
]
counts, displacements = [1] * 4, [0] * 4


def step(old: Any, new: Any) -> None:
    """Compute the heat one time step later."""
    grid.Neighbor_alltoallw([old, counts, displacements, sent], [old, counts, displacements, received])
    inner = new[1:-1, 1:-1]  # an eighth of each neighbour plus half of the cell itself, without temporary arrays
    xp.add(old[:-2, 1:-1], old[2:, 1:-1], out=inner)
    inner += old[1:-1, :-2]
    inner += old[1:-1, 2:]
    inner *= 0.25
    inner += old[1:-1, 1:-1]
    inner *= 0.5


def alone(plane: Any, steps: int) -> Any:
    """Compute the heat of the whole plane on one rank."""
    for _ in range(steps):
        around = xp.roll(plane, 1, 0) + xp.roll(plane, -1, 0) + xp.roll(plane, 1, 1) + xp.roll(plane, -1, 1)
        plane = (around * 0.25 + plane) * 0.5
    return plane


plane = xp.asarray(np.random.default_rng(1).random((dims[0] * rows, dims[1] * columns)))
across, along = grid.coords
own = (slice(across * rows, (across + 1) * rows), slice(along * columns, (along + 1) * columns))
heat, then = xp.zeros((rows + 2, columns + 2)), xp.zeros((rows + 2, columns + 2))
heat[1:-1, 1:-1] = plane[own]


def two_steps() -> None:
    """Compute two time steps. The result is in `heat` again."""
    step(heat, then)
    step(then, heat)


two_steps()
if grid.device == "cpu":
    stream, run, steps = None, two_steps, 2
else:
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(50):
            two_steps()
        graph = stream.end_capture()
    run, steps = (lambda: graph.launch(stream)), 100

run()
grid.check(stream)  # waits for the stream, and raises if a rank did not come
assert (heat[1:-1, 1:-1] == alone(plane, 2 + steps)[own]).all(), "one rank computes other heat"

runs = 20
grid.Barrier()
start = time.perf_counter()
for _ in range(runs):
    run()
grid.check(stream)
microseconds = (time.perf_counter() - start) / (runs * steps) * 1e6

edges: list[Any] = [(1, slice(1, -1)), (-2, slice(1, -1)), (slice(1, -1), 1), (slice(1, -1), -2)]
halos: list[Any] = [(0, slice(1, -1)), (-1, slice(1, -1)), (slice(1, -1), 0), (slice(1, -1), -1)]
lengths = [columns, columns, rows, rows]
begins = [sum(lengths[:place]) for place in range(4)]
packed, came = xp.empty(sum(lengths)), xp.empty(sum(lengths))


def exchange() -> None:
    """Move the edges by datatypes."""
    grid.Neighbor_alltoallw([heat, counts, displacements, sent], [heat, counts, displacements, received])


def pack_and_exchange() -> None:
    """Move the edges as the neighbours of one array."""
    for edge, begin, length in zip(edges, begins, lengths, strict=True):
        packed[begin : begin + length] = heat[edge]
    grid.Neighbor_alltoallv([packed, lengths], [came, lengths])
    for halo, begin, length in zip(halos, begins, lengths, strict=True):
        heat[halo] = came[begin : begin + length]


def time_us(call: Callable[[], None]) -> float:
    """Return the microseconds of a call that the host issues."""
    for _ in range(10):
        call()
    grid.check()
    grid.Barrier()
    start = time.perf_counter()
    for _ in range(50):
        call()
    grid.check()
    return (time.perf_counter() - start) / 50 * 1e6


exchange()
by_datatypes = heat.copy()
for halo in halos:
    heat[halo] = -1
pack_and_exchange()
assert (heat == by_datatypes).all(), "the two ways move other edges"
exchange_us, packing_us = time_us(exchange), time_us(pack_and_exchange)
if comm.rank == 0:
    print(f"an exchange alone takes {exchange_us:.1f} us by datatypes, and {packing_us:.1f} us with packing")
    print(f"{dims[0]} x {dims[1]} ranks: steps of {microseconds:.1f} us, the same heat as one rank computes")
for datatype in (*sent, *received):
    datatype.Free()
grid.Free()
comm.Free()
