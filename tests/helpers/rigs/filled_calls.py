"""An arena that is only addresses, and the launch of an exchange of packets."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.configs import PacketConfig
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.kernels.variant import Launch


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


def packet_launch(template: PacketTemplate, tag: int, way: PacketConfig, nbytes: int, itemsize: int) -> Launch:
    """Return the launch of the exchange itself of which a template was made, whose elements have ``itemsize`` bytes."""
    lengths = [0 if span is None else span.count * itemsize for span in template.places]
    addresses = [span.pointer if span is not None and span.count else 0 for span in template.places]
    number = len(lengths)
    template.bind(range(number), range(number, 2 * number), 2 * number)
    return template.launch_of(template.write([*addresses, *lengths], max(lengths), nbytes, tag, way))
