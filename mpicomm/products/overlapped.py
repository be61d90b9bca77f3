"""Plans of products that overlap with their collective on the GPUs of one peer domain."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from mpicomm.collectives.gpu.algorithms.base import AlgorithmChoice, LibraryWork, Step
from mpicomm.collectives.gpu.algorithms.copies.plan import with_launches
from mpicomm.collectives.gpu.algorithms.memory import Domain, Request
from mpicomm.devices.cuda.side_streams import ForkedStream
from mpicomm.products import schedule
from mpicomm.products.choose import OverlapChoice, ProductProblem
from mpicomm.products.operands import Operands
from mpicomm.products.schedule import Action, AddBias, JoinProducts, Multiply, PeerOrder, RowCut

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine
    from mpicomm.collectives.gpu.plan import Plan
    from mpicomm.collectives.gpu.plan_cache import PlanCache

_MAX_PLANS = 256
_ALIGNED_NBYTES = 256


class OverlappedProducts:
    """The overlapped calls of one engine of a peer domain, planned once for each set of arrays."""

    def __init__(self, calls: PlanCache) -> None:
        self._engine: DeviceEngine = cast("DeviceEngine", calls.engine)
        self._calls = calls
        self._known: dict[Any, tuple[Plan, dict[str, Any]]] = {}
        """The plans, each with its matrices over memory of the communicator."""
        self._side_stream = ForkedStream()
        # Each enqueue binds its call here, because a plan must not keep the memory of the caller.
        self._operands: Operands | None = None
        self._matrices: dict[str, Any] = {}
        self._stream = 0

    def problem(self, operands: Operands) -> ProductProblem:
        """Return the problem of a call, from which all ranks make the same choice."""
        domain = self._engine.domain
        itemsizes = operands.a.dtype.itemsize, operands.result_like.dtype.itemsize
        rows = operands.a.shape[0] * (domain.size if operands.kind == "allgather_matmul" else 1)
        inner, columns = map(int, operands.b.shape)
        multiprocessors, speed = domain.multiprocessors, domain.link_speed
        return ProductProblem(
            operands.kind, operands.dtype, *itemsizes, rows, inner, columns, domain.size, multiprocessors, speed
        )

    def fits(self, problem: ProductProblem, cut: RowCut) -> bool:
        """Return whether the call may take the memory that it needs; the same on all ranks.

        In host memory, which ranks share if their GPUs have no access to each other, a product would read too slowly.
        """
        domain = self._engine.domain
        return not domain.host_slots and _shared_nbytes(problem, cut) <= domain.most_staged_nbytes

    def enqueue(self, operands: Operands, choice: OverlapChoice, stream: int) -> None:
        """Enqueue a call. Its matrices are on the current stream of their library.

        Collective if it sets up memory, else local. Raises `NoMemoryError` on all ranks.
        """
        pointer = operands.library.pointer
        gathered = 0 if operands.gathered is None else pointer(operands.gathered)
        key = operands.text, operands.library.name, pointer(operands.a), pointer(operands.out), gathered
        known = self._known.get(key)
        if known is None:
            known = self._plan(operands, choice, gathered)
            if len(self._known) >= _MAX_PLANS:
                self._known.clear()
            self._known[key] = known
        plan, own = known
        self._operands, self._stream = operands, stream
        self._matrices = {"a": operands.a, "out": operands.out, **own}
        try:
            # It may enqueue the plan on another stream.
            self._calls.enqueue(plan, stream, operands.a, operands.a, blocking=True)
        finally:
            self._operands, self._matrices = None, {}

    def _plan(self, operands: Operands, choice: OverlapChoice, gathered: int) -> tuple[Plan, dict[str, Any]]:
        library, problem, cut = operands.library, choice.problem, choice.cut
        assert cut is not None
        own: dict[str, Any] = {}

        def steps(domain: Domain, shared: Sequence[int], scratch: int) -> Iterable[Step]:
            a, out, bias = library.pointer(operands.a), library.pointer(operands.out), operands.bias is not None
            (height, inner), (out_height, columns) = operands.a.shape, operands.shape
            rows = problem.rows if problem.kind == "matmul_allreduce" else problem.shard_rows
            order = PeerOrder(domain.rank, domain.size, rows)
            actions: Iterable[Action]
            if problem.kind == "allgather_matmul":
                own["gathered"] = library.memory(shared[domain.rank], (out_height, inner), operands.a)
                actions = schedule.allgather(order, cut, problem.row_nbytes, a, shared, gathered)
            elif problem.kind == "matmul_reduce_scatter":
                own["partial"] = library.memory(scratch, (height, columns), operands.out)
                if cut.pairs:
                    pulled = shared[domain.rank] + (domain.size - 1) * problem.shard_rows * problem.row_nbytes
                    own["pulled"] = library.memory(pulled, (2 * out_height, columns), operands.out)
                actions = schedule.reduce_scatter(order, cut, problem.row_nbytes, scratch, shared, out, bias=bias)
            else:
                inboxes = [pointer + _results_nbytes(problem) for pointer in shared]
                actions = schedule.allreduce(order, cut, problem.row_nbytes, inboxes, shared, out, bias=bias)
            return self._steps(actions, operands, domain)

        request = Request("products", 1 << (_shared_nbytes(problem, cut) - 1).bit_length())
        scratch_nbytes = problem.rows * problem.row_nbytes if problem.kind == "matmul_reduce_scatter" else 0
        algorithm = AlgorithmChoice("overlap", choice.why)
        return self._engine.prepare_custom(operands.text, algorithm, request, scratch_nbytes, steps), own

    def _steps(self, actions: Iterable[Action], operands: Operands, domain: Domain) -> Iterator[Step]:
        tag = zlib.crc32(operands.text.encode())
        for action in with_launches(actions, domain, tag, (operands.result_dtype, "sum")):
            if isinstance(action, (Multiply, AddBias)):
                yield LibraryWork(partial(self._work, action))
            elif isinstance(action, JoinProducts):
                yield LibraryWork(self._side_stream.join)
            else:
                yield action

    def _work(self, action: Multiply | AddBias, stream: int) -> None:
        operands = self._operands
        assert operands is not None
        stream = self._side_stream.fork(stream) if isinstance(action, Multiply) else stream
        with nullcontext() if stream == self._stream else operands.library.current(stream):
            if isinstance(action, Multiply):
                begin, at, rows = action.begin, action.at, action.rows
                left, into = self._matrices[action.left], self._matrices[action.into]
                first = at if operands.kind == "allgather_matmul" else begin  # the row in the rows of all shards
                operands.multiply(left[begin : begin + rows], into[at : at + rows], first)
            else:
                biased = operands.out[action.begin : action.begin + action.rows]
                biased += operands.bias


def _results_nbytes(problem: ProductProblem) -> int:
    return -(-problem.rows * problem.row_nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _shared_nbytes(problem: ProductProblem, cut: RowCut) -> int:
    """Return the bytes of each rank's memory that peers write."""
    if problem.kind == "allgather_matmul":
        return problem.rows * problem.row_nbytes
    if problem.kind == "matmul_reduce_scatter":
        return (problem.size - 1 + 2 * cut.pairs) * problem.shard_rows * problem.row_nbytes
    most_rows = -(-problem.rows // (cut.parts * problem.size))
    return _results_nbytes(problem) + cut.parts * (problem.size - 1) * most_rows * problem.row_nbytes
