"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

`PacketOneShot` sends all data straight to the ranks that need it. `PacketTwoShot` sends a shard to each rank. In the
same kernel that rank reduces or takes the shard and sends the result on. `AnyLengthPackets` is for messages of any
length in existing inboxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from mpicomm.collectives.gpu.algorithms.base import Algorithm, Domain, FormLauncher
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import UNIT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    Configs,
    ProtocolLimits,
    any_length_config,
    any_length_configs,
    coding_of,
    fewest_rows,
    geometry_within,
    inboxes_of,
    large_inboxes,
    most_blocks_of,
    one_shot_limits,
    row_configs,
    sized_configs,
    two_shot_limits,
)
from mpicomm.collectives.gpu.algorithms.packets.template import PacketLauncher
from mpicomm.collectives.operations import Operation


class _Packets(Algorithm):
    """One launch of packets.cu carries the whole call. It also carries elements as codes of 8 bits."""

    fan_out: ClassVar[bool]
    """Whether ranks send on the data that they have reduced or received."""

    def _launchers(self, form: Form, domain: Domain, limits: ProtocolLimits) -> list[FormLauncher]:
        """Return the launcher for calls of a form, and one that also applies its epilogue."""
        coding, most = coding_of(form), inf if form.wire else max(limits)
        if coding is not None:
            configs = coding.configs(domain, fan_out=self.fan_out)
        else:
            configs = sized_configs(limits, domain, fan_out=self.fan_out)
        if form.epilogue is None:
            return [PacketLauncher(form, domain, configs, (1, most), two_shot=self.fan_out)]
        row_nbytes, shards = form.epilogue.row_nbytes, domain.size if self.fan_out else 1
        fewest = row_nbytes and row_nbytes * fewest_rows(row_nbytes, most_blocks_of(domain), shards)
        made: list[FormLauncher] = []
        if fewest > 1:
            made.append(PacketLauncher(form, domain, configs, (1, fewest - 1), two_shot=self.fan_out))
        if fewest < inf:
            if row_nbytes:
                configs = row_configs(row_nbytes, domain, fan_out=self.fan_out)
            bounds = max(1, fewest), most
            made.append(PacketLauncher(form, domain, configs, bounds, two_shot=self.fan_out, finishes=True))
        return made


class PacketOneShot(_Packets):
    """All data goes straight to the ranks that need it."""

    name = "one_shot"
    fan_out = False

    def serves(self, operation: Operation) -> bool:
        return True

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        if domain.size == 1:
            return "there is one rank"
        if form.is_private:
            return "only two ranks know the length of a message"
        return self._launchers(form, domain, one_shot_limits(form.operation, form.reduction, domain))


class PacketTwoShot(_Packets):
    """Each rank reduces or receives a shard, and sends it on to all ranks that need it."""

    name = "two_shot"
    fan_out = True

    def serves(self, operation: Operation) -> bool:
        return operation.two_shot is not None

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        if form.wire is not None and not form.wire[0].again:
            return "its results travel as codes"
        return [] if domain.size == 1 else self._launchers(form, domain, two_shot_limits(form.reduction, domain))


class AnyLengthPackets(Algorithm):
    """All data goes straight to the ranks that need it, in messages of any length; it needs no memory.

    The kernel is the same for short and long messages. So it can carry calls in which only the two ranks of a message
    know its length. With two kernels, ranks in one kernel would wait for ranks in the other kernel.
    """

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        return True

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        if domain.size == 1:
            return "there is one rank"
        if not form.is_private:
            return "all ranks know the lengths of all messages"
        return [PacketLauncher(form, domain, Configs(any_length_configs(domain)), (0, inf))]


def in_arena(form: Form, domain: Domain) -> FormLauncher:
    """Return a launcher for calls with lengths that all ranks know, if there is no memory but the arena.

    It uses the inboxes `Arena.sentinels`, because `Arena.any_length` changes only for calls with private lengths.
    """
    inboxes, coding = domain.arena.sentinels, coding_of(form)
    config = any_length_config(domain, inboxes) if coding is None else coding.config_within(inboxes, domain)
    return PacketLauncher(form, domain, Configs(lambda nbytes: config), (0, inf), any_length=True)


def larger_inboxes(domain: Domain, nbytes: int) -> list[Request]:
    """Return the inboxes in which messages of ``nbytes`` take fewer steps than in `Arena.any_length`, the best first.

    Fewer steps need more threads, and more threads need larger inboxes.
    """

    def steps_in(inbox_nbytes: int) -> int:
        shape = geometry_within(inbox_nbytes, most_blocks_of(domain), domain.size)
        return shape.steps(-(-nbytes // UNIT_NBYTES["sentinel"]))

    layout = domain.arena.layout
    fewest, found = steps_in(domain.arena.any_length.nbytes), []
    for inbox_nbytes in layout.large_inboxes_nbytes:
        if steps_in(inbox_nbytes) < fewest:
            fewest = steps_in(inbox_nbytes)
            found.append(large_inboxes(layout, inbox_nbytes))
    return found[::-1]


def inboxes_for(domain: Domain, request: Request) -> Inboxes:
    """Return the existing inboxes for a request of `larger_inboxes`."""
    return inboxes_of(domain.arena.layout, domain.arena.region(request))
