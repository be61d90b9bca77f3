"""Kernels: their sources and compiler options, the fields of their structures. Imports no CUDA package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

KERNEL_DIR = Path(__file__).parent
"""The directory of the headers that the kernels of all algorithms include."""


def include_dir() -> str:
    """Return the directory that holds ``mpicomm.cuh``, for ``-I`` of NVRTC, nvcc or CuPy. Local.

    With this header a kernel works on the parts of a `SymmetricArray` on all ranks: `put`, `get`, `signal`, `wait`,
    `barrier`, `send_packets`, `receive_packets` and `reduce_load`, each by a thread, a warp or a block. The comments of
    the header say what each function orders, which threads call it, and what happens at a timeout. It needs C++17.
    """
    return str(KERNEL_DIR / "include")


@dataclass(frozen=True)
class Variant:
    """A kernel with one structure as its parameter, and one set of compiler options."""

    source: Path
    """The .cu file. It includes headers from its own directory and from `KERNEL_DIR`."""
    entry: str
    options: tuple[str, ...]


# It is not frozen, because a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class Launch:
    """One kernel and its arguments."""

    variant: Variant
    arguments: ctypes.Structure
    blocks: int
    threads: int
    early: bool = False
    """Whether its blocks may be set up while the previous kernel still runs: programmatic dependent launch."""


def u32(*names: str) -> list[tuple[str, type[ctypes.c_uint32]]]:
    """Return fields of 32 bits, in this order."""
    return [(name, ctypes.c_uint32) for name in names]


def u64(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    """Return fields of 64 bits, in this order: addresses, sizes and times."""
    return [(name, ctypes.c_uint64) for name in names]
