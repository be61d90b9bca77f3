"""Calls through a cache of plans, each compared with the launches of the same call when it is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.base import AnyPlan, Form, Step
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Domain, Inboxes, Request, with_place
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate, sendrecv_memory, sendrecv_request
from mpicomm.collectives.gpu.call_templates import CallTemplate, MessageTemplate, template_of
from mpicomm.collectives.gpu.decision import Decision
from mpicomm.collectives.gpu.device_counts_template import DeviceCountsTemplate
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.collectives.neighborhood import Neighborhood
from mpicomm.collectives.operations import Operation
from mpicomm.devices.base import GrowingScratch
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.team import Team
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mappings
from tests.helpers.fakes.fake_driver import DeviceArray, read_device_arrays
from tests.helpers.references.reductions import dtype_named

FLOAT, BF16 = np.dtype("f4"), dtype_named("bfloat16")
SLOT = 45
"""Array k of a call lies in the slot of memory from k << 45 on."""


Array = DeviceArray
let_it_be_cupys = read_device_arrays


class Arena:
    """An arena of ``size`` ranks with all regions that are asked for, or with none."""

    def __init__(self, size: int, *, regions: bool) -> None:
        self.layout = ArenaLayout(size, 64)
        self.ll = Inboxes(tuple(rank << 41 for rank in range(1, size + 1)), self.layout.ll_inbox_nbytes)
        self.sentinels = Inboxes(tuple(rank << 42 for rank in range(1, size + 1)), self.layout.sentinel_inbox_nbytes)
        self._regions = regions

    def has(self, request: Request) -> bool:
        return self._regions

    def region(self, request: Request) -> ArenaRegion:
        return ArenaRegion(tuple(rank << 43 for rank in range(1, self.layout.size + 1)), request.slots_nbytes)


class Device:
    """The engine of a device that notes the steps of the latest call."""

    def __init__(self, rank: int, size: int, *, regions: bool = True, blocks: int = 132, speed: float = 1.0) -> None:
        team = Team(size=size, rank=rank, timeout_ns=7)
        for index in range(size):
            team.arenas[index], team.user_ranks[index] = (index + 1) << 40, index + 3
        self.domain = Domain(team, Arena(size, regions=regions), blocks, speed, most_staged_nbytes=1 << 30)
        self.launched: list[Any] = []
        backend: Any = SimpleNamespace(scratch=lambda nbytes: (1 << 60) + nbytes)
        self.scratch = GrowingScratch(backend)

    def enqueuers(self, steps: Sequence[Step]) -> list[Any]:
        return [lambda stream, step=step: self.launched.append(as_enqueued(step)) for step in steps]

    def launch(self, template: AnyPlan) -> list[Any]:
        """Return the launches of the call that was filled into a template."""
        self.launched = []
        cast(Any, template).launch(7)
        return self.launched

    def decision(self, call: Call, asked: str) -> Decision:
        made = call.buffers(self.scratch.of(call.blocks.nbytes))
        form = Form.of_call(call, made, call.blocks.gaps)
        return Decision(form, asked, BUILT_IN, self.domain, cast(Any, self))

    def template(self, call: Call, mappings: Mappings, asked: str) -> CallTemplate | None:
        if call.device_counts is not None:
            return DeviceCountsTemplate(call.signature, call.device_counts, self.domain, cast(Any, self))
        return template_of(call, self.decision(call, asked), mappings, self.scratch)

    def read(self, call: Call, mappings: Mappings, asked: str) -> tuple[list[Any] | None, Any]:
        """Return the launches of a read call, by new launchers, and its text and algorithm.

        There are no launches without memory for them.
        """
        if call.device_counts is not None:
            template = DeviceCountsTemplate(call.signature, call.device_counts, self.domain, cast(Any, self))
            return [*map(as_enqueued, template.read(call.device_counts))], (template.text, template.choice)
        decision, output, memory = self.decision(call, asked), call.common_output, None
        if output is not None and output.total:
            memory = mappings.find(output.pointer, output.nbytes)
        made, text = call.buffers(self.scratch.of(call.blocks.nbytes)), str(call.signature)
        chosen = decision.at(max(decision.form.numbers(made)[0], default=0), symmetric=memory is not None)
        steps = decision.steps(chosen, made, call.signature.hash32, memory, call.epilogue)
        if chosen.launcher.into_memory and memory is not None:
            text = with_place(text, memory)
        return None if steps is None else [*map(as_enqueued, steps)], (text, chosen.choice)


def as_enqueued(step: Step) -> Any:
    """Return a step as the device gets it."""
    if isinstance(step, Launch):
        return step.variant, bytes(step.arguments), step.blocks, step.threads, step.early
    return step


class ReadCall(AnyPlan):
    """The plan of a call that was read."""

    def __init__(self, launched: list[Any] | None, facts: Any, scratch_nbytes: int) -> None:
        self.launched, self.facts, self.scratch_nbytes = launched, facts, scratch_nbytes


class Calls:
    """The calls of a communicator, through its cache."""

    def __init__(self, device: Device, neighborhood: Neighborhood | None = None) -> None:
        self.device, self.mappings, self._neighborhood = device, Mappings(), neighborhood
        self.cache = PlanCache(cast(Any, SimpleNamespace(mappings=self.mappings, backend=None)), cast(Any, device))

    def make(self, operation: Operation, asked: str, given: Arguments) -> str:
        """Make a call. Return whether it was found, also as one with a plan of its own, or what became of it."""
        key, team = (operation, asked, *given), self.device.domain.team
        found, scratch_nbytes = self.cache.find(*key), self.device.scratch.nbytes
        launched, facts = None, None
        if isinstance(found, ReadCall):
            launched, facts = found.launched, found.facts
            if found.scratch_nbytes != scratch_nbytes:
                return "found, with other scratch memory"
        elif found is not None:
            launched, facts = self.device.launch(found), (found.text, found.choice)
        try:
            call = Call(operation, given, team.rank, team.size, asked, self._neighborhood)
            expected, said = self.device.read(call, self.mappings, asked)
        except (InvalidUsageError, TypeError):
            assert found is None
            return "refused"
        if found is not None:
            assert launched == expected
            assert facts == said
            return "kept" if isinstance(found, ReadCall) else "found"
        plan = ReadCall(expected, said, self.device.scratch.nbytes)
        plan.template_of = partial(self.device.template, call, self.mappings, asked)
        self.cache.add(plan, key, by_output=False, read=call)
        return "read" if expected and self.device.scratch.nbytes == scratch_nbytes else "without a launch"

    def exchange(self, send: Array | None, receive: Array, route: tuple[int, int, int, int]) -> str:
        """As `make`, for messages between this rank and another one."""
        key, domain = ("Sendrecv", send, receive, route), self.device.domain
        found = self.cache.find_message(*key)
        launched = self.device.launch(found) if isinstance(found, CallTemplate) else None
        channels = sendrecv_memory(domain.size, 64)
        spans = [Span(0, 0) if each is None else Span(each.data.ptr, each.nbytes) for each in (send, receive)]
        sent = None if send is None else Message(route[0], spans[0], route[1])
        received = Message(route[2], spans[1], None if route[3] == MPI.ANY_TAG else route[3])
        memory = domain.arena.region(sendrecv_request(channels)).pointers
        template = SendrecvTemplate(domain, channels, memory, sent, received)
        steps = template.steps_of(template.fill(spans[0].pointer, spans[0].count, spans[1].pointer, spans[1].count))
        expected = [*map(as_enqueued, steps)]
        if found is not None:
            assert (found.launched if isinstance(found, ReadCall) else launched) == expected
            return "kept" if isinstance(found, ReadCall) else "found"
        plan: Any = ReadCall(expected, None, 0)
        plan.template_of = partial(MessageTemplate, "Sendrecv", template, cast(Any, self.device))
        self.cache.add_message(plan, *key, sent, received)
        return "read"
