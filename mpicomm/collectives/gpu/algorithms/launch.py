"""Launch: one kernel of a collective on GPUs, and what it is told."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from mpicomm.kernels.variant import Variant


@dataclass(frozen=True)
class Launch:
    """One kernel, and what it is told."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int
    early: bool = False
    """Whether it may begin before the kernel ahead of it is over."""
