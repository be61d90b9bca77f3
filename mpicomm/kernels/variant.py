"""Variant: a kernel and the options it is compiled with. Imports nothing of CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """A kernel with one structure as its parameter, compiled in one way."""

    source: Path
    """The .cu file. It includes headers of its own directory and of `headers.SHARED`."""
    entry: str
    options: tuple[str, ...]
