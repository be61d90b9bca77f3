"""RmsNorm: an epilogue that adds a residual to the result and normalises its rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.epilogues.base import BoundEpilogue, Epilogue, Fused, KernelCall, Rows, host_array
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.functions import kind_of
from mpicomm.kernels.epilogue import NORM_THREADS, Norm, NormArguments, norm_kernel, norm_options
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.overlap import overlaps
from mpicomm.mpi.types import is_narrow

_FLOAT32 = np.dtype(np.float32)
_BLOCKS_OF_A_MULTIPROCESSOR = 8
_PACKET_NBYTES = 16
_BLOCK = 1 << 16  # the elements that NumPy computes at once


class RmsNorm(Epilogue):
    """See `mpicomm.epilogues.rms_norm`."""

    def __init__(self, residual: Any, weight: Any, eps: float) -> None:
        self._residual = residual
        self._weight = weight
        self._eps = float(eps)
        if not 0 <= self._eps < np.inf:
            raise InvalidUsageError(f"eps={eps!r} of rms_norm is no small number: pass one such as 1e-6")

    def __repr__(self) -> str:
        return f"rms_norm(..., eps={self._eps})"

    def key(self, identity_of: Callable[[Any], Hashable]) -> Hashable:
        """See `Epilogue`."""
        arrays = identity_of(self._residual), identity_of(self._weight)
        return None if None in arrays else ("rms_norm", self._eps, *arrays)

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """See `Epilogue`."""
        assert result.dtype is not None
        residual = self.read("residual", self._residual, result, writable=True)
        weight = self.read("weight", self._weight, result)
        self.require_kind(operation, dtype, result)
        assert weight.dtype is not None
        said = f"{operation}: epilogue={self!r}"
        for name, each in (("recvbuf", result.dtype), ("sendbuf", dtype), ("weight", weight.dtype)):
            if kind_of(each.name) != "float":
                raise InvalidUsageError(f"{said}: {name} has elements of {each}: pass floats")
        if residual.dtype != dtype or residual.total != result.total:
            raise InvalidUsageError(
                f"{said}: residual has {residual.total} elements of {residual.dtype}: pass {result.total} of {dtype}"
            )
        if weight.total == 0 or result.total % weight.total:
            raise InvalidUsageError(
                f"{said}: weight has {weight.total} elements, and the {result.total} of the result make no rows of "
                "that length"
            )
        if overlaps(residual, weight):
            raise InvalidUsageError(f"{said}: residual and weight overlap: copy one of them")
        return BoundNorm(dtype, result.dtype, residual, weight, self._eps)


class BoundNorm(BoundEpilogue):
    """The normalisation of a call with a result that has the rows of ``weight``."""

    def __init__(
        self, dtype: np.dtype[Any], result: np.dtype[Any], residual: Operand, weight: Operand, eps: float
    ) -> None:
        super().__init__(f"rms_norm, {weight.total} {weight.dtype}, eps={eps}, to {result}", dtype, result)
        self.writes = (residual,)
        self._residual = residual
        self._weight = weight
        self._eps = eps

    @property
    def _rows(self) -> int:
        return self._residual.total // self._weight.total

    def _norm(self, output: int, reduced: int, of_shard: int) -> Norm:
        pointers = output, reduced, self._residual.pointer, self._weight.pointer
        return Norm(*pointers, self._rows, of_shard, self._weight.total, self._eps)

    def fused(self, reduced: int, finished: int, shards: int = 1) -> Fused:
        """See `BoundEpilogue`."""
        assert self._weight.dtype is not None
        options = norm_options(self.result.name, self._weight.dtype.name)
        of_shard = -(-self._rows // shards)
        return Fused(
            options, self._norm(finished, reduced, of_shard), Rows(of_shard, self._weight.total * self.dtype.itemsize)
        )

    def following_kernel(self, source: int, output: int, failed: int, multiprocessors: int) -> KernelCall:
        """See `BoundEpilogue`."""
        assert self._weight.dtype is not None
        variant = norm_kernel(self.dtype.name, self.result.name, self._weight.dtype.name)
        blocks = min(self._rows, _BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors)
        return KernelCall(
            variant, NormArguments(source, failed, self._norm(output, 0, self._rows)), blocks, NORM_THREADS
        )

    def on_host(self, reduced: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See `BoundEpilogue`. It adds squares in the order of the kernel, so it has the kernel's bits."""
        wide = _FLOAT32 if is_narrow(self.dtype) else self.dtype
        weight = host_array(self._weight).astype(wide)
        shape = -1, weight.size
        residuals = host_array(self._residual).reshape(shape)
        values, results = reduced.reshape(shape), out.reshape(shape)
        step = max(1, _BLOCK // weight.size)
        with np.errstate(all="ignore"):
            for start in range(0, len(values), step):
                rows = slice(start, start + step)
                total = values[rows].astype(wide) + residuals[rows].astype(wide)
                np.copyto(residuals[rows], total, casting="unsafe")
                h = residuals[rows].astype(wide)
                mean = _sums_of_squares(h, _PACKET_NBYTES // self.dtype.itemsize) / wide.type(weight.size)
                normal = h / np.sqrt(mean + wide.type(self._eps)) * weight
                if is_narrow(self.result):
                    normal = normal.astype(_FLOAT32)
                np.copyto(results[rows], normal, casting="unsafe")


def _sums_of_squares(values: npt.NDArray[Any], per_packet: int) -> npt.NDArray[Any]:
    """Return the sum of the squares of each row, as a column."""
    rows, hidden = values.shape
    threads = NORM_THREADS
    while threads > 1 and (threads // 2) * per_packet >= hidden:
        threads //= 2  # the other threads would add nothing
    steps = -(-hidden // (threads * per_packet))
    squares = np.zeros((rows, steps * threads * per_packet), values.dtype)
    squares[:, :hidden] = values * values
    # Element [n, row, thread] is the n-th element that a thread adds.
    added = squares.reshape(rows, steps, threads, per_packet).transpose(1, 3, 0, 2).reshape(-1, rows, threads)
    sums: npt.NDArray[Any] = added[0]
    for each in added[1:]:
        sums = sums + each
    while threads > 1:
        threads //= 2
        sums = sums[:, :threads] + sums[:, threads:]
    return sums
