"""How two GPUs of this machine are linked, from NVML, which sees them all whatever CUDA_VISIBLE_DEVICES hides."""

from __future__ import annotations

import uuid
from typing import Any

from mpicomm.backend.base import Link

# nvmlGpuP2PCapsIndex_t of nvml.h; in several versions of pynvml a stray comma makes tuples of them.
_READ, _NVLINK, _ATOMICS = 0, 2, 3


def nvml_link(device: bytes, peer: bytes) -> Link:
    """Return the link between the GPUs with these UUIDs; "unknown" where NVML or its Python package does not say."""
    try:
        import pynvml
    except ImportError:
        return Link("unknown")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Link("unknown")
    try:
        ends = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=end)}".encode()) for end in (device, peer)]
        linked, access, atomics = (_supported(pynvml, ends, capability) for capability in (_NVLINK, _READ, _ATOMICS))
        return Link("NVLink" if linked else "PCIe", None, access, atomics)
    except pynvml.NVMLError:
        return Link("unknown")
    finally:
        pynvml.nvmlShutdown()


def _supported(pynvml: Any, ends: list[Any], capability: int) -> bool:
    return bool(pynvml.nvmlDeviceGetP2PStatus(*ends, capability) == pynvml.NVML_P2P_STATUS_OK)
