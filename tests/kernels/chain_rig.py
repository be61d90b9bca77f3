"""Chains of ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mpicomm.collectives.device_arena import ChannelMemory
from mpicomm.collectives.device_chain import ChainForm, ChainPlanner, form_of
from mpicomm.collectives.device_channels import reduction_of
from mpicomm.collectives.device_program import tag_of
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import Team
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Place
from tests.kernels.memory_rig import MemoryRig

FORMS = (form_of(None), form_of(("float32", "sum")))


def fill_slots(form: ChainForm, layout: ChannelMemory, memory: Sequence[Place]) -> None:
    """Put into the slots of all ranks what they hold at first."""
    for place in memory:
        place.bytes[layout.slots :] = 0xFF if form.sentinels else 0


class ChainRig(MemoryRig[ChainPlanner]):
    """``blocks`` is how many a kernel has for one place at most."""

    def __init__(
        self, builds: Builds, size: int, blocks: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        layouts = [ChainPlanner(Team(), blocks).layout(form) for form in FORMS]
        planner = partial(ChainPlanner, multiprocessors=blocks)
        super().__init__(builds, size, layouts, planner, changes=changes, timeout_s=timeout_s)
        for form, layout, memory in zip(FORMS, layouts, self.memories, strict=True):
            fill_slots(form, layout, memory)

    def run(
        self,
        rank: int,
        exchanges: Sequence[Exchange],
        signature: Signature,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part of a chain."""
        assert threads is None
        reduction = reduction_of(exchanges[0].dtype, signature.op) if signature.op else None
        memory = self.machine.addresses(self.memories[FORMS.index(form_of(reduction))], rank)
        launch = self.planners[rank].launch(exchanges, reduction, tag_of(signature, 0), memory)
        self.launch(rank, launch, threads=None, nap_us=nap_us)
