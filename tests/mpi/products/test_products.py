"""The products of a communicator against NumPy, on the host and on GPUs, and their errors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mpicomm
from tests.helpers.rigs.communicators import communicator, to_host

Array = npt.NDArray[Any]
# The first shape does not overlap on GPUs. The second overlaps after an all-gather, and the third before a reduction.
SHAPES = [(24, 16, 8), (1920, 4096, 4096), (1920, 512, 4096)]


def integers(seed: int, *shape: int) -> Array:
    """Small integers, whose products are exact in float32."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def product_of(xp: Any, a: Any, b: Any) -> Array:
    """The product of small integers, which is exact. The host is slow at large products."""
    return to_host(xp.asarray(a) @ xp.asarray(b))


def shapes(comm: mpicomm.Communicator) -> list[tuple[int, int, int]]:
    return SHAPES[:1] if comm.device == "cpu" else SHAPES


def test_allgather_matmul_multiplies_the_rows_of_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    for rows, inner, columns in shapes(comm):
        a = [integers(rank, rows, inner) for rank in range(comm.size)]
        b, bias = integers(100 + comm.rank, inner, columns), integers(7, columns)
        whole = np.concatenate(a)
        mine, gathered = xp.asarray(a[comm.rank]), xp.empty_like(xp.asarray(whole))
        wanted = product_of(xp, whole, b)
        for _ in range(3):
            got = comm.allgather_matmul(mine, xp.asarray(b), bias=xp.asarray(bias), gathered=gathered)
            assert (to_host(got) == wanted + bias).all()
            assert (to_host(gathered) == whole).all()
        out = xp.empty_like(got)
        assert comm.allgather_matmul(mine, xp.asarray(b), out) is out
        assert (to_host(out) == wanted).all()
        transposed = xp.asarray(np.ascontiguousarray(b.T)).T
        assert (to_host(comm.allgather_matmul(mine, transposed)) == wanted).all()


def test_matmul_reduce_scatter_and_allreduce_add_the_products(comm: mpicomm.Communicator, xp: Any) -> None:
    for rows, inner, columns in shapes(comm):
        a = [integers(rank, rows * comm.size, inner) for rank in range(comm.size)]
        b = [integers(100 + rank, inner, columns) for rank in range(comm.size)]
        bias = integers(7, columns)
        total = sum(product_of(xp, x, y) for x, y in zip(a, b, strict=True)) + bias
        mine, factor = xp.asarray(a[comm.rank]), xp.asarray(b[comm.rank])
        begin = comm.rank * rows
        for _ in range(3):
            got = comm.matmul_reduce_scatter(mine, factor, bias=xp.asarray(bias))
            assert (to_host(got) == total[begin : begin + rows]).all()
            assert (to_host(comm.matmul_allreduce(mine, factor, bias=xp.asarray(bias))) == total).all()
        out = xp.empty_like(got)
        assert comm.matmul_reduce_scatter(mine, factor, out) is out
        assert (to_host(out) == total[begin : begin + rows] - bias).all()
        # Rows that the ranks cannot share evenly.
        assert (to_host(comm.matmul_allreduce(mine[5:], factor)) == (total - bias)[5:]).all()


def test_a_function_multiplies_in_place_of_the_library(comm: mpicomm.Communicator, xp: Any) -> None:
    seen: list[int] = []

    def product(a: Any, b: Any, out: Any) -> None:
        seen.append(a.shape[0])
        xp.matmul(a, b, out=out)
        out *= 2

    a = [integers(rank, 8, 16) for rank in range(comm.size)]
    b = integers(3, 16, 4)
    got = comm.allgather_matmul(xp.asarray(a[comm.rank]), xp.asarray(b), product=product)
    assert (to_host(got) == 2 * np.concatenate(a) @ b).all() and sum(seen) == 8 * comm.size


@pytest.mark.parametrize("kind", ["matmul_reduce_scatter", "matmul_allreduce"])
def test_a_product_that_fails_on_one_rank_raises_on_all_ranks(host_comm: mpicomm.Communicator, kind: str) -> None:
    comm = host_comm
    failing = comm.size - 1

    def product(a: Array, b: Array, out: Array) -> None:
        np.matmul(a, b, out=out)
        if comm.rank == failing:
            raise ZeroDivisionError("no such product")

    a, b = np.ones((comm.size, 3)), np.ones((3, 2))
    if comm.rank == failing:
        with pytest.raises(ZeroDivisionError, match="no such product"):
            getattr(comm, kind)(a, b, product=product)
    else:
        with pytest.raises(mpicomm.PeerError, match="ZeroDivisionError: no such product") as caught:
            getattr(comm, kind)(a, b, product=product)
        assert caught.value.ranks == (failing,)
    assert (getattr(comm, kind)(a, b) == 3 * comm.size).all()


def test_empty_matrices_have_empty_products(comm: mpicomm.Communicator, xp: Any) -> None:
    assert comm.allgather_matmul(xp.empty((0, 4), "f4"), xp.empty((4, 3), "f4")).shape == (0, 3)
    zeros = comm.matmul_allreduce(xp.empty((2, 0), "f4"), xp.empty((0, 3), "f4"))
    assert (to_host(zeros) == np.zeros((2, 3))).all()


