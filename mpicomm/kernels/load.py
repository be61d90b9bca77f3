"""Load compiled kernels into the current CUDA context and launch them."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from mpicomm.backend.cuda_driver import call


class Kernel:
    """A kernel that is on the device, ready to run; ``types`` are the ctypes of its parameters."""

    def __init__(self, function: Any, types: tuple[Any, ...]) -> None:
        self._function = function
        self._types = types

    def launch(self, stream: int, *arguments: Any, blocks: int = 1, threads: int = 1) -> None:
        """Enqueue the kernel on ``stream``. Local, does not block; raises `HandleError`."""
        self._launch(stream, blocks, threads, (arguments, self._types))

    def launch_structure(self, stream: int, arguments: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Enqueue a kernel whose one parameter is a structure by value; it is copied before this returns."""
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        self._launch(stream, blocks, threads, ctypes.addressof(pointer))

    def _launch(self, stream: int, blocks: int, threads: int, parameters: Any) -> None:
        call(driver.cuLaunchKernel, self._function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)


class Module:
    """A compiled image in the current context."""

    def __init__(self, image: bytes) -> None:
        self._module: Any = call(driver.cuModuleLoadData, image)

    def kernel(self, name: str, types: tuple[Any, ...]) -> Kernel:
        """Return a kernel by its name. Local, blocking: its code is on the device when this returns."""
        function = call(driver.cuModuleGetFunction, self._module, name.encode())
        # Under lazy loading the code would otherwise be loaded by the first launch, and loading may wait for the whole
        # device: for ever, if a kernel is spinning there for a signal that this launch is to send. Asking for an
        # attribute loads it now.
        call(driver.cuFuncGetAttribute, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
        return Kernel(function, types)

    def unload(self) -> None:
        """Unload the image; its kernels must have finished."""
        call(driver.cuModuleUnload, self._module)
