"""The fields of structures that the host writes and kernels read."""

from __future__ import annotations

import ctypes


def u32(*names: str) -> list[tuple[str, type[ctypes.c_uint32]]]:
    """Return fields of 32 bits, in this order."""
    return [(name, ctypes.c_uint32) for name in names]


def u64(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    """Return fields of 64 bits, in this order: addresses, sizes and times."""
    return [(name, ctypes.c_uint64) for name in names]