def test_bad_operands_are_refused_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    for shapes, text in (
        (((3, 4), (5, 2)), r"a of shape 3x4 and b of shape 5x2 have no product: b must have 4 rows"),
        (((3,), (3, 2)), r"a has 1 dimensions, shape 3: pass a matrix"),
        (((3, 4), (4, 2), (1, 2)), r"out has shape 1x2: pass an array of shape \d+x2"),
    ):
        with pytest.raises(mpicomm.InvalidUsageError, match=text):
            comm.allgather_matmul(*(xp.zeros(shape, "f4") for shape in shapes))
    a, b = xp.zeros((4 * comm.size, 4), "f4"), xp.zeros((4, 2), "f4")
    with pytest.raises(mpicomm.InvalidUsageError, match="b has dtype float64, and a has float32: convert b first"):
        comm.allgather_matmul(a, b.astype("f8"))
    with pytest.raises(mpicomm.InvalidUsageError, match="a has dtype bool"):
        comm.allgather_matmul(a.astype("?"), b.astype("?"))
    with pytest.raises(mpicomm.InvalidUsageError, match=r"out of shape .* is not C-contiguous: pass numpy"):
        comm.matmul_allreduce(a, b, xp.zeros((2, a.shape[0]), "f4").T)
    with pytest.raises(mpicomm.InvalidUsageError, match="product=3 is no function"):
        comm.matmul_allreduce(a, b, product=3)  # type: ignore[arg-type]
    if comm.size > 1:
        with pytest.raises(mpicomm.InvalidUsageError, match=r"pass a number of rows that [0-9]+ divides"):
            comm.matmul_reduce_scatter(a[1:], b)
    if comm.device == "cpu":
        with pytest.raises(mpicomm.InvalidUsageError, match="stream=1 is for device arrays"):
            comm.matmul_allreduce(a, b, stream=1)


def test_ranks_with_different_shapes_raise_on_all_ranks(device: str) -> None:
    with communicator(device) as comm:
        if comm.size == 1:
            pytest.skip("one rank agrees with itself")
        xp: Any = np if comm.device == "cpu" else pytest.importorskip("cupy")
        a = xp.zeros((4 + (comm.rank == 1), 4), "f4")
        said = r"4x4 .*on rank 0, .*5x4 @ 4x2|rank 0: .*4x4 .*rank 1: .*5x4 @ 4x2"
        with pytest.raises((mpicomm.InvalidUsageError, mpicomm.PeerError), match=said):
            comm.matmul_allreduce(a, xp.zeros((4, 2), "f4"))
            comm.check()


def test_narrow_floats_are_added_in_float32(host_comm: mpicomm.Communicator) -> None:
    comm = host_comm
    a = np.full((2, 2048), 1, np.float16)
    got = comm.allgather_matmul(a, np.full((2048, 2), 1, np.float16) * np.float16(1.5))
    assert (got == 3072).all()
    half = comm.matmul_reduce_scatter(np.ones((comm.size, 3), np.float16), np.ones((3, 2), np.float16))
    assert half.dtype == np.float16 and (half == 3 * comm.size).all()


KERNEL = r"""
extern "C" __global__ void multiply(const float* a, const float* b, float* out, int inner, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < inner; ++k) sum += a[blockIdx.y * inner + k] * b[k * columns + column];
  out[blockIdx.y * columns + column] = sum;
}
"""


@pytest.mark.gpu_alone  # the host has no graphs
def test_products_in_a_graph(comm: mpicomm.Communicator, xp: Any) -> None:
    kernel = xp.RawKernel(KERNEL, "multiply")

    def product(a: Any, b: Any, out: Any) -> None:  # CuPy calls cuBLAS in no capture
        sizes = np.int32(a.shape[1]), np.int32(b.shape[1])
        kernel((b.shape[1] // 256, a.shape[0]), (256,), (a, b, out, *sizes))

    (_, (rows, inner, columns), (_, short, _)), size = SHAPES, comm.size
    a = [integers(rank, rows, inner) for rank in range(size)]
    terms = [integers(rank, rows * size, short) for rank in range(size)]
    b, c = integers(3, inner, columns), integers(4, short, columns)
    gathered, total = product_of(xp, np.concatenate(a), b), product_of(xp, sum(terms), c)
    x, w, y, v = (xp.asarray(each) for each in (a[comm.rank], b, terms[comm.rank], c))
    out, rest = xp.empty((rows * size, columns), "f4"), xp.empty((rows, columns), "f4")
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()

    def calls() -> None:
        comm.allgather_matmul(x, w, out, product=product)
        comm.matmul_reduce_scatter(y, v, rest, product=product)

    with stream:
        calls()
        calls()
        stream.begin_capture()
        with pytest.raises(mpicomm.InvalidUsageError, match="CuPy calls cuBLAS in no capture"):
            comm.allgather_matmul(x, w, out)
        calls()
        graph = stream.end_capture()
        for factor in (1, 2, -1):
            x[...], y[...] = (xp.asarray(each[comm.rank]) * factor for each in (a, terms))
            graph.launch(stream)
            comm.check(stream)
            assert (to_host(out) == factor * gathered).all()
            assert (to_host(rest) == factor * total[comm.rank * rows : (comm.rank + 1) * rows]).all()


def test_a_late_rank_holds_up_only_the_result(comm: mpicomm.Communicator, xp: Any) -> None:
    rows, inner, columns = shapes(comm)[-1]
    a, b = xp.asarray(integers(1, rows * comm.size, inner)), xp.asarray(integers(2, inner, columns))
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.1)
        got = comm.matmul_reduce_scatter(a, b)
        begin = comm.rank * rows
        assert (to_host(got) == comm.size * product_of(xp, a[begin : begin + rows], b)).all()
