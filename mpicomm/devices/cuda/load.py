"""Load kernels into the current CUDA context, and launch them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from cupy.cuda import driver as cupy_driver

from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.compile import Code, has_kernels, start_compiler
from mpicomm.devices.cuda.driver import call, check, library
from mpicomm.errors import HandleError, MpicommError
from mpicomm.kernels.variant import Variant

_MOST_HELPERS = 6
"""The threads of a process that compile kernels ahead. NVRTC runs its start, and some of the rest, one after the other:
nine kernels take one thread 3.0 s, three 1.4, five 0.96 and nine 0.87 (NVRTC 13.0, 16 cores, 2026-11).
"""


class Kernel:
    """A kernel whose code is on the device, and whose one parameter is a structure by value."""

    def __init__(self, function: Any) -> None:
        self.address = int(function)

    def launch_at(self, stream: int, parameters: int, blocks: int, threads: int) -> None:
        """Enqueue the kernel with parameters at the addresses in the array at address ``parameters``.

        Local, does not block; raises `HandleError`.
        """
        # CuPy's function, because the driver's binding takes three times as long.
        try:
            cupy_driver.launchKernel(self.address, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)
        except cupy_driver.CUDADriverError as error:
            raise HandleError(f"cuLaunchKernel failed: {error}") from None

    def launch_structure(self, stream: int, arguments: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Enqueue the kernel with a structure, which is copied before this returns."""
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        self.launch_at(stream, ctypes.addressof(pointer), blocks, threads)

    def launcher(self, arguments: ctypes.Structure, blocks: int, threads: int, *, early: bool = False) -> Launcher:
        """Return a launcher that launches the kernel again and again, each time with the content of ``arguments``.

        ``early`` (programmatic dependent launch) is for kernels that begin with ``wait_for_predecessor``: the device
        may set up their blocks while the previous kernel still runs.
        """
        return Launcher(self.address, arguments, blocks, threads, early=early)


class _LaunchConfig(ctypes.Structure):
    """The host's copy of the driver's ``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_nbytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Launcher:
    """Launches the kernel at address ``function``, whose one parameter is a structure by value.

    It calls the driver by ctypes, with the same memory for each launch, because the driver's binding takes twice as
    long. One thread uses it at a time.
    """

    def __init__(self, function: int, arguments: ctypes.Structure, blocks: int, threads: int, *, early: bool) -> None:
        self._arguments = arguments  # keeps the memory that the driver reads
        self._parameters = ctypes.c_void_p(ctypes.addressof(arguments))
        self._config = _LaunchConfig(grid=(blocks, 1, 1), block=(threads, 1, 1))
        if early:
            self._config.attributes, self._config.num_attributes = _early().getPtr(), 1
        pointers = ctypes.addressof(self._config), function, ctypes.addressof(self._parameters), None
        self._passed = tuple(map(ctypes.c_void_p, pointers))
        self._launch = library().cuLaunchKernelEx

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on ``stream`` with a copy of its argument. Local, does not block; raises `HandleError`."""
        self._config.stream = stream
        status = self._launch(*self._passed)
        if status:
            check("cuLaunchKernelEx", driver.CUresult(status))


@lru_cache
def _early() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def kernel_in(module: Any, name: str) -> Kernel:
    """Return the kernel ``name`` of a module, whose code is on the device when this returns. Local, blocking."""
    function = call(driver.cuModuleGetFunction, module, name.encode())
    # This query loads the code now. Under lazy loading the first launch would load the code, and loading may wait for
    # the whole device. It would wait for ever if a kernel spins there for a signal of this launch.
    call(driver.cuFuncGetAttribute, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
    return Kernel(function)


class KernelCache:
    """The kernels on one device, compiled and loaded once for all communicators of the process: see `kernels_of`.

    They stay as long as the process, because a graph of the user may refer to them longer than a communicator lives.
    Also, loading them again for each communicator would fragment the device's memory for code.

    If a kernel has to be compiled, threads of all ranks of the machine compile the `expect`ed kernels into the cache on
    disk, too. At its end the interpreter waits for the kernel that a thread compiles then. The methods are local, for
    any thread.
    """

    def __init__(self, device: DeviceInfo) -> None:
        call(driver.cuDevicePrimaryCtxRetain, device.ordinal)  # for ever, because the modules stay
        self._compute_capability = device.compute_capability
        self._lock = threading.RLock()
        self._modules: dict[tuple[Path, tuple[str, ...]], Any] = {}
        self._kernels: dict[Variant, Kernel] = {}
        self._known: set[Variant] = set()
        self._expected: deque[Variant] = deque()
        self._helpers: list[threading.Thread] = []
        if not has_kernels(self._compute_capability):
            # The start of NVRTC then passes beside the set-up of memory, not in the first call.
            _started(self._start_compiler)

    def expect(self, variants: Iterable[Variant]) -> None:
        """Note kernels that this process may need soon, the most likely first. Cheap; compiles nothing."""
        new = [variant for variant in variants if variant not in self._known]
        self._known.update(new)
        self._expected += new

    def find(self, variant: Variant) -> Kernel | None:
        """Return the kernel, or None if it is not loaded."""
        return self._kernels.get(variant)

    def load(self, variant: Variant) -> Kernel:
        """Return the kernel, compiled and loaded if necessary; the device's context must be current.

        Blocking. Raises `KernelCompileError`.
        """
        with self._lock:
            if variant not in self._kernels:
                built = variant.source, variant.options
                if built not in self._modules:
                    code = Code(variant.source, self._compute_capability, variant.options)
                    self._modules[built] = call(driver.cuModuleLoadData, code.get(self._compile_ahead))
                self._kernels[variant] = kernel_in(self._modules[built], variant.entry)
            return self._kernels[variant]

    def _compile_ahead(self) -> None:
        """Start the threads that compile the expected kernels."""
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        # They leave a core to the program. With a single core one thread uses it while the program waits for a kernel.
        others = max(1, len(os.sched_getaffinity(0)) - 1)
        most = min(_MOST_HELPERS, others, len(self._expected))
        for _ in range(most - len(self._helpers)):
            self._helpers.append(_started(self._help))

    def _start_compiler(self) -> None:
        with contextlib.suppress(MpicommError):  # whoever needs a kernel gets it
            start_compiler(self._compute_capability)

    def _help(self) -> None:
        while self._expected and threading.main_thread().is_alive():
            # Another helper may take the last one; an error of one kernel does not concern the next.
            with contextlib.suppress(IndexError, MpicommError):
                variant = self._expected.popleft()
                Code(variant.source, self._compute_capability, variant.options).keep()


def _started(work: Callable[[], None]) -> threading.Thread:
    """Return the thread that does some work, or one that is not alive."""
    helper = threading.Thread(target=work, name="mpicomm-compile")
    with contextlib.suppress(RuntimeError):  # the system refuses threads, or the interpreter ends
        helper.start()
    return helper


@lru_cache
def kernels_of(device: DeviceInfo) -> KernelCache:
    """Return the kernel cache of a device."""
    return KernelCache(device)
