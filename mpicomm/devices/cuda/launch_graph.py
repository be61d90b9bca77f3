"""A graph of launches of one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.load import Kernel
from mpicomm.errors import HandleError

Launch = tuple[int, int, bytes]
"""Blocks, threads and the argument of a launch. The one parameter of the kernel is a structure of these bytes."""


class LaunchGraph:
    """Makes the same launches of a kernel, one after the other, again and again.

    The driver launches a graph in about half the time of a kernel launch. It runs a graph once at a time. The last
    reference destroys the graph, after its launches are over.
    """

    def __init__(self, kernel: Kernel, launches: Iterable[Launch]) -> None:
        self._executable = 0
        graph = int(call(driver.cuGraphCreate, 0))
        try:
            before: list[Any] = []
            for launch in launches:
                before = [_add(graph, before, kernel, *launch)]
            self._executable = int(call(driver.cuGraphInstantiate, graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def launch(self, stream: int) -> None:
        """Enqueue the launches. Local; raises `HandleError`."""
        try:
            runtime.graphLaunch(self._executable, stream)
        except runtime.CUDARuntimeError as error:
            raise HandleError(f"cudaGraphLaunch failed: {error}") from None

    def __del__(self) -> None:
        if self._executable:
            driver.cuGraphExecDestroy(self._executable)  # its status may say that the driver shut down with the process


def _add(graph: int, before: list[Any], kernel: Kernel, blocks: int, threads: int, argument: bytes) -> Any:
    """Add a launch to a graph, after the launches ``before``; return its handle. The driver copies the argument."""
    memory = ctypes.create_string_buffer(argument, len(argument))
    pointer = ctypes.c_void_p(ctypes.addressof(memory))
    parameters: Any = driver.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = driver.CUfunction(kernel.address)
    parameters.gridDimX, parameters.blockDimX = blocks, threads
    parameters.gridDimY = parameters.gridDimZ = parameters.blockDimY = parameters.blockDimZ = 1
    parameters.kernelParams = ctypes.addressof(pointer)
    return call(driver.cuGraphAddKernelNode, graph, before, len(before), parameters)
