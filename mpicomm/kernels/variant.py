"""Variant: a kernel and its compiler options. Imports no CUDA package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """A kernel with one structure as its parameter, and one set of compiler options."""

    source: Path
    """The .cu file. It includes headers from its own directory and from `headers.SHARED`."""
    entry: str
    options: tuple[str, ...]
