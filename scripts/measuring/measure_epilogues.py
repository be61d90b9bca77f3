"""Measure epilogues of all-reduces on GPUs: `mpirun -np 2 python -m mpi4py scripts/measuring/measure_epilogues.py`.

It times CUDA graphs of 20 all-reduces: without an epilogue; with an epilogue; with the same epilogue in a second kernel
of mpicomm; and with kernels of CuPy that compute the same. The epilogues are ``v * scale + bias[i]``, a conversion to
float8, a residual with an RMS norm of rows of 4096, and the same norm to float8 with a scale for each row. The script
compares the results first. ``--algorithm`` names the algorithm of all calls. It prints microseconds
for one all-reduce: the slowest rank's median over 7 launches. Ranks that share a GPU take turns, so compare the
columns, and do not compare the times with times of other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from in_turns import graph_us
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, measuring_parser

import mpicomm
from mpicomm import epilogues
from mpicomm.epilogues import Elementwise, Epilogue
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.mpi.arguments import Operand
from mpicomm.sizes import format_size

SIZES = (16 << 10, 256 << 10, 4 << 20, 8 << 20, 64 << 20, 256 << 20)
CALLS, ROUNDS = 20, 7
HIDDEN = 4096
SCALE = 0.5
COLUMNS = ("alone", "epilogue", "kernel after", "CuPy after")

_affine = cupy.ElementwiseKernel(
    "T v, T bias, float32 scale", "T out", "out = float(v) * scale + float(bias)", "affine"
)
# The instruction converts two floats, the second of them to the lower byte.
_to_float8 = cupy.ElementwiseKernel(
    "T v, float32 scale",
    "uint8 out",
    """
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(float(v) * scale));
    out = static_cast<unsigned char>(pair);
    """,
    "to_float8",
)


class Behind(Epilogue):
    """An epilogue that mpicomm applies in a second kernel, because no kernel that reduces can apply it."""

    def __init__(self, epilogue: Epilogue) -> None:
        self._epilogue = epilogue
        self.constants, self.arrays, self.sized_by_result = (
            ("behind", epilogue.constants),
            epilogue.arrays,
            epilogue.sized_by_result,
        )

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """See `Epilogue`."""
        bound = self._epilogue.bind(operation, dtype, result)
        bound.row_nbytes = 1  # no kernel that reduces has such rows
        return bound


class Float8:
    """An array of float8_e4m3fn in the memory of ``words``, which are bytes, because CuPy lacks the type."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.dtype = np.dtype(ml_dtypes.float8_e4m3fn)
        self.nbytes = words.nbytes
        self.__cuda_array_interface__ = {**words.__cuda_array_interface__, "typestr": self.dtype.str}


class Calls:
    """All-reduces of ``x``, without an epilogue, with an epilogue, and with kernels after them."""

    def __init__(self, comm: mpicomm.Communicator, x: Any, algorithm: str) -> None:
        self._comm = comm
        self._algorithm = algorithm
        self._x = x
        self._total = cupy.empty_like(x)

    def times_us(
        self,
        epilogue: Epilogue,
        y: Any,
        same: Epilogue,
        other: Any,
        cupy_behind: Callable[[Any], Any],
    ) -> list[float]:
        """Return the times by `COLUMNS`.

        ``epilogue`` makes ``y``, the equal epilogue ``same`` makes ``other`` by the second kernel, and ``cupy_behind``
        makes the result of the sum.
        """

        def alone() -> None:
            self._comm.Allreduce(self._x, self._total, algorithm=self._algorithm)

        def fused() -> None:
            self._comm.Allreduce(self._x, y, algorithm=self._algorithm, epilogue=epilogue)

        def behind() -> None:
            self._comm.Allreduce(self._x, other, algorithm=self._algorithm, epilogue=Behind(same))

        def with_cupy() -> Any:
            alone()
            return cupy_behind(self._total)

        fused()
        behind()
        made = with_cupy()
        self._comm.check()
        if not bool((_words(y) == _words(other)).all()):
            raise SystemExit(f"the second kernel has other bits: {_words(y)[:4]} and {_words(other)[:4]}")
        _require_close(y, made)
        return graph_us(self._comm, (alone, fused, behind, with_cupy), CALLS, ROUNDS)


def _words(array: Any) -> Any:
    return array.words if isinstance(array, Float8) else array.view(np.uint8)


def _require_close(got: Any, expected: Any) -> None:
    """Raise if an epilogue and CuPy differ by more than the rounding of a kernel of CuPy."""
    if isinstance(got, Float8):
        close = bool((cupy.abs(got.words.astype(np.int16) - expected.astype(np.int16)) <= 1).all())
    else:
        tolerance = 2e-2 if got.dtype == np.float16 else 1e-4
        close = bool(cupy.allclose(got, expected, rtol=tolerance, atol=tolerance))
    if not close:
        raise SystemExit(f"CuPy has other results: {_words(got)[:4]} and {expected[:4]}")


