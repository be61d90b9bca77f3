"""DomainsEngine: carries out collectives on device arrays of several peer domains, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.algorithms.base import AlgorithmChoice, AnyPlan, Copy
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.gpu.engine import DeviceEngine
from mpicomm.collectives.gpu.plan import Plan
from mpicomm.collectives.operations import ALLGATHER, Operation
from mpicomm.collectives.packed import pack_launch, table_of_blocks
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import GrowingScratch
from mpicomm.devices.cuda.driver import DriverShutDownError
from mpicomm.devices.cuda.events import LocalEvent, Mark
from mpicomm.devices.cuda.stream_order import StreamOrder
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import MemoryUse
from mpicomm.domains.schedules import DEPTH, pieces_of, require_rank_order, run_pipeline, schedule_of
from mpicomm.domains.steps import Combine, DomainLayout, DomainStep, NetworkStep, Pack, Step, Transport
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.kernels.reductions import COMBINE_THREADS, CombineArguments, blocks_for, combine_kernel, reduction_of
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mappings

Item = Plan | NetworkStep
_BYTE = np.dtype(np.uint8)


@dataclass(eq=False)
class DomainsPlan(AnyPlan):
    """This rank's part of a call, ready to be enqueued again and again: plans of its domain, and network steps."""

    call: Signature
    pieces: Sequence[Sequence[Item]]
    choice: AlgorithmChoice
    before: Plan | None = None
    after: Plan | None = None

    @cached_property
    def text(self) -> str:
        return str(self.call)


