"""The GPUs of this process, as the driver describes them."""

from __future__ import annotations

import importlib
from typing import Any

from mpicomm.devices.cuda.driver import call, visible_devices
from mpicomm.doctor.facts import VisibleGpu
from mpicomm.errors import MpicommError


def find_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the GPUs of this process, and the reason if there are none.

    Local. It starts the driver, but creates no context.
    """
    try:
        devices = visible_devices()
        driver: Any = importlib.import_module("cuda.bindings.driver")
        return tuple(
            VisibleGpu(
                device.uuid.hex(),
                device.name,
                tuple(
                    peer.uuid.hex()
                    for peer in devices
                    if peer != device and not call(driver.cuDeviceCanAccessPeer, device.ordinal, peer.ordinal)
                ),
            )
            for device in devices
        ), ""
    except MpicommError as error:
        return (), str(error)
