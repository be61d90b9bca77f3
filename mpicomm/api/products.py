"""The matrix products of a Communicator that a collective precedes or follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

if TYPE_CHECKING:
    from mpicomm.products.calls import Products
    from mpicomm.products.operands import Multiply


class ProductCalls(MPI.Intracomm):
    """Products of matrices whose rows or partial sums are spread over ranks. All of them are *collective*.

    **Order.** A call on device arrays is stream-ordered, as in the collectives, and CUDA graphs can contain it after a
    first call outside. CuPy refuses cuBLAS in captures: pass tensors there, or ``product``. A call on host arrays
    blocks.

    **Matrices** are arrays of NumPy, CuPy or PyTorch, of one element type, and the same shapes on all ranks. CuPy
    multiplies neither bfloat16 nor fp8. Arrays of other libraries on GPUs become CuPy arrays. ``out``
    is C-contiguous; without it the call makes the result. ``bias`` is a row that is added to each row of the result.

    **Product.** The library of the arrays multiplies: ``cupy.matmul``, ``torch.mm`` or ``numpy.matmul``. A function
    ``product(a, b, out)`` takes its place. It gets some of the rows. It multiplies on the library's current stream,
    which need not be the caller's stream, and allocates nothing that it frees on another stream.

    **Scales.** Tensors of float8_e4m3fn or float8_e5m2 take ``scale_a`` and ``scale_b``, as ``torch._scaled_mm`` takes
    them, and ``b`` in columns. Each is a float32 tensor with one element, the same on all ranks, or with one for each
    row of ``a`` and each column of ``b``. The factors of the rows travel with the rows. The result and ``bias`` are of
    ``out_dtype``, by default bfloat16.

    **Overlap.** On GPUs of one peer domain copy engines carry the data while the library multiplies. The product is cut
    into few pieces, by ranks. All ranks choose by a model of both ways, so small products, and products between several
    peer domains, run one after the other. Records of calls and ``python -m mpicomm.info`` say which way a call takes.

    **Results.** A piece has the bits of the whole product if the library takes the same kernel for both. cuBLAS does
    so for large products on H100s, but does not promise it. Otherwise elements differ by the rounding of float32 sums
    in another order, and then by one rounding to the element type. Partial sums are rounded to the element type, added
    in float32 in the order of ranks, and rounded once. So all ranks have the same bits in every run.

    **Memory** for data on its way belongs to the communicator. It grows by powers of two up to 1 GiB or a 64th of the
    GPU's memory, and counts towards MPICOMM_MEMORY. If a call needs more, it runs one after the other.

    **Errors.** `InvalidUsageError` for arguments that have no product, on the rank that passes them; on the host on all
    ranks. If ranks pass different shapes or types, all ranks raise: `InvalidUsageError` on the host, `PeerError` on
    GPUs. If a rank is missing, also because it died in its product, the others raise `CollectiveTimeoutError`. If
    ``product`` raises before a reduction on the host, the other ranks raise `PeerError`. On GPUs the next call or
    ``check`` may raise.
    """

    _products: Products

    def allgather_matmul(
        self,
        a: Any,
        b: Any,
        out: Any = None,
        *,
        bias: Any = None,
        gathered: Any = None,
        product: Multiply | None = None,
        scale_a: Any = None,
        scale_b: Any = None,
        out_dtype: Any = None,
        stream: Any = None,
    ) -> Any:
        """Gather the rows ``a`` of all ranks, and return their product with this rank's ``b``.

        ``a`` has shape [m, K], ``b`` has shape [K, n], and the result has shape [size * m, n]. The rows of rank r are
        rows r * m to (r + 1) * m. An array ``gathered`` of shape [size * m, K] receives the gathered rows.
        """
        scaling = scale_a, scale_b, out_dtype
        return self._products.run("allgather_matmul", stream, a, b, out, bias, product, scaling, gathered)

    def matmul_reduce_scatter(
        self,
        a: Any,
        b: Any,
        out: Any = None,
        *,
        bias: Any = None,
        product: Multiply | None = None,
        scale_a: Any = None,
        scale_b: Any = None,
        out_dtype: Any = None,
        stream: Any = None,
    ) -> Any:
        """Add the products ``a @ b`` of all ranks, and return this rank's rows of the sum.

        ``a`` has shape [M, k], ``b`` has shape [k, n], and the result has shape [M / size, n]: block r of the rows on
        rank r. ``bias`` is added once, to the rounded sum.
        """
        scaling = scale_a, scale_b, out_dtype
        return self._products.run("matmul_reduce_scatter", stream, a, b, out, bias, product, scaling)

    def matmul_allreduce(
        self,
        a: Any,
        b: Any,
        out: Any = None,
        *,
        bias: Any = None,
        product: Multiply | None = None,
        scale_a: Any = None,
        scale_b: Any = None,
        out_dtype: Any = None,
        stream: Any = None,
    ) -> Any:
        """Add the products ``a @ b`` of all ranks, and return the whole sum.

        ``a`` has shape [M, k], ``b`` has shape [k, n], and the result has shape [M, n]. ``bias`` is added once, to the
        rounded sum.
        """
        scaling = scale_a, scale_b, out_dtype
        return self._products.run("matmul_allreduce", stream, a, b, out, bias, product, scaling)
