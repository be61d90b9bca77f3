"""Algorithm: one way to carry out collectives on GPUs, and the call and the node for which it plans.

A new algorithm is a folder with an `Algorithm` in its plan.py, and a line in registry.py.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, Protocol

import numpy as np

from mpicomm.collectives.call import Call
from mpicomm.collectives.eight_bits import BLOCK
from mpicomm.collectives.exchange import Exchange, TwoShot
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Arena, Request
from mpicomm.collectives.gpu.algorithms.steps import Copy, Step
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.reductions import Reduction, reduction_of
from mpicomm.kernels.team import Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.device_counts import CountedBuffers
from mpicomm.mpi.span import Span
from mpicomm.symmetric.registry import Mapped, Mappings

_TAG = struct.Struct("<IIIQ")


@dataclass(frozen=True)
class Node:
    """The ranks for which an algorithm plans, and this rank. All fields except ``team`` are equal on all ranks."""

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
        """This rank's index in the node."""
        return int(self.team.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.team.size)


@dataclass(frozen=True)
class GpuCall:
    """One rank's collective call on device arrays."""

    operation: Operation
    words: str
    """The text of the call, without the place of its output."""
    hash32: int
    """See `Signature.hash32`."""
    buffers: Buffers
    nbytes: int
    """Bytes of the whole call, by which a table chooses; 0 if ranks may know different numbers."""
    memory: Mapped | None = None
    """The place of all ranks' output, if that is symmetric memory."""
    epilogue: BoundEpilogue | None = None
    wire: tuple[Wire, np.dtype[Any]] | None = None
    """How elements travel, and their type; None if they travel as they are."""
    counted: CountedBuffers | None = None
    """The buffers if counts lie on the device; else None."""

    @classmethod
    def of(cls, call: Call, mappings: Mappings, scratch: Span | None) -> GpuCall:
        """Return a read call, with ``scratch`` memory of `Call.scratch_nbytes` bytes."""
        output, memory = call.common_output, None
        if output is not None and output.total:
            memory = mappings.find(output.pointer, output.nbytes)
        facts, buffers, nbytes = call.signature, call.buffers(scratch), call.nbytes or 0
        wire = None
        if call.wire is not None and call.dtype is not None:
            wire = call.wire, call.dtype
            buffers = replace(buffers, whole=BLOCK)  # so that results do not depend on the shards
        return cls(call.operation, str(facts), facts.hash32, buffers, nbytes, memory, call.epilogue, wire, call.counted)

    @property
    def lengths_are_private(self) -> bool:
        """Whether only the two ranks of a message know its length."""
        return self.operation.counts == "private"

    @cached_property
    def reduction(self) -> Reduction | None:
        """The reduction's name among the kernels; raises `InvalidUsageError` if there is none."""
        return reduction_of(self.buffers.dtype, self.buffers.op) if self.operation.reduces else None

    @cached_property
    def one_shot(self) -> Exchange:
        """The call as one exchange."""
        return self.operation.one_shot(self.buffers)

    @cached_property
    def two_shot(self) -> TwoShot:
        """The call as two exchanges: the second sends on the data of the first."""
        assert self.operation.two_shot is not None
        return self.operation.two_shot(self.buffers)

    def tag(self, step: int = 0, *, into_memory: bool = False) -> int:
        """Return `launch_tag` of one launch of the call."""
        return launch_tag(self.hash32, step, self.memory if into_memory else None)

    def text(self, *, into_memory: bool) -> str:
        """Return the text of the call for errors."""
        return with_place(self.words, self.memory) if into_memory and self.memory else self.words


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


def moved(exchange: Exchange) -> Iterator[Copy]:
    """Yield the copy within this rank's memory that ends an exchange, if it has one."""
    if exchange.move is not None:
        source, target = exchange.move
        if target.count:
            yield Copy(target.pointer, source.pointer, target.count * exchange.dtype.itemsize, local=True)


