"""Ranks take tasks from each other's queues: `mpirun -np 4 python examples/work_stealing.py`.

A task computes some rows of the Mandelbrot set. Rows in the middle take much longer than rows at the edge. Each rank
has a queue with an equal number of tasks. A counter in the memory of its device says which task comes next. A rank that
has emptied its queue takes tasks of the next ranks' queues. It draws their numbers by Fetch_and_op on the counters, and
puts its results into the memory of rank 0. No rank waits for the rank whose memory it changes. For comparison the ranks
first work without stealing.
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

TASKS, ROWS, WIDTH = 64, 5, 480
PIXELS = ROWS * WIDTH  # of a task
STEPS, STRIDE = 400, 20
TOLERANCE = 1e-9

parser = argparse.ArgumentParser()
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw who works when, as in --plot work.svg")
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


def compute(task: int) -> Any:
    """Return for each pixel of a task the step after which its number leaves the circle of radius 2."""
    y = np.linspace(-1.25, 1.25, TASKS * ROWS)[task * ROWS : (task + 1) * ROWS, None]
    place = xp.asarray((np.linspace(-2.2, 0.8, WIDTH) + 1j * y).ravel())
    steps, inside, z = xp.zeros(PIXELS, "int64"), xp.arange(PIXELS), xp.zeros(PIXELS, complex)
    with np.errstate(all="ignore"):  # numbers outside of the circle soon are infinite
        for _ in range(0, STEPS, STRIDE):
            for _ in range(STRIDE):
                z = z * z + place
                steps[inside] += abs(z) <= 2
            stay = abs(z) <= 2
            inside, z, place = inside[stay], z[stay], place[stay]
            if not inside.size:
                break
    return steps


# The first task in the queue of each rank, and the end of the last queue.
starts = [TASKS * rank // comm.size for rank in range(comm.size + 1)]
queue = mpicomm.Win.Allocate(8, 8, comm=comm, place="device")
image = mpicomm.Win.Allocate(8 * TASKS * PIXELS if comm.rank == 0 else 0, 8, comm=comm, place="device")
one, drawn = xp.ones(1, "int64"), xp.zeros(1, "int64")


def work(*, steals: bool) -> list[tuple[float, float, bool]]:
    """Do tasks until there are none. Return the begin and the duration of each, and whether it is stolen."""
    for win in (queue, image):
        win.tomemory()[...] = 0
        win.Fence(MPI.MODE_NOSUCCEED)  # no rank begins before the memory of all ranks is zero
    comm.check()
    comm.Barrier()
    begin, done = time.perf_counter(), []
    queue.Lock_all()
    image.Lock_all()
    for number in range(comm.size if steals else 1):
        owner = (comm.rank + number) % comm.size
        while True:
            queue.Fetch_and_op(one, drawn, owner, op=MPI.SUM)  # no other rank gets the same number
            queue.Flush(owner)
            task = starts[owner] + int(drawn[0])  # on a GPU this waits for the stream
            if task >= starts[owner + 1]:
                break
            since = time.perf_counter() - begin
            image.Put(compute(task), 0, task * PIXELS)
            comm.check()
            done.append((since, time.perf_counter() - begin - since, owner != comm.rank))
    queue.Unlock_all()
    image.Unlock_all()
    image.Fence(MPI.MODE_NOSUCCEED)  # all results are in the memory of rank 0
    comm.check()
    return done


compute(TASKS // 2)  # compiles kernels
expected = [compute(task) for task in range(TASKS)] if comm.rank == 0 else []
everyone: dict[str, list[list[tuple[float, float, bool]]]] = {}
difference = 0.0
for way in ("static division", "stealing"):
    tasks = comm.gather(work(steals=way == "stealing"))
    if tasks is not None:
        everyone[way] = tasks
        found = image.tomemory().view("int64")
        difference = max(difference, float(abs(found - xp.concatenate(expected)).max()) / STEPS)
        seconds = max(since + lasts for done in tasks for since, lasts, _ in done)
        busy = sum(lasts for done in tasks for _, lasts, _ in done) / (seconds * comm.size)
        taken, stolen = [len(done) for done in tasks], sum(theft for done in tasks for *_, theft in done)
        print(
            f"{way} of {TASKS} tasks on {comm.size} ranks: {seconds:.2f} s, {100 * (1 - busy):.0f} % of it idle, ",
            end="",
        )
        print(f"tasks of the ranks: {', '.join(map(str, taken))}; {stolen} stolen")
if everyone:
    print(f"the image and one rank's image differ by at most {difference:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 1.5 + 0.5 * comm.size), layout="constrained")
        for axes, (way, tasks) in zip(figure.subplots(2, sharex=True), everyone.items(), strict=True):
            for rank, done in enumerate(tasks):
                for stolen, colour in ((False, "tab:blue"), (True, "tab:orange")):
                    bars = [(since, lasts) for since, lasts, theft in done if theft == stolen]
                    axes.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.5)
            axes.set(title=way, ylabel="rank", yticks=range(comm.size))
            axes.invert_yaxis()
        axes.set_xlabel("seconds; blue tasks are of the rank's own queue, orange tasks are stolen")
        figure.savefig(options.plot, dpi=150)
for win in (queue, image):
    win.Free()
difference = comm.bcast(difference)
comm.Free()
sys.exit(not difference <= TOLERANCE)
