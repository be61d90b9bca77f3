"""Reductions of host memory with NumPy: the operations, their types and their results.

A reduction goes element by element, in the order of the parts: ((part 0 op part 1) op part 2) ... So every
rank and every cut of the array gives the same bits, except that either of two NaNs with different payloads may come
out. The result of a single part is that part, as in MPI, also for ``land``, and also if x / 1 is not x.

- Floats of less than 32 bits (float16 and the floats of ml_dtypes) are accumulated in float32. The end result is
  rounded once, to nearest even. It overflows as a conversion from float32 does.
- Integers wrap around. Of booleans ``sum`` and ``max`` are or, ``prod`` and ``min`` are and, as in NumPy.
- ``max`` and ``min`` return NaN if any part is NaN. 0.0 and -0.0 are equal. Of these, they return the part that NumPy
  returns on this processor, on x86 the later part.
- ``land``, ``lor`` and ``lxor`` return 0 or 1 in the type of the parts.
- `Op` says how an expression of the user is computed.
- ``avg`` is the sum divided by the number of parts, of floats and complex numbers.
- ``tree`` is the sum of a binary tree: (part 0 + part 1) + (part 2 + part 3) ... If the parts are no power of two, the
  first ones are, as many as possible.
- Floating-point errors are not reported: overflow gives inf, inf - inf gives NaN. Callers set ``np.errstate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.kernels.reductions import custom_op, is_custom
from mpicomm.mpi.types import is_narrow

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "tree": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}

_FLOAT32 = np.dtype(np.float32)
# Parts, accumulator and result of a block stay in a core's L2 cache while they go through several operations.
_BLOCK_NBYTES = 128 * 1024


def _own_function(op: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """Return an operation of the user on arrays of ``dtype``, as a function with the signature of a ufunc."""
    expression = custom_op(op)

    def reduce(a: npt.NDArray[Any], b: npt.NDArray[Any], out: npt.NDArray[Any] | None = None) -> Any:
        value = expression.tree.evaluate(dtype, {"a": a, "b": b})
        if out is None:
            return value
        np.copyto(out, value)
        return out

    return reduce


class Reducer:
    """Reduces with one operation on one dtype, for which it is defined: see `mpicomm.mpi.ops.check_legal`."""

    def __init__(self, op: str, dtype: np.dtype[Any]) -> None:
        self._average, self._tree = op == "avg", op == "tree"
        self._dtype = _FLOAT32 if is_narrow(dtype) else dtype
        self._ufunc: Callable[..., Any] = _own_function(op, self._dtype) if is_custom(op) else _UFUNCS[op]
        self._narrow = is_narrow(dtype)
        self._block = max(_BLOCK_NBYTES // self._dtype.itemsize, 2)
        # Allocated at the first use, because two parts of a wide type need no scratch memory.
        self._scratch: list[npt.NDArray[Any]] = []

    def reduce(self, parts: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
        """Reduce ``parts``, flat arrays of one length, in their order into ``out``; local.

        ``out`` may be the same memory as one of the parts. The reduction reads a block of all parts before it writes
        that block of ``out``.
        """
        if len(parts) == 1:
            np.copyto(out, parts[0])
            return
        if len(parts) == 2 and not self._narrow:
            self._reduce_block(parts, out)
            return
        for start in range(0, out.size, self._block):
            stop = start + self._block
            block = [part[start:stop] for part in parts]
            if self._tree:
                np.copyto(out[start:stop], self._sum_of_tree(block, 0), casting="unsafe")
            else:
                self._reduce_block(block, out[start:stop])

    def _reduce_block(self, parts: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
        ufunc, size = self._ufunc, out.size
        result = self._widened(parts[0], 0)
        if size == 1:
            # For one element in place NumPy has another loop, which rounds complex products differently.
            for part in parts[1:]:
                result = ufunc(result, self._widened(part, 1))
        else:
            for part in parts[1:-1]:
                # Not into `out`, because `out` may be a part that this loop has yet to read.
                result = ufunc(result, self._widened(part, 1), out=self._scratch_array(0, size))
            last = self._scratch_array(0, size) if self._narrow else out
            result = ufunc(result, self._widened(parts[-1], 1), out=last)
        if self._average:
            result = np.divide(result, len(parts), out=result)
        if result is not out:
            np.copyto(out, result, casting="unsafe")

    def _widened(self, part: npt.NDArray[Any], index: int) -> npt.NDArray[Any]:
        """Return a part in the type in which it is accumulated, if it has another one in scratch array ``index``."""
        if not self._narrow:
            return part
        wide = self._scratch_array(index, part.size)
        np.copyto(wide, part)
        return wide

    def _sum_of_tree(self, parts: Sequence[npt.NDArray[Any]], level: int) -> npt.NDArray[Any]:
        if len(parts) == 1:
            return parts[0].astype(self._dtype, copy=False)
        half = 1 << (len(parts) - 1).bit_length() - 1
        first = self._sum_of_tree(parts[:half], level)
        total = self._scratch_array(level, first.size)
        # What is below on the left lies in `total`, and on the right in the arrays after it.
        np.add(first, self._sum_of_tree(parts[half:], level + 1), out=total)
        return total

    def _scratch_array(self, index: int, count: int) -> npt.NDArray[Any]:
        while index >= len(self._scratch):
            self._scratch.append(np.empty(self._block, self._dtype))
        return self._scratch[index][:count]