class Algorithm(ABC):
    """One way to carry out collectives. Its methods are pure functions with the same answer on all ranks."""

    name: ClassVar[str]
    """The value of ``algorithm=`` that selects it; several algorithms may have one name."""
    in_rank_order: ClassVar[bool] = True
    """Whether it reduces in the order of ranks; "auto" takes no other algorithm."""
    codes: ClassVar[bool] = False
    """Whether it carries elements as codes of 8 bits if a call asks for that."""
    counted: ClassVar[bool] = False
    """Whether it carries messages with counts on the device."""
    into_memory: ClassVar[bool] = False
    """Whether it stores straight into symmetric output. Then ranks must agree on the address."""

    @abstractmethod
    def serves(self, operation: Operation) -> bool:
        """Return whether it can carry out some calls of this collective."""

    def lengths(self, form: Form, node: Node, *, symmetric: bool) -> Lengths | None:
        """Return the lengths of calls of this form for which `accepts` returns None; None if it takes no such call.

        ``symmetric`` is whether the output is symmetric memory.
        """
        return ALL_LENGTHS

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """Return the reason, for an error, why it cannot carry out a call that it `serves`; None if it can."""
        return None

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """Return the memory that it needs beyond the arena."""
        return ()

    def finishes_from(self, epilogue: BoundEpilogue, node: Node) -> float:
        """Return the fewest bytes of a call whose epilogue its steps apply; else a further step applies it."""
        return inf

    def finishes(self, call: GpuCall, node: Node) -> bool:
        """Return whether its steps apply the epilogue of a call with an epilogue."""
        return call.epilogue is not None and call.nbytes >= self.finishes_from(call.epilogue, node)

    def template(self, form: Form, node: Node) -> Template | None:
        """Return one launch that each call of a form fills in; None if the engine plans each call.

        The launch applies the epilogue of the form.
        """
        return None

    @abstractmethod
    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """Yield this rank's steps, in order. The arena already has all `memory`."""


Lengths = tuple[float, float]
"""The fewest and the most bytes that the longest message of a call has. They are the same on all ranks."""
ALL_LENGTHS: Lengths = 0, inf

Filled = tuple[Any, int, int]
"""A launch with the arguments in `Template.arguments`: its kernel among the template's kernels, blocks, threads.

A call of several steps is a list of its steps, and two zeros.
"""


class Template(Protocol):
    """The launch of one kernel by which an algorithm carries out all calls of a form."""

    @property
    def arguments(self) -> ctypes.Structure:
        """The argument of the kernel. A launch copies it, so the next call may overwrite it after the launch."""

    @property
    def early(self) -> bool:
        """See `Launch.early`."""

    def variant(self, kernel: Any) -> Variant:
        """Return the source and options of a kernel; raises `InvalidUsageError` for an undefined reduction."""


class EvenTemplate(Template, Protocol):
    """The template of a form with equal blocks."""

    def fill(self, send: int, receive: int, nbytes: int, hash32: int, memory: Mapped | None) -> Filled | None:
        """Write a call into `arguments`; local. Return None for a call that the engine has to plan.

        ``send`` and ``receive`` are the addresses of the two buffers. ``nbytes`` are the bytes of one block, of a
        number that `Algorithm.lengths` includes. ``hash32`` is `Signature.hash32`, and ``memory`` is `GpuCall.memory`.
        Either all ranks fill in a call, or none does. So whether the result is None depends only on ``nbytes`` and on
        memory that the ranks have set up together.
        """


class BlocksTemplate(Template, Protocol):
    """The template of a form with blocks of any lengths and places."""

    def fill_blocks(self, lengths: list[int], begins: list[int], longest: int, hash32: int) -> Filled | None:
        """Write a call into `arguments`, as `EvenTemplate.fill` does; local.

        ``lengths`` and ``begins`` are the bytes and the addresses of the blocks: first the blocks of the send buffer,
        then the blocks of the receive buffer. `Form.parts` says how many. A block without bytes has address 0.
        ``longest`` is the largest length.
        """

    @property
    def private_nbytes(self) -> int | None:
        """The longest message of the call, if only the two ranks of a message know its length; else None."""
