"""Steps: the work that one rank enqueues for a collective on GPUs. They know no device, so tests need none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from mpicomm.kernels.variant import Variant


# It is not frozen, because a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class Launch:
    """One kernel and its arguments."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int
    early: bool = False
    """Whether its blocks may be set up while the previous kernel still runs."""


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine into a peer's memory. It runs beside the kernels.

    A ``local`` copy stays within this rank's memory and runs in order with the kernels.
    """

    target: int
    source: int
    nbytes: int
    local: bool = False


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
