"""Template: the calls of one form by one algorithm, as launches of which each call fills in the arguments."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from mpicomm.kernels.variant import Variant

Filled = tuple[Any, int, int]
"""A launch whose arguments stand in `Template.arguments`: its kernel among those of the template, blocks, threads."""


class Template(Protocol):
    """A form as an algorithm carries it out: one launch of a kernel, and nothing beside it."""

    @property
    def arguments(self) -> ctypes.Structure:
        """The argument of the kernel. A launch copies it, so the next call may overwrite it then."""

    @property
    def early(self) -> bool:
        """See `Launch.early`."""

    def variant(self, kernel: Any) -> Variant:
        """Return the source and options of a kernel; raises `InvalidUsageError` for an undefined reduction."""


class EvenTemplate(Template, Protocol):
    """The template of a form whose blocks are equal."""

    def fill(self, send: int, receive: int, nbytes: int, hash32: int) -> Filled | None:
        """Write a call into `arguments`; local. Return None for a call that has to be planned.

        ``send`` and ``receive`` are the addresses of the two buffers, ``nbytes`` are the bytes of one block, and
        ``hash32`` is `Signature.hash32`. All ranks fill in a call, or none does: memory that the ranks have set up
        together and ``nbytes`` alone decide.
        """


class BlocksTemplate(Template, Protocol):
    """The template of a form whose blocks have any lengths and places."""

    def fill_blocks(self, lengths: list[int], begins: list[int], hash32: int) -> Filled | None:
        """Write a call into `arguments`, as `EvenTemplate.fill` does; local.

        ``lengths`` and ``begins`` are the bytes and the addresses of the blocks of the first buffer, then of the
        second: as many as `Form.parts` says. A block without bytes has address 0.
        """

    @property
    def private_nbytes(self) -> int | None:
        """The longest message of the call, where only the two ranks of a message know its length; else None."""
