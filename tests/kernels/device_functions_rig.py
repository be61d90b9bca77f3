"""The kernels of device_functions.cu on the ranks of a machine, and what they have to give."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine, Place

SOURCE = Path(__file__).parent / "device_functions.cu"
GROUPS = {"Thread": (7, 7), "Warp": (70, 3), "Block": (70, 1)}
"""The groups; how many threads a block has, and how many groups these are. The last of three warps is a part of one."""
FUNCTIONS = ("put_around", "get_around", "packets_to_all", "meet")
"""The kernels in which ranks exchange bytes."""

IN_TIME = "hang: not over in time"

Bytes = npt.NDArray[np.uint8]


class Run(ctypes.Structure):
    """The host's copy of ``Run`` in device_functions.cu."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("rank", "size", "rounds", "groups")),
        *((name, ctypes.c_uint64) for name in ("timeout_ns", "failed", "nbytes", "stride")),
        *((name, ctypes.c_uint32) for name in ("offset", "end_offset")),
    ]


@dataclass(frozen=True)
class Messages:
    """The messages of a run: see ``Run`` in device_functions.cu."""

    nbytes: int
    offset: int = 0
    end_offset: int = 0
    rounds: int = 8

    @property
    def stride(self) -> int:
        return -(-(self.nbytes + 16) // 16) * 16

    def content(self, rank: int, message: int) -> Bytes:
        """Return what a rank writes into one message."""
        i = np.arange(self.nbytes)
        return (rank * 37 + message * 11 + i * 7 + (i >> 5)).astype(np.uint8)


class Rig:
    """Ranks with groups of threads that exchange messages; those in ``absent`` do not begin."""

    def __init__(
        self,
        builds: Builds,
        group: str,
        size: int,
        messages: Messages,
        *,
        options: Sequence[str] = (),
        changes: Sequence[Change] = (),
        absent: int | None = None,
    ) -> None:
        self.machine = Machine(builds, size)
        self.size = size
        self.messages = messages
        self.threads, self.groups = GROUPS[group]
        self._options = (f"-DGROUP={group}", *options)
        self._changes = changes
        self._absent = absent
        self._failed = [self.machine.allocate(rank, self.threads * 4) for rank in range(size)]

    def everywhere(self, nbytes: int) -> list[Place]:
        """Allocate on each rank."""
        return [self.machine.allocate(rank, nbytes) for rank in range(self.size)]

    def message_memory(self, *, peers: int = 1) -> list[Place]:
        """Allocate memory for the messages of all rounds."""
        return self.everywhere(self.messages.rounds * self.groups * peers * self.messages.stride)

    def flags(self, words: int = 1) -> list[Place]:
        """Allocate flags, ``words`` for each group."""
        return self.everywhere(self.groups * words * 8)

    def run(
        self,
        entry: str,
        symmetric: Sequence[list[Place]],
        private: Sequence[list[Place]],
        *,
        blocks: int = 1,
        timeout_s: float,
    ) -> list[Bytes]:
        """Run a kernel on all ranks; return for each which of its threads failed."""
        kernel = self.machine.builds.kernel(SOURCE, entry, self._options, changes=self._changes)
        rng = np.random.default_rng(self.size)
        for rank in range(self.size):
            if rank == self._absent:
                continue
            x, messages = Run(rank=rank, size=self.size, rounds=self.messages.rounds, groups=self.groups), self.messages
            x.timeout_ns, x.failed = int(timeout_s * 1e9), self._failed[rank].address
            x.nbytes, x.stride = messages.nbytes, messages.stride
            x.offset, x.end_offset = messages.offset, messages.end_offset
            tables = [np.array(self.machine.addresses(places, rank), np.uint64) for places in symmetric]
            addresses = [self.machine.place(rank, table).address for table in tables]
            addresses += [places[rank].address for places in private]
            parameters: list[Any] = [x, *map(ctypes.c_uint64, addresses)]
            nap_us = int(rng.choice((0, 300)))
            self.machine.launch(rank, kernel, parameters, blocks=blocks, threads=self.threads, nap_us=nap_us)
        self.machine.run(seed=self.size, jitter_us=200, limit_s=30)
        return [place.view(np.uint32) for place in self._failed]

    def require_messages(self, seen: Place, senders: Sequence[int | None]) -> None:
        """Assert that what a rank saw are the messages of ``senders``, one in each round and group; None sends none."""
        messages, parts = self.messages, len(senders)
        expected = np.zeros((messages.rounds * self.groups, parts, messages.stride), np.uint8)
        for message in range(messages.rounds * self.groups):
            for part, sender in enumerate(senders):
                if sender is not None:
                    expected[message, part, : messages.nbytes] = messages.content(sender, message)
        require_same(seen.bytes, expected.ravel())


def exchange(
    builds: Builds,
    function: str,
    group: str,
    messages: Messages,
    *,
    size: int = 3,
    changes: Sequence[Change] = (),
    absent: int | None = None,
    timeout_s: float = 20,
) -> list[Bytes]:
    """Run one of `FUNCTIONS`; if all ranks come compare what they saw. Return which threads failed."""
    rig = Rig(builds, group, size, messages, changes=changes, absent=absent)
    memory, flags = rig.message_memory, rig.flags()
    if function in ("put_around", "get_around"):
        seen = memory()
        failed = rig.run(function, (memory(), flags), (memory(), seen), timeout_s=timeout_s)
        senders: list[list[int | None]] = [[(rank - 1) % size] for rank in range(size)]
    elif function == "packets_to_all":
        seen = memory(peers=size)
        slots = rig.everywhere(2 * size * rig.groups * -(-messages.nbytes // 8) * 16)
        failed = rig.run(function, (slots,), (memory(), memory(peers=size), seen), timeout_s=timeout_s)
        senders = [[None if peer == rank else peer for peer in range(size)] for rank in range(size)]
    else:
        seen = memory(peers=size)
        boards = rig.everywhere(rig.groups * messages.stride)
        failed = rig.run(function, (boards, rig.flags(size)), (seen,), timeout_s=timeout_s)
        senders = [list(range(size)) for rank in range(size)]
    if absent is None:
        assert not any(each.any() for each in failed), IN_TIME
        for place, each in zip(seen, senders, strict=True):
            rig.require_messages(place, each)
    return failed


def hand_over(builds: Builds, group: str, *, changes: Sequence[Change] = (), timeout_s: float = 20) -> None:
    """Let one block of a rank hand messages to another, and compare."""
    rig = Rig(builds, group, 1, Messages(200), changes=changes)
    seen = rig.message_memory()
    failed = rig.run("between_blocks", (), (rig.message_memory(), rig.flags(), seen), blocks=2, timeout_s=timeout_s)
    assert not failed[0].any(), IN_TIME
    rig.require_messages(seen[0], [0])


def reduce_all(
    builds: Builds,
    group: str,
    reduction: tuple[str, str],
    messages: Messages,
    *,
    size: int = 3,
    changes: Sequence[Change] = (),
    timeout_s: float = 20,
) -> None:
    """Let every rank reduce what all ranks publish, and compare with NumPy."""
    dtype_name, op = reduction
    dtype = dtype_named(dtype_name)
    rig = Rig(builds, group, size, messages, options=(f"-DDTYPE={dtype_name}", f"-DOPERATION={op}"), changes=changes)
    boards, values, result, seen = (rig.message_memory() for _ in range(4))
    stride, nbytes = messages.stride, messages.nbytes
    rng = np.random.default_rng(size)
    parts = [samples(dtype, seen[0].bytes.size // dtype.itemsize, rng) for _ in range(size)]
    for place, part in zip(values, parts, strict=True):
        place.bytes[:] = part.view(np.uint8)
    failed = rig.run("reduce_all", (boards, rig.flags(size)), (values, result, seen), timeout_s=timeout_s)
    assert not any(each.any() for each in failed), IN_TIME
    expected = reduced(op, parts)
    for place in seen:
        for begin in range(0, place.bytes.size, stride):
            elements = slice(begin // dtype.itemsize, (begin + nbytes) // dtype.itemsize)
            require_same(place.bytes[begin : begin + nbytes].view(dtype), expected[elements])
            assert not place.bytes[begin + nbytes : begin + stride].any()
