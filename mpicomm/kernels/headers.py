"""The directories of kernel sources: headers that kernels share, and the header for kernels of users."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parent
"""The directory of the headers that the kernels of all algorithms include."""


def include_dir() -> str:
    """Return the directory that holds ``mpicomm.cuh``, for ``-I`` of NVRTC, nvcc or CuPy. Local.

    With this header a kernel reaches the parts of a `SymmetricArray` on all ranks, signals flags and waits for flags.
    It needs C++17.
    """
    return str(SHARED / "include")
