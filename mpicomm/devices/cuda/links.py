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
        return Link("staged", gb_s=pcie_gb_s(own.uuid, device))
    if device == own.uuid:
        return Link("same device", access=True, native_atomics=True)
    peer = next((other for other in devices if other.uuid == device), None)
    if peer is None:
        link = nvml_link(own.uuid, device)  # NVML also knows GPUs that this process does not see
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
    if link.path == "NVLink":
        return replace(link, gb_s=nvlink_gb_s(own.uuid, device))
    return replace(link, gb_s=pcie_gb_s(own.uuid, device)) if link.path == "PCIe" else link


# nvmlGpuP2PCapsIndex_t of nvml.h, because a stray comma in several versions of pynvml makes tuples of these constants.
_READ, _NVLINK, _ATOMICS = 0, 2, 3
# The bandwidth of a lane each way in GB/s, by generation: 2.5, 5, 8, 16, 32 and 64 GT/s minus the line code.
_PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

_Answer = TypeVar("_Answer")


def nvml_link(device: bytes, peer: bytes) -> Link:
    """Return the link between the GPUs with these UUIDs; "unknown" if NVML or its Python package does not say."""

    def link(nvml: Any) -> Link:
        ends = [_handle(nvml, end) for end in (device, peer)]
        linked, access, atomics = (
            bool(nvml.nvmlDeviceGetP2PStatus(*ends, capability) == nvml.NVML_P2P_STATUS_OK)
            for capability in (_NVLINK, _READ, _ATOMICS)
        )
        return Link("NVLink" if linked else "PCIe", None, access, atomics)

    return _ask(link) or Link("unknown")


def nvlink_gb_s(device: bytes, peer: bytes) -> float | None:
    """Return the bandwidth each way of the NVLinks between two GPUs; None if NVML or its package does not say."""

    def bandwidth(nvml: Any) -> float | None:
        own, other = (_handle(nvml, end) for end in (device, peer))
        active = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_active(nvml, own, link)]
        place = nvml.nvmlDeviceGetPciInfo(other).busId
        direct = [link for link in active if nvml.nvmlDeviceGetNvLinkRemotePciInfo(own, link).busId == place]
        (speed,) = nvml.nvmlDeviceGetFieldValues(own, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
        if speed.nvmlReturn != nvml.NVML_SUCCESS:
            return None
        # If no link goes to the peer itself, all links go to switches, and a pair of GPUs can use all its links.
        return len(direct or active) * speed.value.uiVal / 1000 or None

    return _ask(bandwidth)


def pcie_gb_s(*devices: bytes) -> float | None:
    """Return the least PCIe bandwidth each way of these GPUs; None if NVML or its package does not say."""

    def bandwidth(nvml: Any) -> float | None:
        # The maximum of the slot, because an idle link runs at a lower generation.
        handles = [_handle(nvml, device) for device in devices]
        lanes = [
            (nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
            for handle in handles
        ]
        known = [(_PCIE_LANE_GB_S[generation], width) for generation, width in lanes if generation in _PCIE_LANE_GB_S]
        return min((lane * width for lane, width in known), default=None)

    return _ask(bandwidth)


def _ask(question: Callable[[Any], _Answer]) -> _Answer | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, device: bytes) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.UUID(bytes=device)}".encode())


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:  # the GPU has fewer links
        return False
