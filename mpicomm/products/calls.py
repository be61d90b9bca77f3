"""The matrix products of one communicator that a collective precedes or follows.

The other modules of this folder load at the first product, because `import mpicomm` loads this module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.collectives import operations as rows
from mpicomm.collectives.call import Arguments
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.dispatch.dispatcher import Dispatcher
from mpicomm.errors import InvalidUsageError
from mpicomm.log import logger
from mpicomm.mpi.arguments import refuse_stream, require_same_device
from mpicomm.session import Session

if TYPE_CHECKING:
    from mpicomm.products.choose import OverlapChoice, ProductKind
    from mpicomm.products.operands import Operands
    from mpicomm.products.overlapped import OverlappedProducts

_MAX_CALLS = 4096


class Products:
    """The products of the communicator of ``session``, whose collectives ``collectives`` runs.

    On the host, on one rank and between several peer domains the product and the collective run one after the other.
    """

    def __init__(self, collectives: Dispatcher, session: Session) -> None:
        self._collectives = collectives
        self._session = session
        self._size = len(session.placement.places)
        self._overlapped: OverlappedProducts | None = None
        self._choices: dict[str, OverlapChoice | None] = {}
        """The choices for the calls that all ranks have compared, by their text; None for one after the other."""

    def run(self, kind: ProductKind, stream: Any, a: Any, *given: Any) -> Any:
        """Run a call, and return its result. Collective; stream-ordered on GPUs, blocking on the host.

        ``given`` are the other arguments of `Operands`.
        """
        from mpicomm.products.operands import Operands

        on_gpus = isinstance(self._session.placement.here.device, int)
        gpu: Callable[[], GpuBackend] | None = partial(self._session.gpu, kind) if on_gpus else None
        reading = partial(Operands, kind, self._size, gpu, a, *given)
        if not on_gpus:
            return self._on_host(kind, reading, stream)
        operands = reading()
        if operands.device is None:
            return self._on_host(kind, lambda: operands, stream)
        return self._on_gpu(operands, stream, a)

    def describe(self) -> tuple[str, ...]:
        """Return which products overlap, as text; () on the host and before the first collective on GPUs. Local."""
        gpu = self._collectives.engines.gpu
        if gpu is None or self._size == 1 or len(self._session.placement.domains) > 1:
            return ()
        from mpicomm.products import choose

        domain = gpu.engine.domain  # type: ignore[attr-defined]
        return choose.describe(self._size, domain.multiprocessors, domain.link_speed)

    def _on_host(self, kind: ProductKind, reading: Callable[[], Operands], stream: Any) -> Any:
        made: list[tuple[Operands, Any]] = []

        def multiply_if_possible() -> str:
            refuse_stream(kind, stream)
            operands = reading()
            require_same_device(f"{kind}: a", operands.device, "cpu")
            if operands.out is None:
                operands.out = operands.new_matrix(operands.shape, operands.result_like)
            made.append((operands, None if kind == "allgather_matmul" else self._partial_sums(operands)))
            return operands.text

        # The product comes before the comparison, because MPI would wait for a rank that fails or dies in its product.
        self._session.set_up(kind).group.compare(kind, multiply_if_possible)
        operands, sums = made[0]
        self._gather_scales(operands, None)
        self._run_serially(operands, None, "on the host", sums)
        return operands.out

    def _on_gpu(self, operands: Operands, stream: Any, a: Any) -> Any:
        kind, session = operands.kind, self._session
        session.set_up(kind)
        require_same_device(f"{kind}: a", operands.device, session.backend.device)
        session.require_usable(kind)
        library, backend = operands.library, session.gpu(kind)
        resolved = backend.stream(stream, a)
        if library.name == "cupy" and operands.product is None and backend.is_capturing(resolved):
            raise InvalidUsageError(
                f"{kind}: CuPy calls cuBLAS in no capture: pass tensors of PyTorch, such as torch.from_dlpack(a), or "
                "pass product=, which multiplies by a kernel"
            )
        with nullcontext() if stream is None else library.current(resolved):
            if operands.out is None:
                operands.out = operands.new_matrix(operands.shape, operands.result_like)
            if kind == "allgather_matmul":
                operands.a = library.contiguous(operands.a)
            choice = self._choice_of(operands)
            self._gather_scales(operands, resolved)
            why = "nothing to overlap with" if choice is None else choice.why
            if choice is not None and choice.cut is not None and self._overlapped is not None:
                from mpicomm.collectives.gpu.call_memory import NoMemoryError

                try:
                    self._overlapped.enqueue(operands, choice, resolved)
                    return operands.out
                except NoMemoryError as error:  # on all ranks
                    logger.warning("%s runs slower, one after the other, because memory is short: %s", kind, error)
                    self._choices[operands.text], why = None, f"memory is short: {error}"
            self._run_serially(operands, resolved, why)
        return operands.out

    def _choice_of(self, operands: Operands) -> OverlapChoice | None:
        """Choose how to run a call. Collective the first time, when all ranks compare their calls; else local."""
        if self._size == 1:
            return None
        text = operands.text
        if text not in self._choices:
            from mpicomm.products.choose import choose

            gpu = self._collectives.engines.on_gpu(operands.kind)
            gpu.engine.require_same(text)
            if self._overlapped is None and len(self._session.placement.domains) == 1:
                from mpicomm.products.overlapped import OverlappedProducts

                self._overlapped = OverlappedProducts(gpu)
            choice = None
            if self._overlapped is not None and 0 not in (*operands.a.shape, *operands.b.shape):
                choice = choose(self._overlapped.problem(operands))
                if choice.cut is not None and not self._overlapped.fits(choice.problem, choice.cut):
                    why = "the data in flight would take more GPU memory than the communicator may take"
                    choice = replace(choice, cut=None, why=why)
            if len(self._choices) >= _MAX_CALLS:
                self._choices.clear()  # on all ranks alike, because they make the same calls
            self._choices[text] = choice
        return self._choices[text]

    def _gather_scales(self, operands: Operands, stream: int | None) -> None:
        """Gather the factors of the rows of all shards, before a product multiplies any row of a peer."""
        scales = operands.scales
        if scales is None or not operands.scaled_by_rows or operands.kind != "allgather_matmul" or self._size == 1:
            return
        library = operands.library
        whole = operands.new_matrix((self._size * operands.a.shape[0], 1), scales[0])
        given = Arguments(library.contiguous(scales[0]), whole)
        self._collectives.run(rows.ALLGATHER, stream, "auto", given)
        operands.scales = whole, scales[1]

    def _run_serially(self, operands: Operands, stream: int | None, why: str, sums: Any = None) -> None:
        """Run the product and the collective in turn. ``sums`` is the product of this rank, if it is done."""
        if self._session.tracer is not None:
            self._session.tracer.set_algorithm("one after the other", why)
        run, library, gathered = self._collectives.run, operands.library, operands.gathered
        if operands.kind == "allgather_matmul":
            if gathered is None:
                shape = (self._size * operands.a.shape[0], operands.a.shape[1])
                gathered = operands.a if self._size == 1 else operands.new_matrix(shape, operands.a)
            if gathered is not operands.a:
                run(rows.ALLGATHER, stream, "auto", Arguments(library.contiguous(operands.a), gathered))
            operands.multiply(gathered, operands.out)
            return
        if sums is None:
            sums = self._partial_sums(operands)
        if sums is not operands.out:
            run(rows.REDUCE_SCATTER_BLOCK, stream, "auto", Arguments(sums, operands.out, MPI.SUM))
        elif self._size > 1:
            run(rows.ALLREDUCE, stream, "auto", Arguments(MPI.IN_PLACE, operands.out, MPI.SUM))
        if operands.bias is not None:
            operands.out += operands.bias

    def _partial_sums(self, operands: Operands) -> Any:
        """Multiply, and return the product of this rank: ``out``, or a new matrix if it has more rows than ``out``."""
        into = operands.out
        if operands.kind == "matmul_reduce_scatter" and self._size > 1:
            into = operands.new_matrix((operands.a.shape[0], operands.shape[1]), operands.result_like)
        operands.multiply(operands.a, into)
        return into
