"""DeviceEngine: carries out collectives between the GPUs of a node, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from cupy.cuda import runtime

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call import Call
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.algorithms.base import NO_CHOICE, AlgorithmChoice, Form, Step
from mpicomm.collectives.gpu.algorithms.direct.plan import barrier
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Domain, Request, whole_lines
from mpicomm.collectives.gpu.algorithms.sendrecv import plan as sendrecv
from mpicomm.collectives.gpu.call_memory import CallMemory, DeviceArena, device_facts, multiprocessors_of, team_of
from mpicomm.collectives.gpu.call_templates import BY_KERNELS, MessageTemplate, template_of
from mpicomm.collectives.gpu.decision import Decision, usual_kernels
from mpicomm.collectives.gpu.device_counts_template import DeviceCountsTemplate
from mpicomm.collectives.gpu.plan import Plan, StepLoader
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.packed import CallBlocks, PackJob, pack_launches
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.signature import Signature
from mpicomm.devices.base import GrowingScratch, slowest_gb_s
from mpicomm.devices.cuda.driver import DriverShutDownError
from mpicomm.devices.cuda.events import LocalEvent, Mark
from mpicomm.devices.cuda.load import kernels_of
from mpicomm.devices.cuda.stream_order import StreamOrder
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import Kind, MemoryUse
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.errors import CollectiveTimeoutError, PeerError
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped, Mappings, SharedSegments

_MOST_DECISIONS = 256
MAX_CHANNELS = 128
"""The most blocks of a kernel of exchange.cu: half of an H200's 132 multiprocessors keep the links nearly full."""
_MESSAGE_CHANNELS = 128  # between two ranks each way: the blocks that send, and the blocks that receive
_MOST_STAGED_NBYTES = 1 << 30
_STAGED_PART = 64  # staging memory takes at most this fraction of a device's memory


