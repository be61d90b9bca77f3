"""Template: the calls of one form by one algorithm. Each call fills in the arguments of the template's launch."""

from __future__ import annotations

import ctypes
from math import inf
from typing import Any, Protocol

from mpicomm.kernels.variant import Variant
from mpicomm.symmetric.registry import Mapped

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
