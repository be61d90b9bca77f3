"""The classes of devices, for annotations. CUDA's packages load only in a process that uses a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from mpicomm.devices.cuda import side_streams, virtual_memory
    from mpicomm.devices.cuda.backend import CudaBackend
    from mpicomm.devices.cuda.events import CudaEvent
    from mpicomm.devices.cuda.memory import CudaSegment
    from mpicomm.devices.host import HostBackend, HostEvent
    from mpicomm.devices.host_memory import HostSegment

    GpuBackend: TypeAlias = CudaBackend
    Backend: TypeAlias = HostBackend | CudaBackend
    Event: TypeAlias = HostEvent | CudaEvent
    Segment: TypeAlias = HostSegment | CudaSegment
    SideStreams: TypeAlias = side_streams.SideStreams
    VirtualSegment: TypeAlias = virtual_memory.VirtualSegment
else:
    GpuBackend = Backend = Event = Segment = SideStreams = VirtualSegment = Any
