"""Calls that are filled into the plans of their forms, on a device that notes their launches."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.built_in import BUILT_IN
from mpicomm.collectives.gpu.filled_plan import FilledPlan
from mpicomm.collectives.gpu.fillings import Fillings
from mpicomm.collectives.gpu.form_plan import FormPlan, form_plan
from mpicomm.collectives.gpu.growing_scratch import GrowingScratch
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.wire import Wire
from mpicomm.devices.base import Scratch
from mpicomm.kernels.team import Team
from mpicomm.symmetric.registry import Mappings
from tests.helpers.fakes.addresses import DeviceArray


class Arena:
    """An arena of ``size`` ranks with all regions that are asked for, or with none."""

    def __init__(self, size: int, *, regions: bool) -> None:
        self.layout = ArenaLayout(size, 64)
        self.flagged = Inboxes(tuple(rank << 41 for rank in range(1, size + 1)), self.layout.flagged_inbox_nbytes)
        self.sentinels = Inboxes(tuple(rank << 42 for rank in range(1, size + 1)), self.layout.sentinel_inbox_nbytes)
        self.any_length = self.sentinels
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
        self.node = Node(team, Arena(size, regions=regions), blocks, link_speed, most_staged_nbytes=1 << 30)
        self.launched: list[Any] = []
        backend: Any = SimpleNamespace(scratch=lambda nbytes: Scratch((1 << 53) + nbytes, nbytes, None))
        self.scratch = GrowingScratch(backend)

    def launch(self, plan: FilledPlan) -> None:
        """Launch the call that was filled into a plan."""
        self.launched = []
        assert plan.launch is not None
        plan.launch(7)

    def enqueuers(self, steps: Sequence[Step]) -> list[Any]:
        return [lambda stream, step=step: self.launched.append(as_enqueued(step)) for step in steps]


def call_of(
    operation: Operation,
    rank: int,
    size: int,
    count: int,
    dtype: np.dtype[Any],
    root: int,
    *,
    in_place: bool,
    at: int,
    wire: Wire | None = None,
) -> Call:
    """A call in which each block has ``count`` elements, with buffers at addresses that depend on ``at``."""
    blocks = {"one": count, "blocks": count * size}
    send: Any = DeviceArray((1 << 50) + 4096 * at, blocks[operation.send], dtype)
    receive: Any = DeviceArray((1 << 51) + 128 * at, blocks[operation.receive], dtype)
    if in_place and operation.rooted in ("", "receive") and (operation.rooted == "" or rank == root):
        if operation.reduces:
            receive = DeviceArray(receive.pointer, blocks[operation.send], dtype)
        send = MPI.IN_PLACE
    elif in_place and operation.rooted == "send" and rank == root:
        receive = MPI.IN_PLACE
    op = MPI.SUM if operation.reduces else None
    return Call(operation, Arguments(send, receive, op, root, wire=wire), rank, size)


def plan_of(call: Call, device: Device, asked: str, mappings: Mappings | None = None) -> FormPlan:
    node = device.node
    fillings = Fillings(Form(call, node.rank, node.size), asked, BUILT_IN, node, cast(Any, device))
    return form_plan(call.signature, fillings, mappings or Mappings(), device.scratch)


def fill(plan: FormPlan, call: Call) -> bool:
    (send, sent), (receive, received) = (
        (0, 0) if operand is None else (operand.pointer, operand.total) for operand in (call.send, call.receive)
    )
    first = (0, 0, None) if call.in_place else (send, sent, None)
    return plan.fill(first, (receive, received, None))
