"""Facts that ranks find out together: the ranks that can read each other's memory, and how a Communicator opens it."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicomm.cli.options import open_communicator
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

    def look() -> RankFacts:
        gpus, reason = _find_gpus()
        return replace(
            facts,
            rank=group.rank,
            world_size=group.size,
            threads_multiple=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
            gpus=gpus,
            no_gpu_reason=reason,
        )

    found = group.exchange("doctor: look around", look)
    places = group.exchange("doctor: own memory", lambda: (os.getpid(), ctypes.addressof(word)))

    def read_others() -> tuple[tuple[int, ...], str]:
        failed, reason = [], ""
        for peer, (pid, address) in zip(found, places, strict=True):
            # MPI takes ranks with the same host name for ranks of one machine.
            if (peer.boot_id, peer.host) == (facts.boot_id, facts.host) and (error := _read(pid, address)):
                failed.append(peer.rank)
                reason = error
        return tuple(failed), reason

    unreadable = group.exchange("doctor: memory of others", read_others)
    memory = _open_memory(device, handle)
    memories = group.exchange("doctor: opened memory", lambda: memory)
    return [
        replace(one, unreadable=ranks, unreadable_reason=reason, memory=opened)
        for one, (ranks, reason), opened in zip(found, unreadable, memories, strict=True)
    ]


class _Part(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _read(pid: int, address: int) -> str:
    """Read a word of another process as MPI does for large messages. Return the error, or ""."""
    word = ctypes.c_uint32()
    here = _Part(ctypes.addressof(word), ctypes.sizeof(word))
    there = _Part(address, ctypes.sizeof(word))
    libc = ctypes.CDLL(None, use_errno=True)
    read = libc.process_vm_readv
    read.restype = ctypes.c_ssize_t
    part, count = ctypes.POINTER(_Part), ctypes.c_ulong
    read.argtypes = [ctypes.c_int, part, count, part, count, count]
    if read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) < 0:
        return os.strerror(ctypes.get_errno())
    return "" if word.value == _WORD else "it reads another process"


def _open_memory(device: str, handle: str) -> MemoryFacts:
    """Return how a Communicator of all ranks opens memory. Collective."""
    try:
        comm = open_communicator(device, handle)
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
