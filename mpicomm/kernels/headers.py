"""The directories of kernel sources: the headers that kernels share, and the header for kernels of users."""

from __future__ import annotations

from pathlib import Path

SHARED = Path(__file__).parent
"""The directory of the headers that the kernels of all algorithms include."""


def include_dir() -> str:
    """Return the directory that holds ``mpicomm.cuh``, for ``-I`` of NVRTC, nvcc or CuPy. Local.

    With this header a kernel works on the parts of a `SymmetricArray` on all ranks: `put`, `get`, `signal`, `wait`,
    `barrier`, `send_packets`, `receive_packets` and `reduce_load`, each by a thread, a warp or a block. The comments of
    the header say what each function orders, which threads call it, and what happens at a timeout. It needs C++17.
    """
    return str(SHARED / "include")
