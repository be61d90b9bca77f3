"""A Fourier transform of an array that is spread over ranks: `mpirun -np 4 python examples/fft_transpose.py`.

Each rank has a slab of the array: some planes of its first axis. It transforms the two other axes at once. For the
first axis the ranks turn the array by a plan of `redistribution`. After it each rank has that axis as a whole. The
program packs nothing; nor do kernels on GPUs. It makes a random field: it scales the frequencies of noise, and
transforms back. It compares the field with the field of one rank. Last, it times the turn beside the usual way, which
packs the blocks for an Alltoallv.
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


to_columns = comm.redistribution(shape, "complex128", from_=0, to=1)  # from slabs of rows to slabs of columns
to_rows = comm.redistribution(shape, "complex128", from_=1, to=0)
own_rows, own_columns = slice(*to_rows.target_box[0]), slice(*to_columns.target_box[1])


def transform(values: Any) -> Any:
    """Transform a slab of the array. Return all rows of this rank's columns of the transform."""
    return xp.fft.fft(to_columns(xp.ascontiguousarray(xp.fft.fft2(values, axes=(1, 2)))), axis=0)


def transform_back(values: Any) -> Any:
    """Undo `transform`."""
    return xp.fft.ifft2(to_rows(xp.ascontiguousarray(xp.fft.ifft(values, axis=0))), axes=(1, 2))


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


def time_ms(call: Callable[[], object], runs: int) -> float:
    """Return the milliseconds of a call, of the slowest rank."""
    call()
    comm.check()  # waits for the stream, and raises if a rank did not come
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    comm.check()
    return float(comm.allreduce((time.perf_counter() - start) / runs * 1000, op=MPI.MAX))


rows, columns = (np.array_split(np.arange(length), comm.size) for length in shape[:2])
plane = shape[2] * 16  # bytes
sent = [len(own) * len(noise[own_rows]) * plane for own in columns]
received = [len(own) * len(columns[comm.rank]) * plane for own in rows]
slab, packed_result = noise[own_rows], xp.empty(to_columns.target_shape, "complex128")


def pack_and_exchange() -> None:
    """Turn a slab without datatypes. Blocks of rows follow each other in the result, so only the sender packs."""
    blocks = xp.concatenate([slab[:, own[0] : own[-1] + 1].ravel() for own in columns if len(own)])
    comm.Alltoallv([blocks, sent, MPI.BYTE], [packed_result, received, MPI.BYTE])


turned = xp.empty_like(packed_result)
milliseconds = time_ms(lambda: transform_back(transform(slab)), 3)
turn_ms, packing_ms = time_ms(lambda: to_columns(slab, turned), 10), time_ms(pack_and_exchange, 10)
assert (turned == packed_result).all()
largest = float(np.max(comm.allgather(errors)))

planes = comm.gather(field[:, :, 0].real.tolist())
if planes is not None:
    size = " x ".join(map(str, shape))
    print(f"{comm.size} ranks transformed {size} numbers forward and back in {milliseconds:.1f} ms")
    print(f"one turn takes {turn_ms:.2f} ms, and {packing_ms:.2f} ms with packing and Alltoallv")
    print(f"results of one rank differ by at most {largest:.1e}; {TOLERANCE:.0e} is allowed")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        axes, bars = figure.subplots(1, 2, width_ratios=[3, 1])
        bars.bar(["redistribution", "packing"], [turn_ms, packing_ms], color=["tab:blue", "tab:gray"])
        bars.set(title="One turn", ylabel="ms")
        axes.imshow([row for plane in planes for row in plane], cmap="magma", interpolation="bilinear")
        for rank, part in enumerate(rows):
            axes.axhline(part[0] - 0.5, color="white", linewidth=1)
            axes.text(2, part[0] + 1, f"rank {rank}", color="white", va="top")
        axes.set(title="A random field, and the slabs of the ranks", xticks=[], yticks=[])
        figure.savefig(options.plot, dpi=150)
to_columns.Free()
to_rows.Free()
comm.Free()
sys.exit(not largest <= TOLERANCE)
