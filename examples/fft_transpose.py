"""A Fourier transform of an array that is spread over ranks: `mpirun -np 4 python examples/fft_transpose.py`.

Each rank has a slab of the array: some planes of its first axis. It transforms the two other axes at once. For the
first axis the ranks turn the array by one Alltoallw. After it each rank has that axis as a whole. Datatypes say where
the blocks lie in the slabs, so the program packs nothing; nor do kernels on GPUs. The program makes a random field: it
scales the frequencies of noise, and transforms back. It compares the field with the field of one rank.
"""

import argparse
import importlib.util
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

TOLERANCE = 1e-12  # of the largest value, in float64

parser = argparse.ArgumentParser()
parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a plane of the field, as in --plot field.png")
options = parser.parse_args()
if options.plot and not importlib.util.find_spec("matplotlib"):
    sys.exit("--plot needs matplotlib: pip install matplotlib")

comm = mpicomm.Communicator(MPI.COMM_WORLD)
xp: Any = np
shape = (90, 128, 100)
if comm.device != "cpu":
    import cupy

    xp, shape = cupy, (254, 256, 256)


def shares(length: int) -> list[slice]:
    """Divide an axis among the ranks, as evenly as possible."""
    bounds = [rank * length // comm.size for rank in range(comm.size + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def block(whole: tuple[int, ...], axis: int, part: slice) -> MPI.Datatype:
    """Return the datatype of the elements of an array that lie in ``part`` of an axis."""
    sizes, starts = list(whole), [0] * len(whole)
    sizes[axis], starts[axis] = part.stop - part.start, part.start
    return MPI.C_DOUBLE_COMPLEX.Create_subarray(whole, sizes, starts).Commit()


rows, columns = shares(shape[0]), shares(shape[1])
own_rows, own_columns = rows[comm.rank], columns[comm.rank]
slab = (own_rows.stop - own_rows.start, *shape[1:])  # before the turn: all columns of the own rows
turned = (shape[0], own_columns.stop - own_columns.start, shape[2])  # after it: all rows of the own columns
of_slab = [block(slab, 1, part) for part in columns]  # to each rank go its columns of the own rows
of_turned = [block(turned, 0, part) for part in rows]  # and from each rank come its rows of the own columns
counts, displacements = [1] * comm.size, [0] * comm.size
Layout = tuple[tuple[int, ...], list[MPI.Datatype]]


def turn(values: Any, here: Layout, there: Layout) -> Any:
    """Return this rank's part of the array in the other layout."""
    values, result = xp.ascontiguousarray(values), xp.empty(there[0], "complex128")
    comm.Alltoallw([values, counts, displacements, here[1]], [result, counts, displacements, there[1]])
    return result


def transform(values: Any) -> Any:
    """Transform a slab of the array. Return all rows of this rank's columns of the transform."""
    return xp.fft.fft(turn(xp.fft.fft2(values, axes=(1, 2)), (slab, of_slab), (turned, of_turned)), axis=0)


def transform_back(values: Any) -> Any:
    """Undo `transform`."""
    return xp.fft.ifft2(turn(xp.fft.ifft(values, axis=0), (turned, of_turned), (slab, of_slab)), axes=(1, 2))


def scales(some_columns: slice) -> Any:
    """Return a factor for each frequency: long waves grow, short waves shrink."""
    axes = [xp.fft.fftfreq(n) for n in shape]
    axes[1] = axes[1][some_columns]
    squares = axes[0][:, None, None] ** 2 + axes[1][:, None] ** 2 + axes[2] ** 2
    return (squares + 1e-4) ** -1.25


def error(part: Any, expected: Any) -> float:
    """Return the largest error of this rank's part, relative to the largest value."""
    return float(abs(part - expected).max() / abs(expected).max())


noise = xp.asarray(np.random.default_rng(1).standard_normal(shape)).astype("complex128")  # the same on every rank
frequencies = transform(noise[own_rows])
field = transform_back(frequencies * scales(own_columns))

whole = xp.fft.fftn(noise)
errors = [
    error(frequencies, whole[:, own_columns]),
    error(transform_back(frequencies), noise[own_rows]),
    error(field, xp.fft.ifftn(whole * scales(slice(None)))[own_rows]),
]

runs, again = 3, noise[own_rows]
comm.Barrier()
start = time.perf_counter()
for _ in range(runs):
    again = transform_back(transform(again))
comm.check()  # waits for the stream, and raises if a rank did not come
milliseconds = comm.allreduce((time.perf_counter() - start) / runs * 1000, op=MPI.MAX)
largest = float(np.max(comm.allgather([*errors, error(again, noise[own_rows])])))

planes = comm.gather(field[:, :, 0].real.tolist())
if planes is not None:
    size = " x ".join(map(str, shape))
    print(f"{comm.size} ranks transformed {size} numbers forward and back in {milliseconds:.1f} ms")
    print(f"results of one rank differ by at most {largest:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.imshow([row for plane in planes for row in plane], cmap="magma", interpolation="bilinear")
        for rank, part in enumerate(rows):
            axes.axhline(part.start - 0.5, color="white", linewidth=1)
            axes.text(2, part.start + 1, f"rank {rank}", color="white", va="top")
        axes.set(title="A random field, and the slabs of the ranks", xticks=[], yticks=[])
        figure.savefig(options.plot, dpi=150)
for datatype in (*of_slab, *of_turned):
    datatype.Free()
comm.Free()
sys.exit(not largest <= TOLERANCE)
