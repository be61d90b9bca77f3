"""MessageDevice: the Protocol of a GPU, by the name that the modules of messages have for it."""

from mpicomm.devices.base import GpuBackend as MessageDevice
from mpicomm.devices.base import SideStreams

__all__ = ["MessageDevice", "SideStreams"]
