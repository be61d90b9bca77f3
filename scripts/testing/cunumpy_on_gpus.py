"""A plugin of pytest for programs on cunumpy: let its probe find out that MPI takes CuPy arrays. Collective."""

from __future__ import annotations

from importlib import import_module

import pytest


def pytest_configure() -> None:
    """Bind this rank's GPU and run the probe. Without it mpiarray copies its arrays through the host."""
    cunumpy = import_module("cunumpy")
    cunumpy.cuda.bind_local_device()
    if not cunumpy.mpi.mpi_is_cuda_aware():
        pytest.exit("cunumpy's probe says that MPI takes no CuPy arrays", returncode=1)