def affine(comm: mpicomm.Communicator, x: Any, algorithm: str) -> list[float]:
    """Return the times of ``v * scale + bias[i]``."""
    bias, z = cupy.random.random(x.size).astype(x.dtype), cupy.empty_like(x)
    epilogue = Elementwise("v * scale + bias[i]", scale=SCALE, bias=bias)
    return Calls(comm, x, algorithm).times_us(
        epilogue,
        cupy.empty_like(x),
        epilogue,
        cupy.empty_like(x),
        lambda total: _affine(total, bias, np.float32(SCALE), z),
    )


def fp8(comm: mpicomm.Communicator, x: Any, algorithm: str) -> list[float]:
    """Return the times of a conversion to float8."""
    y, other, z = (cupy.empty(x.size, np.uint8) for _ in range(3))
    epilogue = epilogues.fp8(SCALE)
    return Calls(comm, x, algorithm).times_us(
        epilogue, Float8(y), epilogue, Float8(other), lambda total: _to_float8(total, np.float32(SCALE), z)
    )


class Norms:
    """A norm of rows with the residual of an epilogue, with the residual of an equal one, and by CuPy."""

    def __init__(self, x: Any) -> None:
        self.weight, self.normal = cupy.random.random(HIDDEN).astype(x.dtype), cupy.empty_like(x)
        self.residual, self.other_residual, self._third = (cupy.zeros_like(x) for _ in range(3))

    def by_cupy(self, total: Any) -> Any:
        """Return the normal rows."""
        rows = self._third.reshape(-1, HIDDEN)
        cupy.add(self._third, total, out=self._third)
        squares = cupy.square(rows, dtype=cupy.float32).mean(axis=1, keepdims=True)
        normal = self.normal.reshape(-1, HIDDEN)
        cupy.multiply(rows * (1 / cupy.sqrt(squares + 1e-6)), self.weight, out=normal, casting="unsafe")
        return self.normal


def norm(comm: mpicomm.Communicator, x: Any, algorithm: str) -> list[float]:
    """Return the times of a residual and the norm of rows."""
    norms = Norms(x)
    return Calls(comm, x, algorithm).times_us(
        epilogues.rms_norm(norms.residual, norms.weight),
        cupy.empty_like(x),
        epilogues.rms_norm(norms.other_residual, norms.weight),
        cupy.empty_like(x),
        norms.by_cupy,
    )


def norm_fp8(comm: mpicomm.Communicator, x: Any, algorithm: str) -> list[float]:
    """Return the times of a residual and the norm of rows, as float8 with a scale for each row."""
    norms, rows = Norms(x), x.size // HIDDEN
    y, other, z = (cupy.empty(x.size, np.uint8) for _ in range(3))
    scales, other_scales = (cupy.empty(rows, np.float32) for _ in range(2))

    def cupy_behind(total: Any) -> Any:
        normal = norms.by_cupy(total).reshape(-1, HIDDEN)
        inverse = np.float32(448) / cupy.abs(normal).max(axis=1, keepdims=True).astype(np.float32)
        return _to_float8(normal, inverse, z.reshape(-1, HIDDEN)).ravel()

    return Calls(comm, x, algorithm).times_us(
        epilogues.rms_norm(norms.residual, norms.weight, scales=scales),
        Float8(y),
        epilogues.rms_norm(norms.other_residual, norms.weight, scales=other_scales),
        Float8(other),
        cupy_behind,
    )


KINDS = (("affine", affine), ("fp8", fp8), ("norm", norm), ("norm fp8", norm_fp8))


def main() -> None:
    """Measure, print on rank 0, and write the table if a file is named."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--algorithm", default="auto", help="the algorithm of all calls")
    options = parser.parse_args()
    text = (
        f"CUDA graphs have {CALLS} all-reduces without an epilogue, or with one. The same epilogue also runs in a "
        "second kernel of mpicomm, and in kernels of CuPy. Times are us for one all-reduce on the slowest rank. "
        "*affine* is `v * scale + bias[i]`, *fp8* multiplies and converts to float8_e4m3fn, *norm* adds a residual and "
        f"normalises rows of {HIDDEN}, and *norm fp8* converts these rows to float8_e4m3fn with a scale for each row."
    )
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        if comm.device == "cpu":
            raise SystemExit("there is no GPU: epilogues of host arrays are NumPy's")
        named = "" if options.algorithm == "auto" else f", {options.algorithm}"
        title = f"Epilogues of all-reduces, {comm.size} ranks{named}"
        with Sheet(comm, options, title, ["type", "epilogue", "size", *COLUMNS], text=text) as sheet:
            for dtype in (np.dtype("float32"), np.dtype("float16")):
                for what, measure in KINDS:
                    for nbytes in SIZES:
                        x = cupy.random.random(nbytes // dtype.itemsize).astype(dtype)
                        sheet.add(dtype.name, what, format_size(nbytes), *measure(comm, x, options.algorithm))


if __name__ == "__main__":
    main()
