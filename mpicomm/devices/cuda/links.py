"""The link from a GPU of this process to memory of another GPU, as the driver and NVML describe it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cuda.bindings import driver

from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.handle import Kind


def link_to(own: DeviceInfo, device: bytes, kind: Kind, devices: Sequence[DeviceInfo]) -> Link:
    """Return the link from GPU ``own`` to memory of the GPU with UUID ``device``; ``devices`` are visible. Local."""
    if kind == "staged":
        return Link("staged", gb_s=ask_nvml(pcie_gb_s, own.uuid, device))
    if device == own.uuid:
        return Link("same device", access=True, native_atomics=True)
    peer = next((other for other in devices if other.uuid == device), None)
    if peer is None:
        # NVML also knows GPUs that this process does not see.
        link = ask_nvml(nvml_link, own.uuid, device) or Link("unknown")
    else:
        attribute = driver.CUdevice_P2PAttribute
        rank, access, atomics = (
            call(driver.cuDeviceGetP2PAttribute, what, own.ordinal, peer.ordinal)
            for what in (
                attribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
                attribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
                attribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            )
        )
        # Between GPUs, NVLink carries atomics and PCIe does not.
        link = Link("NVLink" if atomics else "PCIe", rank, bool(access), bool(atomics))
    if link.path == "unknown":
        return link
    return replace(link, gb_s=ask_nvml(nvlink_gb_s if link.path == "NVLink" else pcie_gb_s, own.uuid, device))


# nvmlGpuP2PCapsIndex_t of nvml.h, because a stray comma in several versions of pynvml makes tuples of these constants.
_READ, _NVLINK, _ATOMICS = 0, 2, 3
# The bandwidth of a lane each way in GB/s, by generation: 2.5, 5, 8, 16, 32 and 64 GT/s minus the line code.
_PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

_Answer = TypeVar("_Answer")


def ask_nvml(question: Callable[..., _Answer], *devices: bytes) -> _Answer | None:
    """Ask NVML's Python package about the GPUs with these UUIDs; None if NVML or the package does not say.

    ``question`` gets the package and NVML's handles of the GPUs.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        names = [f"GPU-{uuid.UUID(bytes=device)}".encode() for device in devices]
        return question(pynvml, *map(pynvml.nvmlDeviceGetHandleByUUID, names))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def nvml_link(nvml: Any, own: Any, peer: Any) -> Link:
    """Return the link between two GPUs."""
    linked, access, atomics = (
        bool(nvml.nvmlDeviceGetP2PStatus(own, peer, capability) == nvml.NVML_P2P_STATUS_OK)
        for capability in (_NVLINK, _READ, _ATOMICS)
    )
    return Link("NVLink" if linked else "PCIe", None, access, atomics)


def nvlink_gb_s(nvml: Any, own: Any, peer: Any) -> float | None:
    """Return the bandwidth each way of the NVLinks between two GPUs."""
    active = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_active(nvml, own, link)]
    place = nvml.nvmlDeviceGetPciInfo(peer).busId
    direct = [link for link in active if nvml.nvmlDeviceGetNvLinkRemotePciInfo(own, link).busId == place]
    (speed,) = nvml.nvmlDeviceGetFieldValues(own, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if speed.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    # If no link goes to the peer itself, all links go to switches, and a pair of GPUs can use all its links.
    return len(direct or active) * speed.value.uiVal / 1000 or None


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:  # the GPU has fewer links
        return False


def pcie_gb_s(nvml: Any, *devices: Any) -> float | None:
    """Return the least PCIe bandwidth each way of GPUs."""
    # The maximum of the slot, because an idle link runs at a lower generation.
    lanes = [
        (nvml.nvmlDeviceGetMaxPcieLinkGeneration(device), nvml.nvmlDeviceGetMaxPcieLinkWidth(device))
        for device in devices
    ]
    known = [(_PCIE_LANE_GB_S[generation], width) for generation, width in lanes if generation in _PCIE_LANE_GB_S]
    return min((lane * width for lane, width in known), default=None)
