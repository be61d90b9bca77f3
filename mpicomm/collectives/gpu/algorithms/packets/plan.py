"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

One launch of packets.cu carries the whole call. It also carries elements as codes of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from mpicomm.collectives.gpu.algorithms.base import Domain, Filled, Form, FormLauncher, Numbers
from mpicomm.collectives.gpu.algorithms.memory import Request
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    ANY_NBYTES,
    Configs,
    ProtocolLimits,
    any_length_config,
    coding_of,
    fewest_rows,
    limits_of,
    row_configs,
    sized_configs,
)
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.patterns import shard_count
from mpicomm.collectives.wire import BLOCK


class PacketLauncher(PacketTemplate, FormLauncher):
    """Carries out the calls of a ``form`` in one exchange, or with ``two_shot`` in two exchanges."""

    def __init__(
        self,
        form: Form,
        domain: Domain,
        configs: Configs,
        bounds: tuple[float, float],
        *,
        two_shot: bool = False,
        finishes: bool = False,
    ) -> None:
        self.fewest, self.most = bounds
        self.finishes = finishes
        self.moves_gaps = not two_shot
        row_nbytes = form.epilogue.row_nbytes if finishes and form.epilogue else 0
        self._whole = BLOCK if form.wire else row_nbytes // form.itemsize
        self._itemsize, self._shards = form.itemsize, form.shards if two_shot else 0
        self._config_of, self._memory_for = configs
        self._is_private = form.is_private
        self._unmade: Callable[[], None] | None = partial(self._make, form, domain)
        """Makes the template, before the first call: most forms use one or two of their launchers."""

    def _make(self, form: Form, domain: Domain) -> None:
        shards = self._shards
        first, second = (form.two_shot.first, form.two_shot.second) if shards else (form.one_shot, None)
        finish = form.epilogue.fused(0) if self.finishes and form.epilogue else None
        gaps = None
        if any(form.gaps):
            gaps = [*map(form.gaps_of, first.sends)], [*map(form.gaps_of, first.receives)]
        super().__init__(
            domain,
            first,
            form.reduction,
            fan_out=second,
            finish=finish,
            even=form.operation.is_even,
            coding=coding_of(form),
            gaps=gaps,
        )
        pieces = [form.piece(span, first.reduction.own if first.reduction else None) for span in self.places]
        # The values of a call: 0; the lengths of all blocks, or of the shards; the addresses of all blocks, or of the
        # shards of each block.
        blocks = form.sends + form.receives
        if shards:
            addresses = [1 + (1 + block) * shards + shard if block >= 0 else 0 for block, shard in pieces]
            self.bind(addresses, [1 + shard for _, shard in pieces], 1 + (1 + blocks) * shards)
        else:
            addresses = [1 + blocks + block if block >= 0 else 0 for block, _ in pieces]
            self.bind(addresses, [1 + block for block, _ in pieces], 1 + 2 * blocks)
        self._unmade = None

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        return self._memory_for(self._longest_shard(longest) if self._shards else longest)

    def fill(self, numbers: Numbers) -> Filled | None:
        lengths, begins, longest, hash32, _, finish = numbers
        if self._unmade is not None:
            self._unmade()
        if self.finishes and finish is not None:
            self.apply(finish.fused(begins[-1], self._shards or 1))
        if self._shards:
            return self._fill_shards(lengths[0], begins, hash32)
        config = self._config_of(longest)
        if config is None:
            return None
        nbytes = config.row_nbytes or longest
        if self._is_private and longest > config.step_nbytes:
            nbytes = ANY_NBYTES  # short messages have the launch of the config, whatever other ranks send
        return self.write([0, *lengths, *begins], longest, nbytes, hash32, config)

    def _fill_shards(self, nbytes: int, begins: list[int], hash32: int) -> Filled | None:
        longest, shards = self._longest_shard(nbytes), self._shards
        config = self._config_of(longest)
        if config is None:
            return None
        number = -(-nbytes // longest)
        empty = [0] * (shards - number)  # shards after the last element
        values = [0, *[longest] * number, *empty]
        values[number] = nbytes - (number - 1) * longest
        for begin in begins:
            values += range(begin, begin + nbytes, longest)
            values += empty
        return self.write(values, longest, config.row_nbytes or longest, hash32, config)

    def _longest_shard(self, nbytes: int) -> int:
        count = shard_count(nbytes // self._itemsize, self._shards, self._itemsize, self._whole)
        return min(nbytes, count * self._itemsize)


def serve_one_shot(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """All data goes straight to the ranks that need it."""
    if domain.size == 1:
        return "there is one rank"
    if form.is_private:
        return "only two ranks know the length of a message"
    limits = limits_of(form.reduction, domain, to_all=form.operation.traffic != "one-way")
    return _launchers(form, domain, limits, two_shot=False)


def serve_two_shot(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """Each rank reduces or receives a shard. In the same kernel it sends the shard on to all ranks that need it."""
    if form.wire is not None and not form.wire[0].again:
        return "its results travel as codes"
    if domain.size == 1:
        return []
    return _launchers(form, domain, limits_of(form.reduction, domain, to_all=True), two_shot=True)


def serve_any_length(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """All data goes straight to the ranks that need it, in messages of any length in the inboxes of the arena.

    The kernel is the same for short and long messages. So it can carry calls in which only the two ranks of a message
    know its length. With two kernels, ranks in one kernel would wait for ranks in the other kernel.
    """
    if domain.size == 1:
        return "there is one rank"
    if not form.is_private:
        return "all ranks know the lengths of all messages"
    return [in_arena(form, domain)]


def _launchers(form: Form, domain: Domain, limits: ProtocolLimits, *, two_shot: bool) -> list[FormLauncher]:
    """Return the launcher for calls of a form, and one that also applies its epilogue."""
    most = inf if form.wire else max(limits)
    configs = sized_configs(limits, domain, fan_out=two_shot, coding=coding_of(form))
    if form.epilogue is None:
        return [PacketLauncher(form, domain, configs, (1, most), two_shot=two_shot)]
    row_nbytes, shards = form.epilogue.row_nbytes, domain.size if two_shot else 1
    fewest = row_nbytes and row_nbytes * fewest_rows(row_nbytes, domain.most_blocks, shards)
    made: list[FormLauncher] = []
    if fewest > 1:
        made.append(PacketLauncher(form, domain, configs, (1, fewest - 1), two_shot=two_shot))
    if fewest < inf:
        if row_nbytes:
            configs = row_configs(row_nbytes, domain, fan_out=two_shot)
        made.append(PacketLauncher(form, domain, configs, (max(1, fewest), most), two_shot=two_shot, finishes=True))
    return made


def in_arena(form: Form, domain: Domain) -> FormLauncher:
    """Return a launcher for messages of any length that needs no memory but the arena."""
    config = any_length_config(domain, coding_of(form))
    return PacketLauncher(form, domain, Configs(lambda nbytes: config), (0, inf))
