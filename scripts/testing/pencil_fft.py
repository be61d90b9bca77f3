"""Transform arrays by mpi4py-fft's pencils.

Run `mpirun -np N python -m mpicomm scripts/testing/pencil_fft.py PENCIL [--cupy]`. PENCIL is the file pencil.py of
mpi4py-fft, which needs no FFTW. Its classes divide an array along one axis or two, by parts of a Cartesian
communicator. They turn the division by `Alltoallw` of subarray types. Each rank transforms the axis that it has as a
whole, forward and back, and compares with the transform of the whole array on one rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

SHAPE = (13, 12, 10)
DIVIDED = {"slabs": [0, 1, 1], "pencils": [0, 0, 1]}
"""0 for each axis that is divided, as mpi4py-fft's Subcomm takes it."""
TYPES = (np.complex64, np.complex128)


def load(path: str) -> Any:
    """Return the module in a file, without its package, because the package imports FFTW."""
    spec = importlib.util.spec_from_file_location("pencil", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part(pencil: Any, whole: Any) -> Any:
    """Return this rank's part of an array."""
    return whole[tuple(slice(start, start + n) for start, n in zip(pencil.substart, pencil.subshape, strict=True))]


def transform(xp: Any, module: Any, divided: list[int], dtype: Any) -> float:
    """Transform forward and back; return the largest error on this rank, relative to the largest element."""
    rng = np.random.default_rng(1)
    whole = (rng.standard_normal(SHAPE) + 1j * rng.standard_normal(SHAPE)).astype(dtype)
    comms = module.Subcomm(MPI.COMM_WORLD, divided)
    pencils = [module.Pencil(comms, SHAPE, axis=2)]
    pencils += [pencils[0].pencil(1)]
    pencils += [pencils[1].pencil(0)]
    turns = [first.transfer(second, dtype) for first, second in pairwise(pencils)]
    arrays = [xp.full(pencil.subshape, np.nan, dtype) for pencil in pencils]

    arrays[0][...] = xp.asarray(part(pencils[0], whole))
    for turn, pencil, (here, there) in zip(turns, pencils[:-1], pairwise(arrays), strict=True):
        here[...] = xp.fft.fft(here, axis=pencil.axis)
        turn.forward(here, there)
    arrays[-1][...] = xp.fft.fft(arrays[-1], axis=pencils[-1].axis)
    expected = np.fft.fftn(whole)
    errors = [abs(xp.asarray(part(pencils[-1], expected)) - arrays[-1]).max() / abs(expected).max()]

    arrays[-1][...] = xp.fft.ifft(arrays[-1], axis=pencils[-1].axis)
    for turn, pencil, (there, here) in zip(turns[::-1], pencils[-2::-1], pairwise(arrays[::-1]), strict=True):
        here[...] = np.nan
        turn.backward(there, here)
        here[...] = xp.fft.ifft(here, axis=pencil.axis)
    errors += [abs(xp.asarray(part(pencils[0], whole)) - arrays[0]).max() / abs(whole).max()]

    for turn in turns:
        turn.destroy()
    comms.destroy()
    return float(np.max([float(error) for error in errors]))  # NaN, too


def main() -> None:
    """Transform in all ways; exit with 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pencil")
    parser.add_argument("--cupy", action="store_true", help="transform CuPy's arrays")
    options = parser.parse_args()
    xp: Any = np
    if options.cupy:
        import cupy

        xp = cupy
    module = load(options.pencil)
    for name, divided in DIVIDED.items():
        for dtype in TYPES:
            error = transform(xp, module, divided, dtype)
            if not error < 20 * np.finfo(dtype).eps:
                sys.exit(f"{name} of {np.dtype(dtype)}: rank {MPI.COMM_WORLD.rank} is wrong by {error}")
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(f"{', '.join(DIVIDED)}: {MPI.COMM_WORLD.size} ranks have the transform of one\n")


main()
