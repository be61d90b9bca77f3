"""Ranks with memory that all have mapped, and streams of kernels, as a node with GPUs has them."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.devices.cuda.faults import FaultRecord
from mpicomm.kernels.team import Faults, Team
from mpicomm.kernels.variant import Launch, Variant
from tests.kernels.build import Builds, Kernel, one_build_of_many
from tests.kernels.launchers import MOST_CPU_S, file_of
from tests.kernels.mistakes import Change, Changes, Mistake

Array = npt.NDArray[Any]

# Ranks map the memory here. The place is free in a process under Linux on x86-64 that does not randomize addresses.
# ThreadSanitizer, which finds a race by its address, takes the place for memory, too. Each process has other addresses,
# so that an address of one rank is no use to another.
_FIRST_ADDRESS = 0x7EA0_0000_0000
_ADDRESSES = 0x1_0000_0000
_RANK_NBYTES = 1 << 27
_GAP = 64  # around each allocation, to see whether a kernel writes beside it
_GAP_BYTE = 0xA5
_HEADER_LINES = 4  # of a job of one rank, before its own
_TICK_NS = 200_000  # of the time of kernels: see Clock in launch.hpp
_AWAY = 2**64 - 1  # kAway


CAUGHT = "|".join(
    (
        "ThreadSanitizer: (data race|SEGV)",
        *("hang: not over", "threads wait at barriers", "fault on rank", " differ, first at "),
        r"exit codes \[.*-11",  # a kernel that took an old packet for an address stored outside of all memory
    )
)
"""Matches the AssertionError of a run that sees a mistake in a kernel's protocol."""

SEEDS = range(20)
"""The seeds of a control, which runs a kernel with a mistake until a run sees it.

A single run may pass, because a mistake in an order shows only where threads happen to meet in a bad order.
"""


def require_seen(run: Callable[[int], object], match: str = CAUGHT) -> None:
    """Require that a run with one of the seeds sees a mistake."""
    with pytest.raises(AssertionError, match=match):
        for seed in SEEDS:
            run(seed)


def controls(
    run: Callable[..., object], mistakes: Mapping[str, Any], *, watched: bool = False, match: str = CAUGHT
) -> Callable[..., None]:
    """Return a test that a run of kernels with each mistake is seen, under ThreadSanitizer if ``watched``.

    A mistake is a change of the sources, or a list of them, or a tuple that ends with one of these, after further
    arguments of ``run``. It takes ``seed`` and ``changes`` by name. Mistakes share builds where `one_build_of_many` can
    put them together.
    """

    given = {name: mistake[:-1] if isinstance(mistake, tuple) else () for name, mistake in mistakes.items()}
    made = _in_builds(mistakes)

    @pytest.mark.parametrize("name", mistakes)
    def test(request: pytest.FixtureRequest, name: str) -> None:
        builds = request.getfixturevalue("watched_builds" if watched else "builds")
        require_seen(lambda seed: run(builds, *given[name], seed=seed, changes=made[name]), match)

    return test


def _in_builds(mistakes: Mapping[str, Any]) -> dict[str, Changes]:
    last = {name: mistake[-1] if isinstance(mistake, tuple) else mistake for name, mistake in mistakes.items()}
    all_changes = {name: [each] if isinstance(each, Change) else [*each] for name, each in last.items()}
    # Runs of the same kernels, but for the last change of each, can share their builds.
    alike: dict[tuple[Change, ...], list[str]] = {}
    for name, changes in all_changes.items():
        alike.setdefault(tuple(changes[:-1]), []).append(name)
    made: dict[str, Changes] = {}
    for others, names in alike.items():
        for name, mistake in zip(names, one_build_of_many(all_changes[name][-1] for name in names), strict=True):
            made[name] = [*others, mistake]
    return made


def without_mistake(mistakes: Mapping[str, Any], name: str = "") -> Changes:
    """Return the changes of the build that `controls` has for a mistake, or for the first one, with none switched on.

    It saves a run without a mistake a build of its own.
    """
    *others, mistake = _in_builds(mistakes)[name or next(iter(mistakes))]
    assert isinstance(mistake, Mistake), "the mistake needs its own build"
    return [*others, replace(mistake, number=0)]


class RunFailedError(AssertionError):
    """A run that failed before its results are compared."""


@dataclass(frozen=True)
class Place:
    """Memory of a rank: ``address`` for the kernels of that rank, ``bytes`` for the test."""

    address: int
    bytes: npt.NDArray[np.uint8]

    def view(self, dtype: npt.DTypeLike) -> Array:
        """Return the content."""
        return self.bytes.view(dtype)


