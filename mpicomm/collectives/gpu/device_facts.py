"""DeviceFacts: the facts about a rank's device that the ranks of an engine exchange."""

from __future__ import annotations

from dataclasses import dataclass

from mpicomm import environment
from mpicomm.devices.base import GpuBackend


@dataclass(frozen=True)
class DeviceFacts:
    """The facts about a rank's device that the ranks exchange."""

    multiprocessors: int
    total_nbytes: int
    uuid: bytes
    takes_turns: bool
    """Whether the device runs only one process at a time, so that a kernel has all multiprocessors."""


def device_facts(backend: GpuBackend) -> DeviceFacts:
    """Return the facts about this rank's device. Local."""
    takes_turns = not environment.multi_process_service()
    return DeviceFacts(backend.multiprocessors, backend.total_nbytes, backend.info.uuid, takes_turns)
