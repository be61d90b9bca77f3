"""The kernels of device_functions.cu: their messages, and the words that ranks must see.

`Rig` runs them on the ranks of a machine, on CPU threads; tests/gpu/device_functions.py runs them on GPUs.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.helpers.references.reductions import dtype_named, reduced, require_same, samples
from tests.kernels.build import Builds
from tests.kernels.machine import Machine
from tests.kernels.mistakes import Changes

SOURCE = Path(__file__).parent / "device_functions.cu"
GROUPS = {"Thread": (7, 7), "Warp": (70, 3), "Block": (70, 1)}
"""The groups; the numbers of threads and of groups of a block. The last of three warps is only a part of a warp."""
FUNCTIONS = ("put_around", "get_around", "packets_to_all", "meet")
"""The kernels in which ranks exchange bytes."""
IN_TIME = "hang: not over in time"
TIMEOUT_S = 20.0

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
        """Return the words that a rank writes into one message."""
        i = np.arange(self.nbytes)
        return (rank * 37 + message * 11 + i * 7 + (i >> 5)).astype(np.uint8)


class AnyRig(ABC):
    """Ranks with groups of threads that exchange messages; this process sees the memory of ``ranks``."""

    def __init__(self, group: str, size: int, ranks: Sequence[int], messages: Messages) -> None:
        self.size = size
        self.ranks = ranks
        self.messages = messages
        self.group = group
        self.threads, self.groups = GROUPS[group]

    @abstractmethod
    def everywhere(self, nbytes: int) -> Any:
        """Allocate on each rank, zeroed."""

    @abstractmethod
    def read(self, memory: Any, rank: int) -> Bytes:
        """Return the content of a rank's memory."""

    @abstractmethod
    def write(self, memory: Any, rank: int, content: Bytes) -> None:
        """Fill the memory of a rank."""

    @abstractmethod
    def run(
        self,
        entry: str,
        symmetric: Sequence[Any],
        private: Sequence[Any],
        *,
        options: Sequence[str] = (),
        blocks: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> list[npt.NDArray[np.uint32]]:
        """Run a kernel on all ranks; return for each of ``ranks`` the threads that failed."""

    def arguments(self, rank: int, failed: int, timeout_s: float) -> Run:
        """Return the first argument of a kernel."""
        x, messages = Run(rank=rank, size=self.size, rounds=self.messages.rounds, groups=self.groups), self.messages
        x.timeout_ns, x.failed = int(timeout_s * 1e9), failed
        x.nbytes, x.stride = messages.nbytes, messages.stride
        x.offset, x.end_offset = messages.offset, messages.end_offset
        return x

    def message_memory(self, *, peers: int = 1) -> Any:
        """Allocate memory for the messages of all rounds."""
        return self.everywhere(self.messages.rounds * self.groups * peers * self.messages.stride)

    def flags(self, words: int = 1) -> Any:
        """Allocate flags, ``words`` for each group."""
        return self.everywhere(self.groups * words * 8)

    def require_messages(self, seen: Bytes, senders: Sequence[int | None]) -> None:
        """Assert that a rank saw the messages of ``senders``, one in each round and group; None sends none."""
        messages, parts = self.messages, len(senders)
        expected = np.zeros((messages.rounds * self.groups, parts, messages.stride), np.uint8)
        for message in range(messages.rounds * self.groups):
            for part, sender in enumerate(senders):
                if sender is not None:
                    expected[message, part, : messages.nbytes] = messages.content(sender, message)
        require_same(seen, expected.ravel())


class Rig(AnyRig):
    """The ranks of a machine, on CPU threads; the rank ``absent`` does not begin."""

    def __init__(
        self,
        builds: Builds,
        group: str,
        messages: Messages,
        *,
        size: int = 3,
        changes: Changes = (),
        absent: int | None = None,
    ) -> None:
        super().__init__(group, size, range(size), messages)
        self.machine = Machine(builds, size)
        self._changes = changes
        self._absent = absent
        self._failed = [self.machine.allocate(rank, self.threads * 4) for rank in range(size)]

    def everywhere(self, nbytes: int) -> Any:
        return [self.machine.allocate(rank, nbytes) for rank in self.ranks]

    def read(self, memory: Any, rank: int) -> Bytes:
        content: Bytes = memory[rank].bytes
        return content

    def write(self, memory: Any, rank: int, content: Bytes) -> None:
        memory[rank].bytes[:] = content

    def run(
        self,
        entry: str,
        symmetric: Sequence[Any],
        private: Sequence[Any],
        *,
        options: Sequence[str] = (),
        blocks: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> list[npt.NDArray[np.uint32]]:
        kernel = self.machine.builds.kernel(SOURCE, entry, (f"-DGROUP={self.group}", *options), changes=self._changes)
        rng = np.random.default_rng(self.size)
        for rank in self.ranks:
            if rank == self._absent:
                continue
            tables = [np.array(self.machine.addresses(places, rank), np.uint64) for places in symmetric]
            addresses = [self.machine.place(rank, table).address for table in tables]
            addresses += [places[rank].address for places in private]
            x = self.arguments(rank, self._failed[rank].address, timeout_s)
            parameters: list[Any] = [x, *map(ctypes.c_uint64, addresses)]
            nap_us = int(rng.choice((0, 300)))
            self.machine.launch(rank, kernel, parameters, blocks=blocks, threads=self.threads, nap_us=nap_us)
        self.machine.run(seed=self.size, jitter_us=200, limit_s=30)
        return [place.view(np.uint32) for place in self._failed]


def exchange(rig: AnyRig, function: str, *, timeout_s: float = TIMEOUT_S) -> list[npt.NDArray[np.uint32]]:
    """Run one of `FUNCTIONS`; if no thread fails, compare the words that ranks saw. Return the threads that failed."""
    size, memory = rig.size, rig.message_memory
    if function in ("put_around", "get_around"):
        seen = memory()
        failed = rig.run(function, (memory(), rig.flags()), (memory(), seen), timeout_s=timeout_s)
        senders: list[list[int | None]] = [[(rank - 1) % size] for rank in range(size)]
    elif function == "packets_to_all":
        seen = memory(peers=size)
        slots = rig.everywhere(2 * size * rig.groups * -(-rig.messages.nbytes // 8) * 16)
        failed = rig.run(function, (slots,), (memory(), memory(peers=size), seen), timeout_s=timeout_s)
        senders = [[None if peer == rank else peer for peer in range(size)] for rank in range(size)]
    else:
        seen = memory(peers=size)
        boards = rig.everywhere(rig.groups * rig.messages.stride)
        failed = rig.run(function, (boards, rig.flags(size)), (seen,), timeout_s=timeout_s)
        senders = [list(range(size)) for rank in range(size)]
    if not any(each.any() for each in failed):
        for rank in rig.ranks:
            rig.require_messages(rig.read(seen, rank), senders[rank])
    return failed


def hand_over(rig: AnyRig, *, timeout_s: float = TIMEOUT_S) -> list[npt.NDArray[np.uint32]]:
    """Let one block of each rank hand messages to another, and compare. Return the threads that failed."""
    seen = rig.message_memory()
    private = (rig.message_memory(), rig.flags(), seen)
    failed = rig.run("between_blocks", (), private, blocks=2, timeout_s=timeout_s)
    if not any(each.any() for each in failed):
        for rank in rig.ranks:
            rig.require_messages(rig.read(seen, rank), [rank])
    return failed


def reduce_all(rig: AnyRig, dtype_name: str, op: str, *, timeout_s: float = TIMEOUT_S) -> list[npt.NDArray[np.uint32]]:
    """Let every rank reduce the values of all ranks, and compare with NumPy. Return the threads that failed."""
    dtype, stride, nbytes = dtype_named(dtype_name), rig.messages.stride, rig.messages.nbytes
    boards, values, result, seen = (rig.message_memory() for _ in range(4))
    total = rig.messages.rounds * rig.groups * stride
    rng = np.random.default_rng(rig.size)
    parts = [samples(dtype, total // dtype.itemsize, rng) for _ in range(rig.size)]
    for rank in rig.ranks:
        rig.write(values, rank, parts[rank].view(np.uint8))
    options = (f"-DDTYPE={dtype_name}", f"-DOPERATION={op}")
    symmetric, private = (boards, rig.flags(rig.size)), (values, result, seen)
    failed = rig.run("reduce_all", symmetric, private, options=options, timeout_s=timeout_s)
    if any(each.any() for each in failed):
        return failed
    expected = reduced(op, parts)
    for rank in rig.ranks:
        got = rig.read(seen, rank)
        for begin in range(0, total, stride):
            elements = slice(begin // dtype.itemsize, (begin + nbytes) // dtype.itemsize)
            require_same(got[begin : begin + nbytes].view(dtype), expected[elements])
            assert not got[begin + nbytes : begin + stride].any()
    return failed