def kernel_of(builds: Builds, variant: Variant, changes: Changes = ()) -> Kernel:
    """Return a kernel of the package for the processor."""
    options = [option for option in variant.options if option.startswith("-D")]
    return builds.kernel(variant.source, variant.entry, options, changes=changes)


@dataclass(frozen=True)
class _Launch:
    kernel: Kernel
    parameters: tuple[int, ...]
    blocks: int
    threads: int
    nap_us: int


class Machine:
    """``size`` ranks, all on this machine. The first allocations stay, up to `keep`; `clear` gives back the rest.

    With builds for ThreadSanitizer the ranks are threads of one process, otherwise each is a process.
    """

    def __init__(self, builds: Builds, size: int) -> None:
        self.builds = builds
        self.size = size
        self._fd = os.memfd_create("mpicomm-test-kernels")
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, size * _RANK_NBYTES)
        self._memory = mmap.mmap(self._fd, size * _RANK_NBYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._ends = [_GAP] * size
        self._gaps: list[npt.NDArray[np.uint8]] = []
        self._launches: list[list[_Launch]] = [[] for _ in range(size)]
        self._records = [self.allocate(rank, ctypes.sizeof(FaultRecord)) for rank in range(size)]
        self.failed = [self.allocate(rank, ctypes.sizeof(ctypes.c_uint32)) for rank in range(size)]
        self.faults = [self._faults_of(rank) for rank in range(size)]
        self._kept = list(self._ends)

    def keep(self) -> None:
        """Let the present allocations survive `clear`."""
        self._kept = list(self._ends)
        self._gaps.clear()

    def clear(self) -> None:
        """Forget the allocations since `keep`."""
        self._ends = list(self._kept)
        self._gaps.clear()

    def address(self, owner: int, place: Place, viewer: int) -> int:
        """Return the address of a rank's memory for the kernels of another."""
        return place.address - self._base(owner) + self._base(viewer)

    def addresses(self, places: Sequence[Place], viewer: int) -> list[int]:
        """Return the addresses of the ranks' memory, one place of each rank, for the rank ``viewer``."""
        return [self.address(owner, place, viewer) for owner, place in enumerate(places)]

    def table(self, places: Sequence[Place], viewer: int) -> int:
        """Return the address of a table with the ranks' `addresses`."""
        return self.place(viewer, np.array(self.addresses(places, viewer), np.uint64)).address

    def team(self, arenas: Sequence[Place], rank: int, timeout_s: float) -> Team:
        """Return the team for a rank's kernels, as if these ranks were part of a larger communicator."""
        team = Team(faults=self.faults[rank], timeout_ns=int(timeout_s * 1e9), size=self.size, rank=rank)
        for owner, address in enumerate(self.addresses(arenas, rank)):
            team.arenas[owner], team.user_ranks[owner] = address, 10 + owner
        return team

    def allocate(self, rank: int, nbytes: int, *, offset: int = 0) -> Place:
        """Return memory of ``rank``, zeroed, ``offset`` bytes after a multiple of 64."""
        start = -(-self._ends[rank] // 64) * 64 + offset
        end = start + nbytes + _GAP
        assert end <= _RANK_NBYTES, "a rank of the machine has no such amount of memory"
        at = rank * _RANK_NBYTES
        self._bytes[at + self._ends[rank] : at + end] = _GAP_BYTE
        self._gaps.append(self._bytes[at + start - min(offset, 16) : at + start])
        self._gaps.append(self._bytes[at + end - _GAP : at + end])
        self._ends[rank] = end
        place = Place(self._base(rank) + at + start, self._bytes[at + start : at + start + nbytes])
        place.bytes[:] = 0
        return place

    def place(self, rank: int, content: Array, *, offset: int = 0) -> Place:
        """Return memory of ``rank`` with a copy of ``content``."""
        place = self.allocate(rank, content.nbytes, offset=offset)
        place.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)
        return place

    def launch(
        self, rank: int, kernel: Kernel, parameters: Sequence[Any], *, blocks: int, threads: int, nap_us: int = 0
    ) -> None:
        """Enqueue a kernel on the stream of ``rank``; ``parameters`` are ctypes. The rank may nap before it."""
        places = []
        for parameter in parameters:
            place = self.allocate(rank, ctypes.sizeof(parameter))
            place.bytes[:] = np.frombuffer(bytes(parameter), np.uint8)
            places.append(place.address)
        self._launches[rank].append(_Launch(kernel, tuple(places), blocks, threads, nap_us))

    def enqueue(
        self,
        rank: int,
        launch: Launch,
        *,
        changes: Changes = (),
        blocks: int | None = None,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a launch of the package; other blocks than the package wants if they are given."""
        kernel, size = (
            kernel_of(self.builds, launch.variant, changes),
            (blocks or launch.blocks, threads or launch.threads),
        )
        self.launch(rank, kernel, [launch.arguments], blocks=size[0], threads=size[1], nap_us=nap_us)

    def run(
        self, checks: Iterable[Callable[[], None]] = (), *, seed: int = 0, jitter_us: int = 0, limit_s: float = 60
    ) -> None:
        """Run all that was enqueued, and then the ``checks`` of its results.

        Raises `RunFailedError` for a crash, a hang, a race, a fault record and stray writes. ``limit_s`` and all
        timeouts of kernels are in the time of kernels, which waits for ranks without a processor.
        """
        clock = self._new_clock(limit_s)
        jobs = [self._job(rank, clock, seed, jitter_us) for rank in range(self.size) if self._launches[rank]]
        if self.builds.sanitize:
            header = jobs[0].splitlines()[:_HEADER_LINES] if jobs else []
            job = "\n".join([*header, *(line for job in jobs for line in job.splitlines()[_HEADER_LINES:])])
            fibers = sum(max(x.blocks for x in each) * max(x.threads for x in each) for each in self._launches if each)
            results = self.builds.server(fibers).run([job], fibers)
        else:
            results = self.builds.server(0).run(jobs)
        self._launches = [[] for _ in range(self.size)]
        codes = [code for code, _ in results]
        if any(codes):
            ends = [said[-6000:] for _, said in results if said]
            if -signal.SIGXCPU in codes:
                ends.append(f"hang: not over after {MOST_CPU_S} s of a processor")
            raise RunFailedError(f"exit codes {codes}:\n" + "\n".join(ends))
        # The records of all ranks: a rank may have learned that another one gives up, before it found the cause itself.
        faults = []
        for rank, place in enumerate(self._records):
            record = FaultRecord.from_buffer_copy(place.bytes.tobytes())
            if record.state:
                said = ", ".join(f"{name}={getattr(record, name)}" for name, *_ in FaultRecord._fields_)
                faults.append(f"fault on rank {rank}: {said}")
        if faults:
            raise RunFailedError("\n".join(faults))
        if self.wrote_beside():
            raise RunFailedError("a kernel wrote beside what it was to write")
        for check in checks:
            check()

    def wrote_beside(self) -> bool:
        """Return whether a kernel wrote beside what it was to write."""
        return any((gap != _GAP_BYTE).any() for gap in self._gaps)

    def _faults_of(self, rank: int) -> Faults:
        failed = self.failed[rank]
        self._records[rank].bytes[:] = np.frombuffer(bytes(FaultRecord(failed=failed.address)), np.uint8)
        return Faults(self._records[rank].address, failed.address)

    def _base(self, viewer: int) -> int:
        return _FIRST_ADDRESS + (0 if self.builds.sanitize else viewer * _ADDRESSES)

    def _new_clock(self, limit_s: float) -> Place:
        """Return a Clock of launch.hpp that waits for the first block of each rank that runs."""
        blocks = max((each.blocks for launches in self._launches for each in launches), default=1)
        first = [0 if launches else _AWAY for launches in self._launches]
        words = [1, int(limit_s * 1e9) // _TICK_NS, self.size, blocks, *first, *[_AWAY] * (self.size * (blocks - 1))]
        return self.place(0, np.array(words, np.uint64))

    def _job(self, rank: int, clock: Place, seed: int, jitter_us: int) -> str:
        lines = [
            f"memory {file_of(self._fd)} {self.size * _RANK_NBYTES} {self._base(rank)}",
            f"clock {self.address(0, clock, rank)}",
            f"jitter {seed} {jitter_us}",
            f"mistake {max(each.kernel.mistake for launches in self._launches for each in launches)}",
            f"rank {rank}",
        ]
        for each in self._launches[rank]:
            words = (each.nap_us, each.kernel.binary, each.kernel.entry, each.blocks, each.threads, *each.parameters)
            lines.append(f"launch {' '.join(map(str, words))}")
        return "\n".join(lines)
