"""Launches of the kernel of message.cu."""

from __future__ import annotations

import ctypes
import threading

from cupy.cuda import runtime

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.load import KernelCache
from mpicomm.kernels.message import MESSAGE_KERNEL, MESSAGE_STEP, MESSAGE_THREADS
from mpicomm.kernels.team import LANES, Faults

_pack_into = MESSAGE_STEP.pack_into


class _Parameters(threading.local):
    """The argument of a launch, which CUDA copies before the launch returns; one for each thread that sends."""

    def __init__(self) -> None:
        self.step = ctypes.create_string_buffer(MESSAGE_STEP.size)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.step))
        self.address = ctypes.addressof(self._pointer)


class MessageSteps:
    """The steps of messages on one device. Its kernel is loaded when this is made: that may wait for the device."""

    def __init__(self, context: PrimaryContext, kernels: KernelCache, faults: Faults, timeout_ns: int) -> None:
        self._context = context
        self._ordinal = context.device.ordinal
        with context.current():
            self._launch_at = kernels.load(MESSAGE_KERNEL).launch_at
        self._parameters = _Parameters()
        self._limits = timeout_ns, faults.record, faults.failed

    def launch(
        self,
        stream: int,
        blocks: int = 1,
        target: int = 0,
        source: int = 0,
        nbytes: int = 0,
        awaited: int = 0,
        stored: int = 0,
        count: int = 0,
        number: int = 0,
        peer: int = 0,
    ) -> None:
        """Enqueue a step; see `MessageStep` of devices/base.py. Local, stream-ordered, not capturable."""
        parameters = self._parameters
        _pack_into(parameters.step, 0, target, source, nbytes, awaited, stored, count, number, *self._limits, peer, 0)
        threads = MESSAGE_THREADS if nbytes else LANES
        # Cheaper than a change of context, and nearly always true: creating a Communicator makes its GPU the current.
        if runtime.getDevice() == self._ordinal:
            self._launch_at(stream, parameters.address, blocks, threads)
        else:
            with self._context.current():
                self._launch_at(stream, parameters.address, blocks, threads)
