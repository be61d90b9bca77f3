"""A graph of launches of one kernel whose arguments may change from one time to the next."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import call, check
from mpicomm.devices.cuda.load import Kernel
from mpicomm.errors import HandleError


class LaunchGraph:
    """Launches a kernel ``count`` times in a row. The kernel's one parameter is a structure of ``nbytes`` bytes.

    The driver launches a graph in about half of the time in which it launches a kernel, and in nearly the same time
    after a change. It runs a graph once at a time. One thread uses the graph at a time; the last reference destroys it,
    once its launches are over.
    """

    def __init__(self, kernel: Kernel, nbytes: int, count: int) -> None:
        self._graph = self._executable = 0
        self.count = count
        self._nodes = [_Node(kernel, nbytes) for _ in range(count)]
        self._graph = int(call(driver.cuGraphCreate, 0))  # it stays, because its nodes name those of `_executable`
        before: list[Any] = []
        for node in self._nodes:
            before = [node.add_to(self._graph, before)]
        self._executable = int(call(driver.cuGraphInstantiate, self._graph, 0))

    def change(self, index: int, blocks: int, threads: int, argument: bytes) -> None:
        """Let launch ``index`` have this grid and argument from the next `launch` on. Local; raises `HandleError`."""
        self._nodes[index].change(self._executable, blocks, threads, argument)

    def launch(self, stream: int) -> None:
        """Enqueue the launches. Local; raises `HandleError`."""
        try:
            runtime.graphLaunch(self._executable, stream)
        except runtime.CUDARuntimeError as error:
            raise HandleError(f"cudaGraphLaunch failed: {error}") from None

    def __del__(self) -> None:
        # Without a look at the status, because the driver may have shut down with the process.
        if self._executable:
            driver.cuGraphExecDestroy(self._executable)
        if self._graph:
            driver.cuGraphDestroy(self._graph)


class _Node:
    def __init__(self, kernel: Kernel, nbytes: int) -> None:
        self._argument = ctypes.create_string_buffer(nbytes)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._argument))
        self._parameters: Any = driver.CUDA_KERNEL_NODE_PARAMS()
        self._parameters.func = driver.CUfunction(kernel.address)
        self._parameters.gridDimX = self._parameters.gridDimY = self._parameters.gridDimZ = 1
        self._parameters.blockDimX = self._parameters.blockDimY = self._parameters.blockDimZ = 1
        self._parameters.kernelParams = ctypes.addressof(self._pointer)
        # The binding takes three times as long as ctypes.
        self._set = ctypes.PyDLL("libcuda.so.1").cuGraphExecKernelNodeSetParams_v2
        self._handle: Any = None

    def add_to(self, graph: int, before: list[Any]) -> Any:
        """Add the node to a graph, behind the nodes ``before``; return its handle."""
        self._handle = call(driver.cuGraphAddKernelNode, graph, before, len(before), self._parameters)
        return self._handle

    def change(self, executable: int, blocks: int, threads: int, argument: bytes) -> None:
        self._argument.raw = argument
        self._parameters.gridDimX, self._parameters.blockDimX = blocks, threads
        handles = executable, int(self._handle), int(self._parameters.getPtr())
        status = self._set(*map(ctypes.c_void_p, handles))
        if status:
            check("cuGraphExecKernelNodeSetParams", driver.CUresult(status))
