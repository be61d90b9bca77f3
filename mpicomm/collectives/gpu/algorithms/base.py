"""Step: work that a rank enqueues for a collective on GPUs. AnyPlan: a call of steps. They know no device.

Form: a kind of collective calls. Algorithm: one way to carry out collectives. FormLauncher: one for a form.

A form's calls differ only in the addresses and lengths of their blocks. The patterns of `patterns.py` know addresses
and counts. A form gets from them the exchange of one unit. In this exchange an address encodes the number of a block
and of a unit in the block. So a span of the exchange says where any call of the form has its data.

A new algorithm is a folder with launchers in its plan.py, and an `Algorithm` in gpu/decision.py.

Ranks that decide differently wait for each other for ever. So everything that decides how a call is carried out is a
pure function of facts that all its ranks share: the `Form` without this rank's buffers, the `Domain` without its team,
the bytes of the longest message, and whether the output of all ranks is symmetric memory. This holds for
`Algorithm.serve`, for the bounds and the `memory` of a launcher, and for whether its `fill` returns None.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpicomm.activity.layout import format_call
from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Chain, Exchange, TwoShot
from mpicomm.collectives.gpu.algorithms.memory import Domain, Request
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.packed import Gaps
from mpicomm.collectives.patterns import Buffers
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.reductions import Reduction, reduction_of
from mpicomm.kernels.variant import Launch, Variant
from mpicomm.mpi.arguments import Span
from mpicomm.sharing.segments import Mapped


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine into a peer's memory. It runs beside the kernels.

    A ``local`` copy stays within this rank's memory and runs in order with the kernels. With several ``rows``,
    ``nbytes`` are those of a row, and the pitches are the bytes from one row to the next.
    """

    target: int
    source: int
    nbytes: int
    local: bool = False
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


@dataclass(frozen=True)
class Fork:
    """All copies after it wait for all steps before it."""


@dataclass(frozen=True)
class Join:
    """All steps after it, except copies, wait for all copies before it."""


@dataclass(frozen=True)
class LibraryWork:
    """Work of another library, in order with the kernels. ``enqueue`` gets the stream."""

    enqueue: Callable[[int], object]


Step = Launch | Copy | Fork | Join | LibraryWork


class AlgorithmChoice(NamedTuple):
    """The algorithm of a call, as text for records of calls."""

    algorithm: str = ""
    why: str = ""
    slow: str = ""
    """Why the call takes a slow path; "" if it does not."""


NO_CHOICE = AlgorithmChoice()
"""The choice of plans that are parts of calls."""


class AnyPlan:
    """A call that an engine can enqueue repeatedly. Its ``str`` is `text`."""

    text_format: str
    count = 0
    offset: int | None = None
    """The text of the call, with places for its numbers, and these numbers, for `CallLog.post`."""
    choice: AlgorithmChoice = NO_CHOICE
    collective = True
    """Whether all ranks make the call. Then they can compare their calls."""
    lasts = True
    """Whether it stays the plan of one call. A template is the plan of another call after the next `fill`."""
    template_of: Callable[..., Any] | None = None
    """Returns one `CallTemplate` for all calls of the kind of this one; None if they have to be read one by one.

    For a message, its arguments are the bytes of an element of both buffers.
    """
    by_output = False
    """Whether the library of the receive buffer decides the stream, because MPI ignores the send buffer."""
    by_address = False
    """Whether an address names a buffer. The caller's later work on the buffer may be on any stream."""

    @property
    def text(self) -> str:
        """The text of the call, for errors."""
        return format_call(self.text_format, self.count, self.offset or 0)

    def __str__(self) -> str:
        return self.text


# A unit of 128 bytes is a whole cache line. So patterns that begin shards at whole lines never cut a unit.
_UNIT = np.dtype("V128")
_BYTE = np.dtype(np.uint8)
_BLOCK_BITS = 40
"""Block k of a form begins at address (k + 1) << 40."""


