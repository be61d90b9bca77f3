"""Heat flows along a ring of cells, and each rank has a part of them: `mpirun -np 4 python examples/halo_exchange.py`.

In each step a rank receives the two cells next to its part from its neighbours. On GPUs a hundred steps are one CUDA
graph, because kernels match the messages and the host has nothing to do between them.
"""

import time
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

xp: Any
comm = mpicomm.Communicator(MPI.COMM_WORLD)
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
if comm.device == "cpu":
    xp, cells = np, 10_000
else:
    import cupy

    xp, cells = cupy, 1_000_000

heat, then = xp.zeros(cells + 2), xp.zeros(cells + 2)  # with a neighbour's cell at each end
if comm.rank == 0:
    heat[cells // 2] = 1


def step(old: Any, new: Any) -> None:
    """Compute the heat of one time step later."""
    comm.Sendrecv(old[1:2], left, 0, old[-1:], right, 0)
    comm.Sendrecv(old[-2:-1], right, 1, old[:1], left, 1)
    inner = new[1:-1]  # a quarter of each neighbour plus half of the cell itself, without temporary arrays
    xp.add(old[:-2], old[2:], out=inner)
    inner *= 0.5
    inner += old[1:-1]
    inner *= 0.5


def two_steps() -> None:
    """Compute two time steps; the result is in `heat` again."""
    step(heat, then)
    step(then, heat)


two_steps()
if comm.device == "cpu":
    run, steps = two_steps, 2
else:
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for _ in range(50):
            two_steps()
        graph = stream.end_capture()
    run, steps = (lambda: graph.launch(stream)), 100

runs = 20
comm.Barrier()
start = time.perf_counter()
for _ in range(runs):
    run()
comm.check(None if comm.device == "cpu" else stream)  # waits for the stream, and raises if a rank did not come
microseconds = (time.perf_counter() - start) / (runs * steps) * 1e6

total = comm.allreduce(float(heat[1:-1].sum()))
assert abs(total - 1) < 1e-12, total
if comm.rank == 0:
    print(f"{comm.size} ranks: {2 + runs * steps} steps of {microseconds:.1f} us, the heat is still {total:.6f}")
comm.Free()