class DomainsEngine:
    """Collectives on device arrays of all ranks, with the interface of `DeviceEngine`, which serves this rank's domain.

    ``transport`` moves network messages between domains. Construction is local. If the transport blocks the host, a
    call that fails raises at once. Otherwise the next `check` of the backend raises.
    """

    def __init__(self, layout: DomainLayout, engine: DeviceEngine, backend: GpuBackend, transport: Transport) -> None:
        self._layout = layout
        self._engine = engine
        self._backend = backend
        self._transport = transport
        self._scratch = [GrowingScratch(backend) for _ in range(DEPTH)]
        self._packed = GrowingScratch(backend)
        self._tokens = GrowingScratch(backend)
        self._order = StreamOrder(backend.current)
        self.completions = self._order.completions
        # For the ranks of this rank's domain. The peers of messages are indices in it.
        self.require_same, self.prepare_messages = engine.require_same, engine.prepare_messages

    def prepare_call(self, call: Call, mappings: Mappings, requested: str) -> DomainsPlan:
        require_rank_order(call, self._layout)
        if call.wire is not None:
            raise InvalidUsageError(
                f'{call.operation}: wire_dtype="{call.wire}" is for the GPUs of one peer domain, and the ranks are in '
                f"{len(self._layout.domains)}: leave it out"
            )
        if call.device_counts is not None:
            raise InvalidUsageError(
                f"{call.operation}: counts on the GPU are for the GPUs of one peer domain, and the ranks are in "
                f"{len(self._layout.domains)}: pass counts in host memory, such as counts.get() or counts.cpu()"
            )
        blocks = call.packed_blocks
        scratch = self._packed.of(blocks.nbytes)
        buffers = call.buffers(scratch, blocks)
        if call.operation.reduces:
            reduction_of(buffers.dtype, buffers.op)  # it raises here if the reduction is not defined
        signature = call.signature
        pieces = self._plan(call.operation, buffers, signature, call.nbytes or 0, requested)
        before = after = None
        if blocks.before or blocks.after:
            launches = blocks.launches(self._backend, scratch)
            before, after = (self._engine.plan(str(signature), steps, collective=False) for steps in launches)
        if call.epilogue is not None:
            backend, output = self._backend, buffers.receives[0]
            where = output.pointer, backend.faults.failed, backend.multiprocessors
            steps = [call.epilogue.separate_launch(*where)] if output.count else []
            after = self._engine.plan(str(signature), steps, collective=False)
        return DomainsPlan(signature, pieces, self._choice(requested), before, after)

    def prepare_barrier(self) -> DomainsPlan:
        """Return a plan that blocks a stream until the streams of all ranks have reached their barrier. Local.

        It is an all-gather of a byte: a rank that has the byte of each rank knows that all have reached it.
        """
        layout, memory = self._layout, self._tokens.of(1 + self._layout.size)
        blocks = [Span(memory + 1 + rank, 1) for rank in range(layout.size)]
        buffers = Buffers(layout.rank, layout.size, _BYTE, sends=[Span(memory, 1)], receives=blocks)
        call = Signature("Barrier", str(_BYTE))
        return DomainsPlan(call, self._plan(ALLGATHER, buffers, call, layout.size, "auto"), self._choice("auto"))

    def _choice(self, requested: str) -> AlgorithmChoice:
        """Return the algorithm of a call as text: a schedule of the domains, and the transport between them."""
        why = "" if requested == "auto" else f', algorithm="{requested}"'
        slow = "between peer domains through pinned host memory" if self._transport.name == "pinned" else ""
        return AlgorithmChoice(
            f"peer domains, {self._transport.name}", f"{len(self._layout.domains)} peer domains{why}", slow
        )

    def _plan(
        self, operation: Operation, buffers: Buffers, call: Signature, nbytes: int, requested: str
    ) -> list[list[Item]]:
        schedule, tag = schedule_of(operation, nbytes, self._layout, requested), (str(call), call.hash32)
        pieces = pieces_of(schedule, buffers, self._layout, [scratch.of for scratch in self._scratch])
        return [[item for step in piece for item in self._plan_step(step, tag, requested)] for piece in pieces]

    def _plan_step(self, step: Step, tag: tuple[str, int], requested: str) -> Iterable[Item]:
        """Yield the plan of a step, if it is not empty. ``tag`` is the text and the hash of the whole call."""
        if isinstance(step, NetworkStep):
            yield step
        elif isinstance(step, DomainStep):
            algorithm = requested if requested == "copy_engine" and requested in names_for(step.operation) else "auto"
            yield self._engine.prepare_step(step.operation, step.buffers, tag, algorithm)
        elif launch := _launch(step, self._backend):
            yield self._engine.plan(tag[0], [launch], collective=False)

    def enqueue(
        self, plan: DomainsPlan | Any, stream: int, event: LocalEvent | Mark | None = None, host_barrier: bool = False
    ) -> bool:
        """Enqueue a plan of this engine on ``stream``; return as `DeviceEngine.enqueue`. Collective.

        ``host_barrier`` is for plans of one domain: only the data of a call synchronizes ranks of several domains. If
        the transport blocks the host, this returns after the network messages of all ranks have come, and raises
        `InvalidUsageError` in a capture.
        """
        if not isinstance(plan, DomainsPlan):  # it is a plan of one domain
            return self._engine.enqueue(plan, stream, event, host_barrier)
        if not self._transport.capturable and self._backend.is_capturing(stream):
            raise InvalidUsageError(
                f"{plan.text}: the engine {self._transport.name} between peer domains blocks the host and cannot be "
                "part of a CUDA graph: call it outside the capture, or use MPICOMM_INTERNODE=nccl"
            )
        enqueue = partial(self._enqueue, plan)
        with self._backend.current():
            return self._order.enqueue(stream, enqueue, enqueue, event)

    def _enqueue(self, plan: DomainsPlan, stream: int) -> None:
        def start(network_step: NetworkStep) -> Callable[[], object]:
            return self._transport.start(network_step, stream, plan.call)

        def work(item: Plan) -> None:
            self._engine.enqueue(item, stream)

        try:
            if plan.before is not None:
                work(plan.before)
            run_pipeline(plan.pieces, work, start)
            if plan.after is not None:
                work(plan.after)
        except InvalidUsageError:
            raise  # nothing is enqueued yet
        except BaseException as error:
            # The usual cause is KeyboardInterrupt. Kernels of the domain, and other domains, would wait for this rank.
            failure = error
            if not isinstance(failure, (CollectiveTimeoutError, PeerError)):
                rank = self._layout.rank
                text = f"{plan.text}: rank {rank} left in the middle: {type(error).__name__}: {error}"
                failure = PeerError(text, ranks=[rank])
            self._engine.abort(failure)
            self._transport.publish_error(failure)
            raise

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the scratch memory of this rank; local.

        The channels of the transport "mapped" report their slots. The other transports do not know the memory of NCCL
        and MPI, or have none.
        """
        nbytes = sum(scratch.total_nbytes for scratch in (*self._scratch, self._packed, self._tokens))
        return (MemoryUse("scratch", device_nbytes=nbytes),)

    def close_peers(self) -> None:
        self._transport.close()

    def close_own(self) -> None:
        with suppress(DriverShutDownError), self._backend.current():
            self._order.close()


def _launch(step: Combine | Pack, backend: GpuBackend) -> Launch | Copy | None:
    """Return the kernel or the copy of a step; None for a step without elements."""
    if isinstance(step, Pack):
        if len(step.blocks) < 2:
            return next((Copy(*copy, local=True) for copy in step.copies()), None)
        # The table has only the distances of the blocks, so calls on other memory share it.
        first = step.blocks[0].pointer
        table = table_of_blocks([each.pointer - first for each in step.blocks], [each.count for each in step.blocks])
        return pack_launch(backend, table, first, step.packed, unpacks=step.unpacks)
    if not step.count:
        return None
    reduction, arrays = reduction_of(step.dtype, step.op), step.sources
    result = reduction[0] if step.result == step.dtype else step.result.name
    arguments = CombineArguments(arrays.start, arrays.step, step.output, step.count, len(arrays), step.divisor)
    blocks = blocks_for(step.count * step.result.itemsize, backend.multiprocessors)
    return Launch(combine_kernel(reduction, result), arguments, blocks=blocks, threads=COMBINE_THREADS)