class DeviceEngine:
    """Collectives on GPU memory, which need not be shared: data goes through the ranks' arenas.

    Construction is collective over ``node`` and raises as ``share`` does. If an enqueued call fails, the backend's
    `check` raises: `CollectiveTimeoutError` names the rank that did not come, `PeerError` names the call of each rank.
    The communicator is unusable then.

    ``ranks_per_device`` is the highest number of the communicator's ranks that share a device. It counts ranks of all
    nodes and peer domains, because the containers of one machine count as nodes. Calls take at most ``most_nbytes`` of
    memory beyond the arena. Both numbers are the same on all ranks.

    The top of each algorithm's kernel explains how the ranks meet, and why they cannot deadlock.
    """

    def __init__(
        self,
        node: Group,
        backend: GpuBackend,
        kind: Kind,
        call_log: CallLog,
        ranks_per_device: int,
        most_nbytes: int | None = None,
    ) -> None:
        self._backend = backend
        self._call_log = call_log
        devices = node.allgather("collectives: set-up", lambda: device_facts(backend))
        multiprocessors, concurrent_ranks = multiprocessors_of(devices, ranks_per_device)
        most_staged_nbytes = min(_MOST_STAGED_NBYTES, min(each.total_nbytes for each in devices) // _STAGED_PART)

        def find() -> Tuning | None:
            links = (backend.link(each.uuid, kind) for each in devices[1:])
            return tuning.find(backend.info.name, lambda: slowest_gb_s(links)) if node.rank == 0 else None

        found = node.allgather("collectives: table", find)[0]
        assert found is not None
        self.tuning: Tuning = found
        """The table of the first rank, which all ranks use."""
        layout = ArenaLayout(node.size, min(MAX_CHANNELS, multiprocessors))
        self._arena = DeviceArena(node, backend, kind, layout, most_nbytes)
        host_slots = kind == "staged"
        self.domain = Domain(
            team_of(backend, node, self._arena.pointers),
            self._arena,
            multiprocessors,
            self.tuning.link_speed,
            most_staged_nbytes,
            # Programmatic dependent launch needs compute capability 9.0. A kernel that begins early relies on this
            # device seeing the previous kernel's stores. That guarantees nothing for slots in host memory. If several
            # ranks run on the device at once, early blocks could keep out blocks for which another rank waits.
            early=backend.info.compute_capability >= (9, 0) and not host_slots and concurrent_ranks == 1,
            host_slots=host_slots,
        )
        self._memory = CallMemory(node, call_log, backend, self._arena)
        self._decisions: dict[Hashable, Decision] = {}
        channels = max(1, min(_MESSAGE_CHANNELS, multiprocessors * sendrecv.SENDRECV_BLOCKS // 2))
        self._sendrecv = sendrecv.sendrecv_memory(node.size, channels)
        self._scratch = GrowingScratch(backend)
        self._plans: WeakSet[Plan] = WeakSet()  # weak, because the callers who enqueue plans keep them alive
        self._ordinal = backend.info.ordinal
        with backend.current():
            self._order = StreamOrder(backend.current, backend.permanent_streams)
            self._kernels = kernels_of(backend.info)
            self._loader = StepLoader(backend, self._kernels)
        self.completions = self._order.completions
        backend.differing_calls = self._memory.differing_calls

    def prepare_call(self, call: Call, mappings: Mappings, requested: str) -> Plan:
        """Return the plan of this rank's part of a read call, for any number of launches.

        ``mappings`` are the symmetric arrays, and ``requested`` is ``algorithm=``. Collective if the call needs more
        memory than all earlier calls, else local. This posts the call to the call log, so the first `enqueue` of the
        plan does not. If the ranks cannot set up memory for an algorithm of "auto", they take another algorithm and log
        a warning.

        Raises `InvalidUsageError` for an algorithm that cannot carry out the call and for a reduction that is not
        defined, and as ``share`` does. The first use of a reduction compiles its kernel, which takes about a second
        once per machine.
        """
        if call.device_counts is not None:
            made = DeviceCountsTemplate(call.signature, call.device_counts, self.domain, self._loader)
            self._call_log.post(made.text_format)
            plan = self.plan(made.text_format, made.read(call.device_counts), made.choice)
            plan.template_of = lambda: made
            return plan
        output, memory, signature = call.common_output, None, call.signature
        if output is not None and output.total:
            memory = mappings.find(output.pointer, output.nbytes)
        decision, buffers, blocks, scratch = self._decided(call, requested, symmetric=memory is not None)
        before, after = blocks.launches(self._backend, scratch)
        call_facts = str(signature), signature.hash32
        plan = self._prepare(decision, buffers, call_facts, memory, call.epilogue, before, after)
        if not (before or after):  # a template has no steps that pack
            plan.template_of = partial(template_of, call, decision, mappings, self._scratch)
        return plan

    def prepare_step(self, operation: Operation, buffers: Buffers, call: tuple[str, int], requested: str) -> Plan:
        """Return the plan of a collective of this domain that is a step of a larger call; else as `prepare_call`.

        ``call`` are the text and the hash of the larger call.
        """
        return self._prepare(self._decision(Form.of_buffers(operation, buffers), requested), buffers, call)

    def _decided(self, call: Call, requested: str, *, symmetric: bool) -> tuple[Decision, Buffers, CallBlocks, int]:
        """Return the decision of a read call, its memory, its blocks, and the address of scratch memory.

        ``symmetric`` is whether the output of all ranks is symmetric memory.
        """
        blocks = call.blocks
        while True:
            scratch = self._scratch.of(blocks.nbytes)
            buffers = call.buffers(scratch, blocks)
            form = Form.of_call(call, buffers, blocks.gaps)
            decision, longest = self._decision(form, requested), max(form.numbers(buffers)[0], default=0)
            # The choice of a launcher does not depend on gaps, so all ranks make the same one.
            if not form.gaps or decision.at(longest, symmetric=symmetric).launcher.moves_gaps:
                return decision, buffers, blocks, scratch
            blocks = call.packed_blocks

    def _decision(self, form: Form, requested: str) -> Decision:
        key = form.key, requested
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            decision = Decision(form, requested, self.tuning, self.domain, self._loader)
            domain = self.domain
            self._kernels.expect(usual_kernels(form.reduction, domain.size, host_slots=domain.host_slots))
            self._decisions[key] = decision
        return decision

    def _prepare(
        self,
        decision: Decision,
        buffers: Buffers,
        call: tuple[str, int],
        memory: Mapped | None = None,
        epilogue: BoundEpilogue | None = None,
        before: Sequence[Step] = (),
        after: Sequence[Step] = (),
    ) -> Plan:
        """Return the plan of a call with a text and a hash, whose memory is set up here."""
        call_text, hash32 = call
        longest = max(decision.form.numbers(buffers)[0], default=0)
        chosen, choice, text = self._memory.choose_and_reserve(decision, longest, call_text, memory)
        assert not decision.form.gaps or chosen.launcher.moves_gaps, text
        steps = decision.steps(chosen, buffers, hash32, memory, epilogue)
        assert steps is not None, text
        return self.plan(text, [*before, *steps, *after], choice)

    def prepare_custom(
        self,
        text: str,
        choice: AlgorithmChoice,
        request: Request,
        scratch_nbytes: int,
        steps_of: Callable[[Domain, Sequence[int], int], Iterable[Step]],
    ) -> Plan:
        """Return a plan of a collective whose steps the caller plans; no launch of it makes a graph.

        ``steps_of`` gets the address of each rank's shared memory for ``request``, and the address of this rank's
        private memory. Collective if the call needs more memory than all earlier calls of its purpose, else local. This
        posts the call to the call log, so the first `enqueue` of the plan does not. Raises `NoMemoryError` on all
        ranks.
        """
        self._memory.reserve([request], text)
        steps = steps_of(self.domain, self._arena.region(request).pointers, self._scratch.of(scratch_nbytes))
        plan = self.plan(text, [*steps], choice)
        plan.launch = plan.enqueue  # in place of a graph, because work of another library may differ each time
        return plan

    def require_same(self, text: str) -> None:
        """Post a call, and wait until all ranks have posted it. Collective, blocking.

        Raises `PeerError` on all ranks if a rank is in another call, and `CollectiveTimeoutError` if a rank is missing.
        """
        self._call_log.post(text)
        self._memory.wait_for(self._call_log.behind)

    def abort(self, error: CollectiveTimeoutError | PeerError) -> None:
        """Make every later `check` of the backend raise an error, and all kernels leave. Local, any thread."""
        self._backend.fail(error)
        self._arena.abort()

    def prepare_barrier(self) -> Plan:
        """Return a plan of a barrier, in which a stream waits until the streams of all ranks are in it. Local."""
        signature = Signature("Barrier", "uint8")
        self._call_log.post(str(signature))
        step = barrier(self.domain, signature.hash32, after_copies=False)
        return self.plan(str(signature), [step], AlgorithmChoice("one_shot", "there is nothing to choose"))

    def prepare_messages(self, text: str, sent: Message | None, received: Message | None) -> Plan:
        """Return a plan that sends one message and receives another; ``text`` names the call. It has a `template_of`.

        Collective the first time, then local. Both ranks of a message must enqueue it in the same order, relative to
        their other messages and to collectives.
        """
        request = sendrecv.sendrecv_request(self._sendrecv)
        if not self._arena.has(request):
            self._memory.reserve([request], "the first message in stream order, for which all ranks set up memory")
        memory = self._arena.region(request).pointers
        template = sendrecv.SendrecvTemplate(self.domain, self._sendrecv, memory, sent, received)
        packs, spans = [list[Launch](), list[Launch]()], []
        packed = [0 if end is None or end.elements is None else whole_lines(end.span.count) for end in (sent, received)]
        at = self._scratch.of(sum(packed))
        for number, end in enumerate((sent, received)):
            span = Span(0, 0) if end is None else end.span
            if end is not None and end.elements is not None and packed[number]:  # a kernel packs or unpacks it
                span = Span(at, span.count)
                job = PackJob(end.elements.address, end.elements.layout, 0)
                packs[number] = pack_launches(self._backend, [job], at, unpacks=end is received)
                at += packed[number]
            spans.append(span)
        send, receive = spans
        filled = template.fill(send.pointer, send.count, receive.pointer, receive.count)
        steps = [*packs[0], *template.steps_of(filled), *packs[1]]
        plan = self.plan(text, steps, BY_KERNELS, collective=False)
        plan.template_of = partial(MessageTemplate, text, template, self._loader)
        return plan

    def plan(
        self, text: str, steps: Sequence[Step], choice: AlgorithmChoice = NO_CHOICE, *, collective: bool = True
    ) -> Plan:
        """Return a plan; ``text`` names its call. If it is not ``collective``, this rank waits for no other. Local."""
        plan = Plan(text, self._loader.enqueuers(steps), choice, collective=collective)
        self._plans.add(plan)
        return plan

    def enqueue(
        self, plan: Plan, stream: int, event: LocalEvent | Mark | None = None, host_barrier: bool = False
    ) -> bool:
        """Enqueue a plan of this engine on ``stream``. Local, does not block; capturable in a graph.

        Return whether this call has enqueued work, after which it has recorded ``event``. A captured call enqueues no
        work, and a rank without a part in the call enqueues none. At its second enqueue a plan becomes a graph, which
        is cheaper from then on. With ``host_barrier`` this blocks until all ranks launch this call.

        All ranks enqueue the same collectives in the same order. Plans on different streams, or on different streams of
        one capture, run one after the other. The caller must order a captured graph relative to other work of the
        communicator (see `StreamOrder`). This posts the call to the call log, but a replay of a graph does not.
        """
        is_new = plan.is_new
        if is_new:
            plan.is_new = False
        if plan.collective:
            # `ready` pairs with the wait of a host barrier: nothing delays this thread before its launch.
            if is_new:
                self._call_log.publish_ready()
            else:
                self._call_log.post(plan.text_format, plan.count, plan.offset, ready=True)
            if host_barrier:
                # Ranks in the same call may still have to load its kernel, which waits for other threads or the device.
                self._memory.wait_for(self._call_log.not_ready)
        if not plan.steps:
            return False
        # After a host barrier this rank makes no graph, because that may wait for other threads.
        eager = plan.launch or (plan.enqueue if is_new or host_barrier else partial(plan.launch_graph, self._backend))
        # This check is cheaper than a change of context. It nearly always succeeds, because creating a Communicator
        # makes its GPU the current device.
        if runtime.getDevice() == self._ordinal:
            pending = self._order.enqueue(stream, eager, plan.enqueue, event)
        else:
            with self._backend.current():
                pending = self._order.enqueue(stream, eager, plan.enqueue, event)
        return pending

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's arena and scratch memory; local."""
        yield from self._arena.memory_use()
        yield MemoryUse("scratch", device_nbytes=self._scratch.total_nbytes)

    def memories(self) -> Iterable[SharedSegments]:
        """Return the memories of the arena; local."""
        return self._arena.memories()

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. This rank's work must be over. The engine is unusable afterwards."""
        self._backend.differing_calls = None
        self._arena.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena and events; local, after every peer's `close_peers`."""
        # As in GpuBackend.close, this happens here and not in the garbage collector.
        with suppress(DriverShutDownError), self._backend.current():
            for plan in self._plans:
                plan.drop_graph()
            self._loader.close()
            self._order.close()
        self._arena.close_own()
