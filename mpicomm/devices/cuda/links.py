"""The link from a GPU of this process to memory of another GPU, as the driver and NVML describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuda.bindings import driver

from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.nvml_links import nvlink_gb_s, nvml_link, pcie_gb_s
from mpicomm.devices.handle import Kind


def link_to(own: DeviceInfo, device: bytes, kind: Kind, devices: Sequence[DeviceInfo]) -> Link:
    """Return the link from GPU ``own`` to memory of the GPU with UUID ``device``; ``devices`` are visible. Local."""
    if kind == "staged":
        return Link("staged", gb_s=pcie_gb_s(own.uuid, device))
    if device == own.uuid:
        return Link("same device", access=True, native_atomics=True)
    link = _peer_link(own, device, devices)
    if link.path == "NVLink":
        return replace(link, gb_s=nvlink_gb_s(own.uuid, device))
    if link.path == "PCIe":
        return replace(link, gb_s=pcie_gb_s(own.uuid, device))
    return link


def _peer_link(own: DeviceInfo, device: bytes, devices: Sequence[DeviceInfo]) -> Link:
    peers = [other for other in devices if other.uuid == device]
    if not peers:
        return nvml_link(own.uuid, device)  # NVML also knows GPUs that this process does not see
    attribute = driver.CUdevice_P2PAttribute
    rank, access, atomics = (
        call(driver.cuDeviceGetP2PAttribute, what, own.ordinal, peers[0].ordinal)
        for what in (
            attribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
            attribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
            attribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
        )
    )
    # Between GPUs, NVLink carries atomics and PCIe does not.
    return Link("NVLink" if atomics else "PCIe", rank, bool(access), bool(atomics))
