"""Facts that ranks find out together: the ranks that can read each other's memory, and how a Communicator opens it."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicomm.api.communicator import Communicator
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.roll_call import private_copy
from mpicomm.devices.cuda.driver import call, visible_devices
from mpicomm.doctor.facts import MemoryFacts, RankFacts, VisibleGpu
from mpicomm.errors import InvalidUsageError, MpicommError

_WORD = 0x6D706963  # the other ranks read this word


def gather(facts: RankFacts, timeout_s: float, device: str, handle: str) -> list[RankFacts]:
    """Return the facts of all ranks on all ranks. Collective.

    If a rank does not come within ``timeout_s``, the other ranks raise `CollectiveTimeoutError` with its number.
    """
    group = Group(private_copy(MPI.COMM_WORLD, "doctor: begin", timeout_s), range(MPI.COMM_WORLD.size), timeout_s)
    word = ctypes.c_uint32(_WORD)

    def look() -> tuple[RankFacts, int]:
        gpus, reason = _find_gpus()
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        own = replace(facts, rank=group.rank, world_size=group.size, threads_multiple=threads)
        return replace(own, gpus=gpus, no_gpu_reason=reason), ctypes.addressof(word)

    found = group.exchange("doctor: look around", look)
    unreadable: dict[int, str] = {}
    for peer, address in found:
        # MPI takes ranks with the same host name for ranks of one machine.
        if (peer.boot_id, peer.host) == (facts.boot_id, facts.host) and (error := _read(peer.pid, address)):
            unreadable[peer.rank] = error
    memory, reason = _open_memory(device, handle), next(iter(unreadable.values()), "")
    own = replace(found[group.rank][0], unreadable=tuple(unreadable), unreadable_reason=reason, memory=memory)
    return group.exchange("doctor: own facts", lambda: own)  # until then the others may read the word


class _Part(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _read(pid: int, address: int) -> str:
    """Read a word of another process as MPI does for large messages. Return the error, or ""."""
    word = ctypes.c_uint32()
    here = _Part(ctypes.addressof(word), ctypes.sizeof(word))
    there = _Part(address, ctypes.sizeof(word))
    libc, one = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(1)
    parts = ctypes.byref(here), one, ctypes.byref(there), one
    if libc.process_vm_readv(pid, *parts, ctypes.c_ulong(0)) < 0:
        return os.strerror(ctypes.get_errno())
    return "" if word.value == _WORD else "it reads another process"


def _open_memory(device: str, handle: str) -> MemoryFacts:
    try:
        comm = Communicator(device=device, handle=handle)
    except InvalidUsageError:
        raise
    except MpicommError as error:
        return MemoryFacts(error=str(error))
    with comm:
        info = comm.describe()
        uuid = info.device_uuid.hex() if any(info.device_uuid) else ""
        return MemoryFacts(str(info.device), uuid, info.handle, dict(info.rejected))


def _find_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the GPUs of this process, and the reason if there are none. Local; starts the driver without a context."""
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
