"""Algorithm: one way to carry out collectives on GPUs. FormLauncher: the same for the calls of one form.

A new algorithm is a folder with launchers in its plan.py, and an `Algorithm` in registry.py.

Ranks that decide differently wait for each other for ever. So everything that decides how a call is carried out is a
pure function of facts that all its ranks share: the `Form` without this rank's buffers, the `Domain` without its team,
the bytes of the longest message, and whether the output of all ranks is symmetric memory. This holds for
`Algorithm.serve`, for the bounds and the `memory` of a launcher, and for whether its `fill` returns None.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, NamedTuple

from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Arena, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.team import Team
from mpicomm.kernels.variant import Variant
from mpicomm.symmetric.registry import Mapped

_TAG = struct.Struct("<IIIQ")


@dataclass(frozen=True)
class Domain:
    """The ranks of a peer domain, and this rank. All fields except ``team`` are equal on all ranks."""

    team: Team
    """The first argument of every kernel of this rank."""
    arena: Arena
    multiprocessors: int
    """The fewest blocks that run at once on each device."""
    link_speed: float = 1.0
    """The speed of the slowest link, relative to the links on which built-in sizes were measured."""
    most_staged_nbytes: int = 0
    """The most memory of each rank in which copy engines may stage data."""
    early: bool = True
    """Whether blocks of a kernel may be set up before the previous kernel has ended."""
    host_slots: bool = False
    """Whether the ranks' arenas lie in host memory."""

    @property
    def rank(self) -> int:
        """This rank's index in the domain."""
        return int(self.team.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.team.size)

    @property
    def most_blocks(self) -> int:
        """The most blocks of a launch, because all of them must run at once; an H200 has 132 multiprocessors."""
        return min(128, self.multiprocessors)


def launch_tag(hash32: int, step: int = 0, memory: Mapped | None = None) -> int:
    """Return a number made of the facts in which ranks must agree in one launch.

    ``hash32`` is `Signature.hash32`, and ``step`` is the number of the launch in its call. The ranks store into
    ``memory``, if it is not None.
    """
    if memory is not None:
        return zlib.crc32(_TAG.pack(hash32, step, memory.array, memory.offset))
    return zlib.crc32(_TAG.pack(hash32, step, 0, 0)) if step else hash32


def with_place(text: str, place: Mapped | str) -> str:
    """Return the text of a call with the place in symmetric memory into which ranks store."""
    return f"{text}, into {place}"


Filled = tuple[Any, int, int]
"""A launch with the arguments in `KernelTemplate.arguments`: its kernel, blocks and threads. 0 blocks: no launch.

For a `StepLauncher` it is a list of steps, and two zeros.
"""


class KernelTemplate(ABC):
    """The launch of one kernel, into whose arguments each call is written."""

    arguments: ctypes.Structure
    """The argument of the kernel. A launch copies it, so the next call may overwrite it after the launch."""
    early = False

    @abstractmethod
    def variant(self, kernel: Any) -> Variant:
        """Return the source and options of a kernel; raises `InvalidUsageError` for an undefined reduction."""

    def launch_of(self, filled: Filled) -> Launch:
        """Return the launch with `arguments`, which later calls overwrite."""
        kernel, blocks, threads = filled
        return Launch(self.variant(kernel), self.arguments, blocks, threads, self.early)

    def steps_of(self, filled: Filled) -> list[Step]:
        """Return the written call as steps of its own, which later calls do not overwrite."""
        if not filled[1]:
            return []
        launch = self.launch_of(filled)
        launch.arguments = type(self.arguments).from_buffer_copy(self.arguments)
        return [launch]


class FormLauncher(ABC):
    """Carries out the calls of one form whose longest message has ``fewest`` to ``most`` bytes."""

    fewest: float = 0
    most: float = inf
    into_memory: ClassVar[bool] = False
    """Whether it stores straight into symmetric output. Then ranks must agree on the address."""
    needs_symmetric_output: ClassVar[bool] = False
    finishes = False
    """Whether it applies the epilogue of the form; else a further kernel does."""
    private_nbytes: int | None = None
    """This rank's longest message in the filled-in call, if only the two ranks of a message know its length."""

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        """Return the memory beyond the arena for a call whose longest message has ``longest`` bytes."""
        return ()

    @abstractmethod
    def fill(
        self,
        lengths: list[int],
        begins: list[int],
        longest: int,
        hash32: int,
        memory: Mapped | None = None,
        finish: BoundEpilogue | None = None,
    ) -> Filled | None:
        """Return the launch of one call. The next `fill` may overwrite its arguments. Local.

        ``lengths`` and ``begins`` are the bytes and the addresses of the blocks, as `Form.numbers` returns them, and
        ``longest`` is the largest length. ``hash32`` is `Signature.hash32`, ``memory`` is the place of all ranks'
        output if that is symmetric, and ``finish`` is the epilogue if the launcher `finishes`. The result is None if
        the arena lacks `memory`.
        """

    @abstractmethod
    def steps_of(self, filled: Filled) -> list[Step]:
        """Return the filled-in call as steps of its own, which later calls do not overwrite."""


class StepLauncher(FormLauncher):
    """Carries out each call by steps, whose number depends on the length of the call."""

    def __init__(self, form: Form, domain: Domain) -> None:
        self._form = form
        self._domain = domain

    def fill(
        self,
        lengths: list[int],
        begins: list[int],
        longest: int,
        hash32: int,
        memory: Mapped | None = None,
        finish: BoundEpilogue | None = None,
    ) -> Filled | None:
        if not all(map(self._domain.arena.has, self.memory(longest, symmetric=memory is not None))):
            return None
        return self.made(self._form.buffers(lengths, begins), hash32, memory), 0, 0

    def steps_of(self, filled: Filled) -> list[Step]:
        made: list[Step] = filled[0]
        return made

    @abstractmethod
    def made(self, buffers: Buffers, hash32: int, memory: Mapped | None) -> list[Step]:
        """Return this rank's steps, in order. The arena has all `memory`."""


class Algorithm(NamedTuple):
    """One way to carry out collectives."""

    name: str
    """The value of ``algorithm=`` that selects it; several algorithms may have one name."""
    serves: Callable[[Operation], bool]
    """Returns whether it can carry out some calls of a collective."""
    serve: Callable[[Form, Domain], Sequence[FormLauncher] | str]
    """Returns launchers for calls of a form of a collective that it `serves`; else the reason, for an error."""
    in_rank_order: bool = True
    """Whether it reduces in the order of ranks; "auto" takes no other algorithm."""
    sends_codes: bool = False
    """Whether elements may travel as codes of 8 bits."""
