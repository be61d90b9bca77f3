"""Overlapped: plans of products that overlap with their collective on the GPUs of one peer domain."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from mpicomm.collectives.gpu.algorithms.base import Domain, launch_tag
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction
from mpicomm.collectives.gpu.algorithms.copies.schedule import Barrier, Reduce
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectTemplate
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.steps import AlgorithmChoice, LibraryWork, Step
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
    scattering_pairs,
)

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine
    from mpicomm.collectives.gpu.plan import Plan
    from mpicomm.collectives.gpu.plan_cache import PlanCache

_MOST_PLANS = 256
_ALIGNED_NBYTES = 256


class ProductPlan:
    """A planned call. Each enqueue binds matrices to it, because a plan must not keep the memory of the caller."""

    def __init__(self, lane: ForkedStream) -> None:
        self.plan: Plan
        self._lane = lane
        self.gathered = self.partial = self.pulled = 0
        """The addresses of this rank's memory for the shards of all ranks, for its partial sums, and for the partial
        sums that a peer pulls."""
        self._matrices: dict[str, Any] = {}
        self._operands: Operands | None = None
        self._stream = 0
        self._own: dict[str, dict[str, Any]] = {}
        """The matrices over memory of the communicator, by library."""

    def enqueue(self, carry_out: Callable[..., None], operands: Operands, stream: int) -> None:
        """Enqueue the call on the current stream of the library, with these matrices.

        ``carry_out`` is `PlanCache.carry_out`, which may enqueue the plan on another stream.
        """
        own = self._own.get(operands.library.name)
        if own is None:
            own = self._own[operands.library.name] = self._made(operands)
        self._matrices, self._operands = {"a": operands.a, "out": operands.out, **own}, operands
        self._stream = stream
        try:
            carry_out(self.plan, stream, operands.a)
        finally:
            self._matrices, self._operands = {}, None

    def _made(self, operands: Operands) -> dict[str, Any]:
        memory, (rows, inner) = operands.library.memory, operands.a.shape
        if self.gathered:
            return {"gathered": memory(self.gathered, (operands.shape[0], inner), operands.a)}
        made = {"partial": (self.partial, rows), "pulled": (self.pulled, 2 * operands.shape[0])}
        return {
            name: memory(pointer, (height, operands.shape[1]), operands.out)
            for name, (pointer, height) in made.items()
            if pointer
        }

    def multiply(self, action: Multiply) -> LibraryWork:
        """Return the step of a product."""
        begin, at, rows = action.begin, action.at, action.rows

        def work(operands: Operands) -> None:
            left, into = self._matrices[action.left], self._matrices[action.into]
            first = at if operands.kind == "allgather_matmul" else begin  # the row in the rows of all shards
            operands.multiply(left[begin : begin + rows], into[at : at + rows], first)

        return self._step(work, in_lane=True)

    def add_bias(self, action: AddBias) -> LibraryWork:
        """Return the step that adds the bias."""

        def work(operands: Operands) -> None:
            rows = operands.out[action.begin : action.begin + action.rows]
            rows += operands.bias

        return self._step(work)

    def _step(self, work: Callable[[Operands], None], *, in_lane: bool = False) -> LibraryWork:
        def enqueue(stream: int) -> None:
            operands = self._operands
            assert operands is not None
            stream = self._lane.fork(stream) if in_lane else stream
            with nullcontext() if stream == self._stream else operands.library.current(stream):
                work(operands)

        return LibraryWork(enqueue)


class Overlapped:
    """The overlapped calls of one engine of a peer domain, planned once for each set of arrays."""

    def __init__(self, calls: PlanCache) -> None:
        self._engine: DeviceEngine = cast("DeviceEngine", calls.engine)
        self._carry_out = calls.carry_out
        self._known: OrderedDict[Any, ProductPlan] = OrderedDict()
        self._lane = ForkedStream()

    def facts(self, operands: Operands) -> Facts:
        """Return the facts by which all ranks choose the way of a call."""
        domain = self._engine.domain
        rows = operands.a.shape[0] * (domain.size if operands.kind == "allgather_matmul" else 1)
        inner, columns = map(int, operands.b.shape)
        return Facts(
            operands.kind,
            operands.dtype,
            operands.a.dtype.itemsize,
            operands.result_like.dtype.itemsize,
            rows,
            inner,
            columns,
            domain.size,
            domain.multiprocessors,
            domain.link_speed,
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
        pointer, text = operands.library.pointer, operands.text
        kept = 0 if operands.gathered is None else pointer(operands.gathered)
        key = text, pointer(operands.a), pointer(operands.out), kept
        call = self._known.get(key)
        if call is None:
            call = self._plan(operands, way, key, kept)
        else:
            self._known.move_to_end(key)
        call.enqueue(self._carry_out, operands, stream)

    def _plan(self, operands: Operands, way: ProductWay, key: Any, kept: int) -> ProductPlan:
        call, facts, cut = ProductPlan(self._lane), way.facts, way.cut
        assert cut is not None

        def steps(domain: Domain, shared: Sequence[int], scratch: int) -> Iterable[Step]:
            a, out, bias = operands.library.pointer(operands.a), key[2], operands.bias is not None
            actions: Iterable[Action]
            if facts.kind == "allgather_matmul":
                call.gathered = shared[domain.rank]
                place = Place(domain.rank, domain.size, facts.shard_rows)
                actions = gathering(place, cut, facts.row_nbytes, a, shared, kept)
            elif facts.kind == "matmul_reduce_scatter":
                call.partial = scratch
                place = Place(domain.rank, domain.size, facts.shard_rows)
                if cut.pairs:
                    call.pulled = shared[domain.rank] + (domain.size - 1) * facts.shard_rows * facts.row_nbytes
                    actions = scattering_pairs(place, facts.row_nbytes, scratch, shared, out, bias=bias)
                else:
                    actions = scattering(place, cut, facts.row_nbytes, scratch, shared, out, bias=bias)
            else:
                place = Place(domain.rank, domain.size, facts.rows)
                landing = [pointer + _results_nbytes(facts) for pointer in shared]
                actions = reducing(place, cut, facts.row_nbytes, landing, shared, out, bias=bias)
            return self._steps(actions, call, operands, domain)

        request = Request("products", 1 << (_shared_nbytes(facts, cut) - 1).bit_length())
        scratch_nbytes = facts.rows * facts.row_nbytes if facts.kind == "matmul_reduce_scatter" else 0
        choice = AlgorithmChoice("overlap", way.why)
        call.plan = self._engine.prepare_own(operands.text, choice, request, scratch_nbytes, steps)
        if len(self._known) >= _MOST_PLANS:
            self._known.popitem(last=False)
        self._known[key] = call
        return call

    def _steps(
        self, actions: Iterable[Action], call: ProductPlan, operands: Operands, domain: Domain
    ) -> Iterator[Step]:
        template, tag, barriers = DirectTemplate(domain), zlib.crc32(operands.text.encode()), 0
        for action in actions:
            if isinstance(action, Barrier):
                yield template.barrier(launch_tag(tag, barriers), after_copies=True)
                barriers += 1
            elif isinstance(action, Reduce):
                yield local_reduction(action, (operands.result_dtype, "sum"))
            elif isinstance(action, Multiply):
                yield call.multiply(action)
            elif isinstance(action, JoinLane):
                yield LibraryWork(self._lane.join)
            elif isinstance(action, AddBias):
                yield call.add_bias(action)
            else:
                yield action


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
