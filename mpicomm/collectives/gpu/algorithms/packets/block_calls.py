"""PacketBlocks: the calls of a form whose blocks have any lengths and places, as launches of packets.cu."""

from __future__ import annotations

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.packets.arguments import OVERSEERS, PacketArguments
from mpicomm.collectives.gpu.algorithms.packets.launches import PacketPlanner
from mpicomm.collectives.gpu.algorithms.packets.template import Kernel
from mpicomm.collectives.gpu.algorithms.packets.ways import WayOf
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.kernels.variant import Variant


class PacketBlocks:
    """Calls of ``form`` in one exchange."""

    def __init__(self, form: Form, node: Node, way_of: WayOf) -> None:
        planner = PacketPlanner.of(node)
        self._template = planner.template(form.one_shot, form.reduction)
        parts = form.parts
        pieces = [form.piece(span) for span in self._template.places]
        # The values of a call: 0, the lengths of all blocks, and their addresses.
        lengths = [1 + (buffer == 2) * parts[0] + part if part >= 0 else 0 for buffer, part in pieces]
        self._template.bind([index and sum(parts) + index for index in lengths], lengths, 1 + 2 * sum(parts))
        self._way_of = way_of
        self._is_private = form.operation.counts == "private"
        self.arguments: PacketArguments = self._template.arguments
        self.early = planner.early
        self.private_nbytes: int | None = None
        """See `BlocksTemplate`."""

    def fill_blocks(self, lengths: list[int], begins: list[int], hash32: int) -> Filled | None:
        """See `BlocksTemplate`."""
        longest = max(lengths)
        way = self._way_of(longest)
        if way is None:
            return None
        values = [0, *lengths, *begins]
        kernel = self._template.fill(values, longest, hash32, *way)
        if self._is_private:
            self.private_nbytes = self._template.longest_with_peers(values)
        _, _, (blocks, workers), _ = way
        return kernel, blocks, workers + OVERSEERS

    def variant(self, kernel: Kernel) -> Variant:
        """See `Template`."""
        return self._template.variant(kernel)
