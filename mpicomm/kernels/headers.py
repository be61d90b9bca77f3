"""Where the sources of kernels lie: those that kernels share, and the header for kernels of users."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parent
"""The directory of the headers that kernels of every algorithm include."""


def include_dir() -> str:
    """Return the directory that holds ``mpicomm.cuh``, for ``-I`` of NVRTC, nvcc or CuPy. Local.

    The header has what kernels of several ranks need to meet: the parts of a `SymmetricArray` on all ranks, and flags
    to signal and to wait for. It wants C++17.
    """
    return str(SHARED / "include")
