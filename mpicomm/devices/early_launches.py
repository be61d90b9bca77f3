"""Whether kernels may begin early: the device sets up their blocks while the previous kernel still runs."""

from __future__ import annotations

from mpicomm.devices.base import DeviceInfo


def begins_early(info: DeviceInfo, *, host_slots: bool, side_by_side: int) -> bool:
    """Return whether kernels with ``wait_for_predecessor`` begin early on a device.

    ``side_by_side`` is the number of ranks that share the device at one time. Devices before 9.0 cannot do this. A
    kernel that begins early relies on this device seeing the previous kernel's stores. That guarantees nothing for
    slots in host memory. If ranks run side by side, early blocks could keep out blocks for which another rank waits.
    """
    return info.compute_capability >= (9, 0) and not host_slots and side_by_side == 1
