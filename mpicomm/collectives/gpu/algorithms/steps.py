"""Steps: what one rank enqueues for a collective on GPUs. They know no device, so tests run them without one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from mpicomm.kernels.variant import Variant


@dataclass(frozen=True)
class Launch:
    """One kernel and its arguments."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int
    early: bool = False
    """Whether its blocks may be set up while the kernel ahead of it still runs."""


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine: into a peer's memory, beside the kernels.

    A ``local`` copy stays within this rank's memory and takes its turn among the kernels.
    """

    target: int
    source: int
    nbytes: int
    local: bool = False


@dataclass(frozen=True)
class Fork:
    """The copies that follow wait for all steps ahead of them."""


@dataclass(frozen=True)
class Join:
    """The steps that follow, but for copies, wait for the copies ahead of them."""


Step = Launch | Copy | Fork | Join
