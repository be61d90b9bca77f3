"""Overlapped: plans of products that overlap with their collective on the GPUs of one peer domain."""

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
from mpicomm.products.choose import Facts, ProductWay
from mpicomm.products.operands import Operands
from mpicomm.products.schedule import (
    Action,
    AddBias,
    JoinLane,
    Multiply,
    Place,
    RowCut,
    gathering,
    reducing,
    scattering,
)

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine
    from mpicomm.collectives.gpu.plan import Plan
    from mpicomm.collectives.gpu.plan_cache import PlanCache

_MOST_PLANS = 256
_ALIGNED_NBYTES = 256


class Overlapped:
    """The overlapped calls of one engine of a peer domain, planned once for each set of arrays."""

    def __init__(self, calls: PlanCache) -> None:
        self._engine: DeviceEngine = cast("DeviceEngine", calls.engine)
        self._calls = calls
        self._known: dict[Any, tuple[Plan, dict[str, Any]]] = {}
        """The plans, each with its matrices over memory of the communicator."""
        self._lane = ForkedStream()
        # Each enqueue binds its call here, because a plan must not keep the memory of the caller.
        self._operands: Operands | None = None
        self._matrices: dict[str, Any] = {}
        self._stream = 0

    def facts(self, operands: Operands) -> Facts:
        """Return the facts by which all ranks choose the way of a call."""
        domain = self._engine.domain
        itemsizes = operands.a.dtype.itemsize, operands.result_like.dtype.itemsize
        rows = operands.a.shape[0] * (domain.size if operands.kind == "allgather_matmul" else 1)
        inner, columns = map(int, operands.b.shape)
        multiprocessors, speed = domain.multiprocessors, domain.link_speed
        return Facts(
            operands.kind, operands.dtype, *itemsizes, rows, inner, columns, domain.size, multiprocessors, speed
        )

    def fits(self, facts: Facts, cut: RowCut) -> bool:
        """Return whether the call may take the memory that it needs; the same on all ranks.

        In host memory, which ranks share if their GPUs have no access to each other, a product would read too slowly.
        """
        domain = self._engine.domain
        return not domain.host_slots and _shared_nbytes(facts, cut) <= domain.most_staged_nbytes

    def enqueue(self, operands: Operands, way: ProductWay, stream: int) -> None:
        """Enqueue a call. Its matrices are on the current stream of their library.

        Collective if it sets up memory, else local. Raises `NoMemoryError` on all ranks.
        """
        pointer = operands.library.pointer
        kept = 0 if operands.gathered is None else pointer(operands.gathered)
        key = operands.text, operands.library.name, pointer(operands.a), pointer(operands.out), kept
        known = self._known.get(key)
        if known is None:
            known = self._plan(operands, way, kept)
            if len(self._known) >= _MOST_PLANS:
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

    def _plan(self, operands: Operands, way: ProductWay, kept: int) -> tuple[Plan, dict[str, Any]]:
        library, facts, cut = operands.library, way.facts, way.cut
        assert cut is not None
        own: dict[str, Any] = {}

        def steps(domain: Domain, shared: Sequence[int], scratch: int) -> Iterable[Step]:
            a, out, bias = library.pointer(operands.a), library.pointer(operands.out), operands.bias is not None
            (height, inner), (out_height, columns) = operands.a.shape, operands.shape
            actions: Iterable[Action]
            if facts.kind == "allgather_matmul":
                own["gathered"] = library.memory(shared[domain.rank], (out_height, inner), operands.a)
                place = Place(domain.rank, domain.size, facts.shard_rows)
                actions = gathering(place, cut, facts.row_nbytes, a, shared, kept)
            elif facts.kind == "matmul_reduce_scatter":
                own["partial"] = library.memory(scratch, (height, columns), operands.out)
                place = Place(domain.rank, domain.size, facts.shard_rows)
                if cut.pairs:
                    pulled = shared[domain.rank] + (domain.size - 1) * facts.shard_rows * facts.row_nbytes
                    own["pulled"] = library.memory(pulled, (2 * out_height, columns), operands.out)
                actions = scattering(place, cut, facts.row_nbytes, scratch, shared, out, bias=bias)
            else:
                place = Place(domain.rank, domain.size, facts.rows)
                landing = [pointer + _results_nbytes(facts) for pointer in shared]
                actions = reducing(place, cut, facts.row_nbytes, landing, shared, out, bias=bias)
            return self._steps(actions, operands, domain)

        request = Request("products", 1 << (_shared_nbytes(facts, cut) - 1).bit_length())
        scratch_nbytes = facts.rows * facts.row_nbytes if facts.kind == "matmul_reduce_scatter" else 0
        choice = AlgorithmChoice("overlap", way.why)
        return self._engine.prepare_own(operands.text, choice, request, scratch_nbytes, steps), own

    def _steps(self, actions: Iterable[Action], operands: Operands, domain: Domain) -> Iterator[Step]:
        tag = zlib.crc32(operands.text.encode())
        for action in with_launches(actions, domain, tag, (operands.result_dtype, "sum")):
            if isinstance(action, (Multiply, AddBias)):
                yield LibraryWork(partial(self._work, action))
            elif isinstance(action, JoinLane):
                yield LibraryWork(self._lane.join)
            else:
                yield action

    def _work(self, action: Multiply | AddBias, stream: int) -> None:
        operands = self._operands
        assert operands is not None
        stream = self._lane.fork(stream) if isinstance(action, Multiply) else stream
        with nullcontext() if stream == self._stream else operands.library.current(stream):
            if isinstance(action, Multiply):
                begin, at, rows = action.begin, action.at, action.rows
                left, into = self._matrices[action.left], self._matrices[action.into]
                first = at if operands.kind == "allgather_matmul" else begin  # the row in the rows of all shards
                operands.multiply(left[begin : begin + rows], into[at : at + rows], first)
            else:
                biased = operands.out[action.begin : action.begin + action.rows]
                biased += operands.bias


def _results_nbytes(facts: Facts) -> int:
    return -(-facts.rows * facts.row_nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _shared_nbytes(facts: Facts, cut: RowCut) -> int:
    """Return the bytes of memory that peers write on each rank."""
    if facts.kind == "allgather_matmul":
        return facts.rows * facts.row_nbytes
    if facts.kind == "matmul_reduce_scatter":
        return (facts.size - 1 + 2 * cut.pairs) * facts.shard_rows * facts.row_nbytes
    most_rows = -(-facts.rows // (cut.parts * facts.size))
    return _results_nbytes(facts) + cut.parts * (facts.size - 1) * most_rows * facts.row_nbytes
