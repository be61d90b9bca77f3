"""Calls that are filled into templates, and calls that are read, on a device that notes their launches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.algorithms.base import Domain, Form, with_place
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.steps import Step
from mpicomm.collectives.gpu.call_templates import CallTemplate, CollectiveTemplate, template_of
from mpicomm.collectives.gpu.decision import Chosen, Decision
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.devices.base import GrowingScratch, Scratch
from mpicomm.kernels.team import Team
from mpicomm.kernels.variant import Launch
from mpicomm.symmetric.registry import Mappings


class Arena:
    """An arena of ``size`` ranks with all regions that are asked for, or with none."""

    def __init__(self, size: int, *, regions: bool) -> None:
        self.layout = ArenaLayout(size, 64)
        self.flagged = Inboxes(tuple(rank << 41 for rank in range(1, size + 1)), self.layout.flagged_inbox_nbytes)
        self.sentinels = Inboxes(tuple(rank << 42 for rank in range(1, size + 1)), self.layout.sentinel_inbox_nbytes)
        self._regions = regions

    def has(self, request: Request) -> bool:
        return self._regions

    def region(self, request: Request) -> ArenaRegion:
        return ArenaRegion(tuple(rank << 43 for rank in range(1, self.layout.size + 1)), request.slots_nbytes)


def as_enqueued(step: Step) -> Any:
    """Return a step as the device gets it."""
    if isinstance(step, Launch):
        return step.variant, bytes(step.arguments), step.blocks, step.threads, step.early
    return step


class Device:
    """A device that notes the steps of the latest call."""

    def __init__(self, *, regions: bool, size: int, rank: int, blocks: int, link_speed: float) -> None:
        team = Team(size=size, rank=rank, timeout_ns=7)
        for index in range(size):
            team.arenas[index], team.names[index] = (index + 1) << 40, index + 3
        self.domain = Domain(team, Arena(size, regions=regions), blocks, link_speed, most_staged_nbytes=1 << 30)
        self.launched: list[Any] = []
        backend: Any = SimpleNamespace(scratch=lambda nbytes: Scratch((1 << 53) + nbytes, nbytes, None))
        self.scratch = GrowingScratch(backend)

    def launch(self, plan: CallTemplate) -> None:
        """Launch the call that was filled into a template."""
        self.launched = []
        assert plan.launch is not None
        plan.launch(7)

    def enqueuers(self, steps: Sequence[Step]) -> list[Any]:
        return [lambda stream, step=step: self.launched.append(as_enqueued(step)) for step in steps]


def decision_of(call: Call, device: Device, asked: str) -> Decision:
    buffers = call.buffers(device.scratch.of(call.scratch_nbytes))
    form = Form.of_call(call, buffers, () if call.packed is None else call.packed.gaps)
    return Decision(form, asked, BUILT_IN, device.domain, cast(Any, device))


def plan_of(call: Call, device: Device, asked: str, mappings: Mappings | None = None) -> CollectiveTemplate:
    """Return the template of all calls like this one."""
    return template_of(call, decision_of(call, device, asked), mappings or Mappings(), device.scratch)


def as_read(
    call: Call, device: Device, asked: str = "auto", mappings: Mappings | None = None
) -> tuple[Chosen, list[Any] | None, str]:
    """Return the choice for a read call, its launches, and its text; no launches if there is no memory for it."""
    decision, output, memory = decision_of(call, device, asked), call.common_output, None
    if output is not None and output.total and mappings is not None:
        memory = mappings.find(output.pointer, output.nbytes)
    buffers, text = call.buffers(device.scratch.of(call.scratch_nbytes)), str(call.signature)
    longest = max(decision.form.numbers(buffers)[0], default=0)
    chosen = decision.at(longest, symmetric=memory is not None)
    steps = decision.steps(chosen, buffers, call.signature.hash32, memory, call.epilogue)
    if chosen.launcher.into_memory and memory is not None:
        text = with_place(text, memory)
    return chosen, None if steps is None else [*map(as_enqueued, steps)], text


class Kind:
    """The calls of one kind. The first makes the template; each call in it is compared with the same call as read."""

    def __init__(self, device: Device, asked: str = "auto", mappings: Mappings | None = None) -> None:
        self._device, self._asked, self._mappings = device, asked, mappings or Mappings()
        self.template: Any = None

    def require_alike(self, call: Call, *buffers: Any) -> None:
        """Fill a call with these buffers, as `plain_array` reads them, into the template, if it can be filled in."""
        if self.template is None:
            self.template = plan_of(call, self._device, self._asked, self._mappings)
        chosen, launched, text = as_read(call, self._device, self._asked, self._mappings)
        template = self.template
        assert None not in buffers and template.takes(*buffers)
        if not template.fill(*buffers):
            assert not launched
            return
        self._device.launch(template)
        assert self._device.launched == launched
        assert template.text == text
        assert template.choice == chosen.choice


def packet_launch(template: PacketTemplate, tag: int, way: PacketConfig, nbytes: int, itemsize: int) -> Launch:
    """Return the launch of the exchange itself of which a template was made, whose elements have ``itemsize`` bytes."""
    lengths = [0 if span is None else span.count * itemsize for span in template.places]
    addresses = [span.pointer if span is not None and span.count else 0 for span in template.places]
    number = len(lengths)
    template.bind(range(number), range(number, 2 * number), 2 * number)
    return template.launch_of(template.write([*addresses, *lengths], max(lengths), nbytes, tag, way))
