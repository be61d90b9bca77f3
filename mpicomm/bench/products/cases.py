"""The products to measure, their matrices, and the check of their results."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call
from mpicomm.errors import InvalidUsageError

KINDS = ("allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce")


@dataclass(frozen=True)
class ProductCase:
    """A product of ``rows`` x ``inner`` by ``inner`` x ``columns`` on each rank."""

    kind: str
    rows: int
    inner: int
    columns: int
    size: int

    @property
    def a_rows(self) -> int:
        """The rows of this rank's input."""
        return self.rows // self.size if self.kind == "allgather_matmul" else self.rows

    @property
    def out_rows(self) -> int:
        """The rows of this rank's result."""
        return self.rows // self.size if self.kind == "matmul_reduce_scatter" else self.rows


def cases_of(rows: list[int], inner: int, columns: int, size: int) -> list[ProductCase]:
    """Return the cases. The products after an all-gather and before a reduction have transposed shapes, as in a layer.

    Raises `InvalidUsageError` if the ranks cannot share the rows.
    """
    for each in rows:
        if each % size:
            raise InvalidUsageError(f"--rows {each}: {size} ranks cannot share them: pass a multiple of {size}")
    return [
        ProductCase(kind, each, *((inner, columns) if kind == "allgather_matmul" else (columns, inner)), size)
        for kind, each in itertools.product(KINDS, rows)
    ]


class Matrices:
    """The matrices of one case on one rank, of PyTorch on a GPU and of NumPy on the host."""

    def __init__(self, case: ProductCase, comm: Communicator, dtype: str) -> None:
        self.case, self._comm = case, comm
        self._on_gpu = isinstance(comm.device, int)
        if self._on_gpu:
            import torch

            self._torch = torch
            self._kind: dict[str, Any] = {"device": torch.device("cuda", comm.device), "dtype": getattr(torch, dtype)}
        self._dtype = dtype
        self.a = self._empty(case.a_rows, case.inner)
        self.b = self._empty(case.inner, case.columns)
        self.out = self._empty(case.out_rows, case.columns)
        self.whole = self._empty(case.rows, case.inner if case.kind == "allgather_matmul" else case.columns)
        """The gathered input, or the partial sums, of contenders that run one after the other."""

    def fill_exactly(self) -> None:
        """Fill the inputs with few small integers, so that all sums are exact in every element type and order."""
        self.a[...] = self._integers(self._comm.rank, *self.a.shape)
        self.b[...] = self._integers(100 + self._comm.rank, *self.b.shape)

    def fill_as_in_programs(self) -> None:
        """Fill the inputs with normal numbers, because a GPU needs less power for products of few small integers."""
        rng = np.random.default_rng(self._comm.rank)
        for array in (self.a, self.b):
            if self._on_gpu:
                array.normal_()
            else:
                array[...] = rng.standard_normal(array.shape)

    def count_wrong(self, out: Any) -> int:
        """Return how many elements of a result are wrong, after `fill_exactly`."""
        case, comm = self.case, self._comm
        ranks = [self._like(self._integers(rank, *self.a.shape)) for rank in range(comm.size)]
        if case.kind == "allgather_matmul":
            whole = self._torch.cat(ranks) if self._on_gpu else np.concatenate(ranks)
            wanted = whole @ self.b
        else:
            total: Any = 0
            for rank, a in enumerate(ranks):
                total = total + a @ self._like(self._integers(100 + rank, *self.b.shape))
            begin = comm.rank * case.out_rows if case.kind == "matmul_reduce_scatter" else 0
            wanted = total[begin : begin + case.out_rows]
        return int((out != self._like(wanted)).sum())

    def product(self) -> Call:
        """Return the product alone, with whole matrices."""
        whole, b, out = self.whole, self.b, self._empty(self.case.rows, self.case.columns)
        a = whole if self.case.kind == "allgather_matmul" else self.a
        return self.multiplying(a, b, out)

    def multiplying(self, a: Any, b: Any, out: Any) -> Call:
        """Return a call of the library's product."""
        if self._on_gpu:
            return lambda: self._torch.mm(a, b, out=out)
        return lambda: np.matmul(a, b, out=out)

    def _integers(self, seed: int, rows: int, columns: int) -> Any:
        if self._on_gpu:
            generator = self._torch.Generator(device=self._kind["device"]).manual_seed(seed)
            kind = {"device": self._kind["device"], "generator": generator}
            signs = self._torch.randint(-8, 9, (rows, columns), **kind)
            return ((signs == 8).int() - (signs == -8).int()).to(self._kind["dtype"])
        signs = np.random.default_rng(seed).integers(-8, 9, (rows, columns))
        return (signs == 8).astype(self._dtype) - (signs == -8).astype(self._dtype)

    def _like(self, array: Any) -> Any:
        return array.to(self._kind["dtype"]) if self._on_gpu else np.asarray(array, self._dtype)

    def _empty(self, rows: int, columns: int) -> Any:
        if self._on_gpu:
            return self._torch.empty(rows, columns, **self._kind)
        return np.empty((rows, columns), self._dtype)
