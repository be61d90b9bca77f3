"""CUDA's attributes of each two GPUs of this process."""

from __future__ import annotations

import importlib
from typing import Any

from mpicomm.devices.cuda.driver import call
from mpicomm.p2p.matrix import Cell, Matrix, fill

ACCESS = "peer access"
_ATTRIBUTES = (
    (ACCESS, "ACCESS_SUPPORTED", bool),
    ("performance rank (0 is the fastest)", "PERFORMANCE_RANK", int),
    ("native atomics", "NATIVE_ATOMIC_SUPPORTED", bool),
    ("access to CUDA arrays", "CUDA_ARRAY_ACCESS_SUPPORTED", bool),
)


def attribute_matrices(size: int) -> list[Matrix]:
    """Return the matrices of the attributes, peer access first. Local. Raises `HandleError`.

    A row is the GPU that accesses, a column is the GPU that has the memory.
    """
    driver: Any = importlib.import_module("cuda.bindings.driver")

    def matrix(title: str, name: str, kind: type[bool] | type[int]) -> Matrix:
        attribute = getattr(driver.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")

        def cell(own: int, peer: int) -> Cell:
            # The driver refuses to answer for a GPU and itself.
            return None if own == peer else kind(call(driver.cuDeviceGetP2PAttribute, attribute, own, peer))

        return fill(title, "", size, cell)

    return [matrix(*attribute) for attribute in _ATTRIBUTES]
