"""Launches of the kernels that messages need: steps of message.cu, and pack.cu."""

from __future__ import annotations

import ctypes
import threading

from mpicomm.devices.cuda.load import KernelCache
from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_STEP, MESSAGE_THREADS
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, PackArguments
from mpicomm.kernels.team import LANES, Faults


class _Parameters(threading.local):
    """The argument of a launch, which CUDA copies before the launch returns; one for each thread that sends."""

    def __init__(self) -> None:
        self.step = ctypes.create_string_buffer(MESSAGE_STEP.size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.step))
        self.address = ctypes.addressof(self._pointer)


class MessageSteps:
    """The kernels on one device, loaded when this is made: loading may wait for the whole device."""

    def __init__(self, kernels: KernelCache, faults: Faults, timeout_ns: int) -> None:
        self._step = kernels.load(MESSAGE_KERNEL)
        self._pack = kernels.load(PACK_KERNEL)
        self._parameters = _Parameters()
        self._constants = timeout_ns, faults.record, faults.failed

    def launch(
        self,
        stream: int,
        blocks: int,
        target: int,
        source: int,
        nbytes: int,
        awaited: int,
        stored: int,
        count: int,
        number: int,
        peer: int,
    ) -> None:
        """Enqueue a step; see `GpuBackend.message_step`. The device's context must be current."""
        parameters = self._parameters
        MESSAGE_STEP.pack_into(
            parameters.step, 0, target, source, nbytes, awaited, stored, count, number, *self._constants, peer, 0
        )
        self._step.launch_at(stream, parameters.address, blocks, MESSAGE_THREADS if nbytes else LANES)

    def pack(self, stream: int, arguments: PackArguments, blocks: int) -> None:
        """Enqueue the kernel of pack.cu. The device's context must be current."""
        self._pack.launch_structure(stream, arguments, blocks=blocks, threads=PACK_THREADS)
