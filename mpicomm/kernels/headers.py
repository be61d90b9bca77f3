"""Where the C++ header for kernels of users is."""

from __future__ import annotations

from pathlib import Path


def include_dir() -> str:
    """Return the directory that holds ``mpicomm.cuh``, for ``-I`` of NVRTC, nvcc or CuPy. Local.

    The header has what kernels of several ranks need to meet: the parts of a `SymmetricArray` on all ranks, and flags
    to signal and to wait for. It wants C++17.
    """
    return str(Path(__file__).parent / "include")