@dataclass(frozen=True, eq=False)
class Form:
    """A kind of calls between the ranks of a peer domain. Blocks count from the first one of the send buffer on."""

    operation: Operation
    rank: int
    size: int
    dtype: np.dtype[Any]
    """The type of the elements if the collective reduces them, else bytes."""
    op: str
    root: int
    sends: int
    """The number of blocks that this rank sends from; 0 if it has no send buffer, or if its data is in place."""
    receives: int
    """The number of blocks into which it receives; 0 also if ``in_place``."""
    in_place: bool = False
    """Whether this rank's result of a reduction goes to the start of its input."""
    stays: bool = False
    """Whether the block that this rank sends to itself already lies where it belongs."""
    epilogue: BoundEpilogue | None = None
    wire: tuple[Wire, np.dtype[Any]] | None = None
    """How elements travel quantized, and their type; None if they travel as they are."""
    block_hashes: tuple[tuple[int, int], ...] = ()
    gaps: tuple[Gaps | None, ...] = ()
    """The gaps in each block; empty if no block has gaps."""

    @classmethod
    def of_call(cls, call: Call, buffers: Buffers, gaps: tuple[Gaps | None, ...] = ()) -> Form:
        """Return the form of a read call; ``buffers`` is its memory, with these gaps in its blocks."""
        assert call.dtype is not None
        wire = None if call.wire is None else (call.wire, call.dtype)
        in_place = call.in_place and call.operation.reduces and not buffers.scratch
        epilogue = None if call.epilogue is None else call.epilogue.detached()
        # Empty arrays share address 0, but later calls of their kind have two buffers.
        others: dict[str, Any] = {"epilogue": epilogue, "wire": wire, "gaps": gaps}
        return cls._of(call.operation, buffers, call.send is None, in_place=in_place, **others)

    @classmethod
    def of_buffers(cls, operation: Operation, buffers: Buffers) -> Form:
        """Return the form of a call with this memory, which is in place if its memory says so."""
        in_place = False
        if operation.reduces and operation.is_even and buffers.receives and not buffers.scratch:
            sent, output = buffers.sends[0], buffers.receives[0]
            in_place = bool(output.count) and sent.pointer == output.pointer
        return cls._of(operation, buffers, may_stay=True, in_place=in_place)

    @classmethod
    def _of(cls, operation: Operation, b: Buffers, may_stay: bool, **others: Any) -> Form:
        sends, receives, stays = len(b.sends), len(b.receives), False
        if others["in_place"]:
            receives = 0
        elif may_stay and not operation.reduces and sends and receives:
            stays = b.sends[b.rank if sends > 1 else 0] == b.receives[b.rank if receives > 1 else 0]
        dtype = b.dtype if operation.reduces else _BYTE
        others |= {"stays": stays, "block_hashes": b.block_hashes}
        return cls(operation, b.rank, b.size, dtype, b.op, b.root, sends, receives, **others)

    @property
    def key(self) -> Hashable:
        """All of the form that launchers depend on. Each call brings its own epilogue of the same kind."""
        finish = self.epilogue and (type(self.epilogue), self.epilogue.row_nbytes)
        facts = self.operation, self.rank, self.size, self.dtype, self.op, self.root, self.wire, finish
        return *facts, self.block_hashes, self.gaps, self.sends, self.receives, self.in_place, self.stays

    @property
    def itemsize(self) -> int:
        """The bytes of an element of ``dtype``."""
        return self.dtype.itemsize

    @property
    def is_private(self) -> bool:
        """Whether only the two ranks of a message know its length."""
        return self.operation.counts == "private"

    @cached_property
    def reduction(self) -> Reduction | None:
        """The reduction's name among the kernels; raises `InvalidUsageError` if there is none."""
        return reduction_of(self.dtype, self.op) if self.operation.reduces else None

    @cached_property
    def one_shot(self) -> Exchange:
        """The call as one exchange, with one unit in each block."""
        return self.operation.one_shot(self._units(1))

    @cached_property
    def two_shot(self) -> TwoShot:
        """The call as two exchanges, with whole units in each shard for any number of shards."""
        assert self.operation.two_shot is not None
        return self.operation.two_shot(self._units(self.size * (self.size - 1)))

    @cached_property
    def chain(self) -> Chain:
        """The call as a chain of one unit."""
        assert self.operation.chain is not None
        return self.operation.chain(self._units(1))

    def piece(self, span: Span | None, like: Span | None = None) -> tuple[int, int]:
        """Return the block and its shard for which a span of `one_shot`, `two_shot` or `chain` stands.

        They are -1 for no data. The block is also -1 for data that the rank does not store.

        A span without an address has only a length. For such a span, ``like`` is a span of the same shard with an
        address.
        """
        if span is None or span.count == 0:
            return -1, -1
        if span.pointer == 0:
            return -1, self.piece(like)[1]
        block, offset = divmod(span.pointer, 1 << _BLOCK_BITS)
        return block - 1, offset // (_UNIT.itemsize * span.count)

    def gaps_of(self, span: Span | None) -> Gaps | None:
        """Return the gaps in the block for which a span of `one_shot` stands."""
        block, _ = self.piece(span)
        return None if block < 0 else self.gaps[block]

    def numbers(self, b: Buffers) -> tuple[list[int], list[int]]:
        """Return the bytes and the addresses of the blocks of a call. A block without bytes has address 0."""
        received = b.receives if self.receives else ()
        if b.scratch and received:
            received = [Span(b.scratch, received[0].count)]
        spans = [*b.sends, *received]
        return [span.count * b.dtype.itemsize for span in spans], [span.pointer if span.count else 0 for span in spans]

    def buffers(self, lengths: list[int], begins: list[int]) -> Buffers:
        """Return the memory of a call: the inverse of `numbers`."""
        itemsize = self.itemsize
        return self._placed(
            self.dtype, [Span(at, nbytes // itemsize) for nbytes, at in zip(lengths, begins, strict=True)]
        )

    def _units(self, count: int) -> Buffers:
        """Return this rank's memory with ``count`` units in each block."""
        blocks = [Span(block + 1 << _BLOCK_BITS, count) for block in range(self.sends + self.receives)]
        if self.stays:
            own = self.sends + (self.rank if self.receives > 1 else 0)
            blocks[self.rank if self.sends > 1 else 0] = blocks[own]
        return self._placed(_UNIT, blocks)

    def _placed(self, dtype: np.dtype[Any], blocks: list[Span]) -> Buffers:
        sent, received = blocks[: self.sends], blocks[self.sends :]
        if self.in_place:
            received = [Span(sent[0].pointer, sent[self.rank if len(sent) > 1 else 0].count)]
        return Buffers(self.rank, self.size, dtype, sent, received, self.op, self.root, self.block_hashes)


Numbers = tuple[list[int], list[int], int, int, Mapped | None, BoundEpilogue | None]
"""A call of a form: the bytes of its blocks and their addresses, as `Form.numbers` returns them; the most bytes of a
block; `Signature.hash32`; the place of all ranks' output if that is symmetric; and the epilogue, if there is one.

It is a plain tuple, because every new call makes one.
"""
Filled = tuple[Any, int, int]
"""A launch with the arguments in `KernelTemplate.arguments`: its kernel, blocks and threads. 0 blocks: no launch.

If the number of steps depends on the length of the call, it is a list of steps, and two zeros.
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
    moves_gaps = False
    """Whether it carries out a form whose blocks have gaps."""
    finishes = False
    """Whether it applies the epilogue of the form; else a further kernel does."""

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        """Return the memory beyond the arena for a call whose longest message has ``longest`` bytes."""
        return ()

    @abstractmethod
    def fill(self, numbers: Numbers) -> Filled | None:
        """Return the launch of one call, or None if the arena lacks `memory`. Local.

        The next `fill` may overwrite its arguments.
        """

    def steps_of(self, filled: Filled) -> list[Step]:
        """Return the filled-in call as steps of its own, which later calls do not overwrite."""
        steps: list[Step] = filled[0]
        return steps


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
    quantizes: bool = False
    """Whether elements may travel quantized."""
