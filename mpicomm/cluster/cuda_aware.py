"""Whether the MPI library below mpi4py takes device pointers, and which source says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

_ALLOC_KINDS = "mpi_memory_alloc_kinds"
_MPICH_GPU_SUPPORT_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA in MPICH's mpi.h
_LIBRARY_NAME = re.compile(r"libmpi(ch)?(_\w+)?\.so[.\d]*")


@dataclass(frozen=True)
class CudaAwareness:
    """The answer, or ``None`` if the library does not say, and the source of the answer."""

    aware: bool | None
    how: str


def query_cuda_aware() -> CudaAwareness:
    """Ask MPI whether its calls accept device pointers; local."""
    kinds = MPI.COMM_WORLD.Get_info().Get(_ALLOC_KINDS)
    if kinds is not None and any(kind.split(":")[0] == "cuda" for kind in kinds.split(",")):
        return CudaAwareness(True, f"{_ALLOC_KINDS}={kinds}")
    # Kinds without cuda decide nothing, because MPI may list only the kinds that the user asked mpiexec for.
    for library in _loaded_libraries():
        for name, query in (
            ("MPIX_Query_cuda_support", _query_cuda_support),
            ("MPIX_GPU_query_support", _gpu_query_support),
        ):
            if hasattr(library, name):
                answer = query(library)
                if answer is not None:
                    return CudaAwareness(answer, f"{name} of {library._name}")
    if kinds is not None:
        return CudaAwareness(False, f"{_ALLOC_KINDS}={kinds}")
    return CudaAwareness(None, f"this MPI has neither {_ALLOC_KINDS} nor a query function")


def _query_cuda_support(library: ctypes.CDLL) -> bool | None:
    return bool(library.MPIX_Query_cuda_support())


def _gpu_query_support(library: ctypes.CDLL) -> bool | None:
    supported = ctypes.c_int()
    error = library.MPIX_GPU_query_support(_MPICH_GPU_SUPPORT_CUDA, ctypes.byref(supported))
    return bool(supported.value) if error == MPI.SUCCESS else None


def _loaded_libraries() -> list[ctypes.CDLL]:
    """Return the MPI libraries in this process. It loads none, because mpi4py would not use that library."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = []
    for path in sorted(path for path in paths if _LIBRARY_NAME.fullmatch(Path(path).name)):
        with contextlib.suppress(OSError):  # another file has replaced the library since this process loaded it
            libraries.append(ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD))
    return libraries
