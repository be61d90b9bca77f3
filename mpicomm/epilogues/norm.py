"""Norm: an epilogue that adds a residual to the result, normalises its rows, and can quantize them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mpicomm.epilogues.base import BoundEpilogue, Epilogue, Memory, host_array
from mpicomm.epilogues.block_scaled import (
    GROUPS,
    LARGEST,
    SCALES,
    TILED_GROUPS,
    QuantizedFormat,
    quantize,
    scales_of,
    tiles_of,
)
from mpicomm.epilogues.elementwise import number_of
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.functions import kind_of
from mpicomm.kernels.epilogue import NORM_THREADS, NormArguments, NormKernelArguments, norm_kernel, norm_options
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Operand, overlaps
from mpicomm.mpi.types import is_narrow

ScaleLayout = Literal["linear", "128x4"]

_FLOAT32 = np.dtype(np.float32)
_BLOCKS_OF_A_MULTIPROCESSOR = 8
_BLOCK = 1 << 16  # the elements that NumPy computes at once
_LAYOUTS = ("linear", "128x4")
_ROWS = ("residual", "weight", "bias", "linear_bias")  # threads read packets of these arrays
_ARRAYS = (*_ROWS, "scales", "scale")  # in the order of `NormArguments`
_NOWHERE = 0, 0


class Norm(Epilogue):
    """See `mpicomm.epilogues.rms_norm` and `layer_norm`, which name it."""

    sized_by_result = ("residual", "scales")

    def __init__(self, name: str, arrays: Sequence[Any], eps: float, layout: str) -> None:
        """``arrays`` are those of `_ARRAYS`. The last one may be a number."""
        self.name = name
        *_, scales, scale = arrays
        self.scale = None if scale is None else number_of(scale)
        given = zip(_ARRAYS, (*arrays[:-1], scale if self.scale is None else None), strict=True)
        self.arrays = {name: array for name, array in given if array is not None or name in ("residual", "weight")}
        self.eps = float(eps)
        self._layout = layout
        if not 0 <= self.eps < np.inf:
            raise InvalidUsageError(f"eps={eps!r} of {name} is no small number: pass one such as 1e-6")
        if layout not in _LAYOUTS:
            raise InvalidUsageError(f"scale_layout={layout!r} of {name}: use one of {', '.join(_LAYOUTS)}")
        if layout != "linear" and scales is None:
            raise InvalidUsageError(f"scale_layout={layout!r} of {name} is for scales: pass scales")
        self.constants = name, self.eps, repr(self.scale), layout, *self.arrays  # scale as text: 0.0 and -0.0 are equal

    def __repr__(self) -> str:
        return f"{self.name}(..., eps={self.eps})"

    def reduced_capacity(self, result: Operand) -> int:
        """See `Epilogue`. Two float4_e2m1fn lie in a byte."""
        return result.total * (2 if self._has_four_bits(result) else 1)

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        call, count = f"{operation}: epilogue={self!r}", self.reduced_capacity(result)
        read = {}
        for name, array in self.arrays.items():
            read[name] = self.read(name, array, result, writable=name in self.sized_by_result)
        residual, weight = read["residual"], read["weight"]
        four = self._has_four_bits(result)
        if not four:
            self.require_kind(operation, dtype, result)
        types = [("sendbuf", dtype), ("weight", weight.dtype), *([] if four else [("recvbuf", result.dtype)])]
        for name, each in types:
            if kind_of(str(each)) != "float":
                raise InvalidUsageError(f"{call}: {name} has elements of {each}: pass floats")
        if residual.dtype != dtype or residual.total != count:
            raise InvalidUsageError(
                f"{call}: residual has {residual.total} elements of {residual.dtype}: pass {count} of {dtype}"
            )
        if weight.total == 0 or count % weight.total:
            raise InvalidUsageError(
                f"{call}: weight has {weight.total} elements, and the {count} of the result make no rows of that length"
            )
        for name, like in (("bias", weight.dtype), ("linear_bias", dtype)):
            if name in read and (read[name].total != weight.total or read[name].dtype != like):
                raise InvalidUsageError(
                    f"{call}: {name} has {read[name].total} elements of {read[name].dtype}: pass {weight.total} of "
                    f"{like}, as a row has"
                )
        quantized = self._quantized_format(call, dtype, result, read, count // weight.total)
        for changed in [each for each in self.sized_by_result if each in read]:
            for other, array in read.items():
                if other != changed and overlaps(read[changed], array):
                    raise InvalidUsageError(f"{call}: {changed} and {other} overlap: copy one of them")
        return BoundNorm(self, dtype, result, read, quantized)

    def _has_four_bits(self, result: Operand) -> bool:
        return "scales" in self.arrays and result.dtype == np.uint8

    def _quantized_format(
        self, call: str, dtype: np.dtype[Any], result: Operand, read: dict[str, Operand], rows: int
    ) -> QuantizedFormat | None:
        """Return the format of the result; None if it is not quantized. ``read`` has the arrays by name."""
        scales, scale, hidden = read.get("scales"), read.get("scale"), read["weight"].total
        if scales is None and scale is None and self.scale is None:
            return None
        kind = "float4_e2m1fn" if self._has_four_bits(result) else str(result.dtype)
        named = "scale" if scales is None else "scales"
        if kind not in LARGEST:
            raise InvalidUsageError(
                f"{call}: {named} is for quantized results, and recvbuf has {result.dtype}: pass float8_e4m3fn or "
                "float8_e5m2, or uint8 with two float4_e2m1fn in a byte"
            )
        if dtype.name == "float64":
            raise InvalidUsageError(
                f"{call}: {named} is for sums of up to 32 bits, and sendbuf has float64: convert it"
            )
        if scale is not None and (scale.dtype != _FLOAT32 or scale.total != 1):
            raise InvalidUsageError(
                f"{call}: scale has {scale.total} elements of {scale.dtype}: pass a number, or one element of float32"
            )
        if scales is None:
            return QuantizedFormat(kind)
        scale_kind, tiled = SCALES.get(str(scales.dtype)), self._layout == "128x4"
        if scale_kind is None:
            raise InvalidUsageError(
                f"{call}: scales has elements of {scales.dtype}: pass float32, float8_e4m3fn, or uint8 for "
                "float8_e8m0fnu"
            )
        sizes = TILED_GROUPS.get(scale_kind, ()) if tiled else GROUPS
        counts = {size: hidden // size for size in sizes if hidden % size == 0}
        if not tiled and hidden * dtype.itemsize % PACKET_NBYTES == 0 and hidden not in counts:
            counts[0] = 1
        expected = {size: scales_of(rows, columns, tiled=tiled) for size, columns in counts.items()}
        for size, total in expected.items():
            if total == scales.total:
                return QuantizedFormat(kind, scale_kind, size, tiled)
        known = ", or ".join(f"{total} for each {size or 'row'}" for size, total in expected.items())
        raise InvalidUsageError(
            f"{call}: scales has {scales.total} elements of {scale_kind} in the layout {self._layout}, for {rows} rows "
            f"of {hidden} elements: pass {known or 'rows of whole groups'}"
        )


class BoundNorm(BoundEpilogue):
    """The normalisation of a call with a result that has the rows of ``weight``. ``arrays`` are its arrays by name."""

    def __init__(
        self,
        norm: Norm,
        dtype: np.dtype[Any],
        result: Operand,
        arrays: dict[str, Operand],
        quantized: QuantizedFormat | None,
    ) -> None:
        weight, self._eps, scale = arrays["weight"], norm.eps, norm.scale
        has = "".join(f", {each}" for each in ("bias", "linear_bias", "scale") if each in arrays)
        made = result.dtype if quantized is None else f"{quantized}, scale={scale}"
        text = f"{norm.name}, {weight.total} {weight.dtype}{has}, eps={self._eps}, to {made}"
        super().__init__(text, dtype, result, arrays)
        self.writes = tuple(array for name, array in arrays.items() if name in Norm.sized_by_result)
        self.row_nbytes = weight.total * dtype.itemsize
        self.reduced_per_element = 1 if quantized is None else quantized.per_byte
        self._centred = norm.name == "layer_norm"
        self._quantized = quantized
        self._scale = 1.0 if scale is None else float(scale)
        self._hidden = weight.total
        scaled = None
        if quantized is not None and quantized.scales is not None:
            scaled = quantized.scales, quantized.group
        self._columns = 0 if scaled is None else self._hidden // (scaled[1] or self._hidden)
        self._tiled = quantized is not None and quantized.tiled
        assert weight.dtype is not None
        wanted = {"CENTRED": self._centred, "BIAS": "bias" in arrays, "LINEAR_BIAS": "linear_bias" in arrays}
        flags = [flag for flag, is_wanted in wanted.items() if is_wanted]
        self._options = [
            norm_options(self.result.name, weight.dtype.name, each, quantized and quantized.type, scaled)
            for each in (flags, [*flags, "ALIGNED"])
        ]
        memory = [(array.pointer, array.total) for array in arrays.values()]
        self.rebind(result.pointer, arrays["residual"].total, memory)

    def rebind(self, output: int, count: int, arrays: Sequence[Memory]) -> bool:
        placed = dict(zip(self._arrays, arrays, strict=True))
        self.output, self._pointers = output, [placed.get(name, _NOWHERE)[0] for name in _ARRAYS]
        self._rows, rest = divmod(count, self._hidden)
        lengths = placed["residual"][1], placed.get("scales", _NOWHERE)[1]
        return rest == 0 and lengths == (count, scales_of(self._rows, self._columns, tiled=self._tiled))

    def _arguments(self, rows_of_shard: int) -> NormArguments:
        shape = self._rows, rows_of_shard, self._hidden, tiles_of(self._columns) if self._tiled else 0
        return NormArguments(self.output, *self._pointers, *shape, self._eps, self._scale)

    def fused(self, reduced: int, shards: int = 1) -> tuple[tuple[str, ...], NormArguments]:
        # Other ranks may have arrays at other addresses, because ranks need not run the same code for them.
        places = self.output, self.row_nbytes, *self._pointers[: len(_ROWS)]
        aligned = reduce(or_, places) % PACKET_NBYTES == 0
        return self._options[aligned], self._arguments(-(-self._rows // shards))

    def separate_launch(self, source: int, failed: int, multiprocessors: int) -> Launch:
        arguments = NormKernelArguments(source, failed, self._arguments(self._rows))
        blocks = min(self._rows, _BLOCKS_OF_A_MULTIPROCESSOR * multiprocessors)
        return Launch(norm_kernel(self.dtype.name, self._options[False]), arguments, blocks, NORM_THREADS)

    def apply_on_host(self, reduced: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """See `BoundEpilogue`. It adds numbers in the order of the kernel, so it has the kernel's bits."""
        wide = _FLOAT32 if is_narrow(self.dtype) else self.dtype
        weight, bias, linear_bias = (self._row(name, wide) for name in ("weight", "bias", "linear_bias"))
        assert weight is not None
        shape = -1, self._hidden
        residuals = host_array(self._arrays["residual"]).reshape(shape)
        values, results = reduced.reshape(shape), out.reshape(self._rows, -1)
        scale = host_array(self._arrays["scale"])[0] if "scale" in self._arrays else np.float32(self._scale)
        scales = host_array(self._arrays["scales"]) if "scales" in self._arrays else None
        step = max(1, _BLOCK // weight.size)
        with np.errstate(all="ignore"):
            for start in range(0, len(values), step):
                rows = slice(start, start + step)
                total = values[rows].astype(wide)
                if linear_bias is not None:
                    total = total + linear_bias
                np.copyto(residuals[rows], total + residuals[rows].astype(wide), casting="unsafe")
                h = residuals[rows].astype(wide)
                if self._centred:
                    h = h - self._mean(h)
                normal = h * (wide.type(1) / np.sqrt(self._mean(h * h) + wide.type(self._eps))) * weight
                if bias is not None:
                    normal = normal + bias
                if self._quantized is not None:
                    quantize(self._quantized, normal * scale, start, results[rows].view(np.uint8), scales)
                    continue
                if is_narrow(self.result):
                    normal = normal.astype(_FLOAT32)
                np.copyto(results[rows], normal, casting="unsafe")

    def _row(self, name: str, wide: np.dtype[Any]) -> npt.NDArray[Any] | None:
        return host_array(self._arrays[name]).astype(wide) if name in self._arrays else None

    def _mean(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the mean of each row, as a column."""
        mean: npt.NDArray[Any] = _sums(values, PACKET_NBYTES // self.dtype.itemsize) / values.dtype.type(self._hidden)
        return mean


def _sums(values: npt.NDArray[Any], per_packet: int) -> npt.NDArray[Any]:
    """Return the sum of each row, as a column."""
    rows, hidden = values.shape
    threads = NORM_THREADS
    while threads > 1 and (threads // 2) * per_packet >= hidden:
        threads //= 2  # the other threads would add nothing
    steps = -(-hidden // (threads * per_packet))
    padded = np.zeros((rows, steps * threads * per_packet), values.dtype)
    padded[:, :hidden] = values
    # Element [n, row, thread] is the n-th element that a thread adds.
    added = padded.reshape(rows, steps, threads, per_packet).transpose(1, 3, 0, 2).reshape(-1, rows, threads)
    sums: npt.NDArray[Any] = added[0]
    for each in added[1:]:
        sums = sums + each
    while threads > 1:
        threads //= 2
        sums = sums[:, :threads] + sums[:, threads:]
    return sums
