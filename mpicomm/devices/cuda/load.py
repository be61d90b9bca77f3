"""Compile kernels with NVRTC, once per machine, load them into the current CUDA context, and launch them.

A cache on disk keeps the compiled code. NVRTC needs neither a driver nor a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from cuda.bindings import driver, nvrtc
from cuda.pathfinder import load_nvidia_dynamic_lib

from mpicomm import environment
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.driver import call, check
from mpicomm.errors import BackendUnavailableError, HandleError, KernelCompileError, MpicommError
from mpicomm.kernels.variant import SHARED, Variant

_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_END_NBYTES = 4096
_POLL_S = 0.002
_LONGEST_WAIT_S = 10.0
"""The time after which a rank compiles a kernel itself, because a process that has stopped keeps its lock."""
_MOST_HELPERS = 2
"""The threads of a process that compile kernels ahead. More threads gain little: NVRTC runs them one after the other in
part, and all ranks of the node help.
"""


def compile_kernel(source: Path, compute_capability: tuple[int, int], extra_options: Sequence[str] = ()) -> bytes:
    """Return ``source`` (a .cu file) compiled for a device: CUBIN, or PTX for a device newer than this NVRTC.

    Local, blocking (up to some seconds the first time). Raises `KernelCompileError` with NVRTC's log, and
    `BackendUnavailableError` if NVRTC is missing.
    """
    return _Code(source, compute_capability, extra_options).get()


class _Code:
    """The code of a kernel for a device, compiled once per machine. Construction raises `BackendUnavailableError`."""

    def __init__(self, source: Path, compute_capability: tuple[int, int], extra_options: Sequence[str]) -> None:
        self._text, self._name = source.read_bytes(), source.name
        self._compute_capability = major, minor = compute_capability
        self._version = _nvrtc_version()
        directories = (SHARED, source.parent)
        headers = sorted(_headers(self._text, directories).items())
        build = _build(load_nvidia_dynamic_lib("nvrtc").abs_path)
        facts = self._version, build, tuple(extra_options), self._text, headers
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._options = ["-std=c++17", *(f"-I{directory}" for directory in directories), *extra_options]
        directory = environment.cache_directory()
        self._kept = directory and directory / f"{source.stem}-sm_{major}{minor}-{digest[:32]}"

    def get(self, meanwhile: Callable[[], None] = lambda: None) -> bytes:
        """Return the code; blocking. Raises `KernelCompileError`.

        If it is not in the cache, call ``meanwhile`` while somebody else compiles it, or after compiling it here.
        """
        image = self._read()
        if image is None:
            give_up_at = time.monotonic() + _LONGEST_WAIT_S
            with contextlib.closing(_Lock(self._kept)) as lock:
                while not lock.take() and time.monotonic() < give_up_at:
                    meanwhile()
                    time.sleep(_POLL_S)
                image = self._read() or self._compile()
            meanwhile()
        return image

    def keep(self) -> None:
        """Compile the code into the cache, unless it is there or somebody else is at it; blocking. Raises as `get`."""
        if self._kept is not None and not self._kept.exists():
            with contextlib.closing(_Lock(self._kept)) as lock:
                if lock.take() and not self._kept.exists():
                    self._compile()

    def _read(self) -> bytes | None:
        if self._kept is not None:
            with contextlib.suppress(OSError):
                return self._kept.read_bytes()
        return None

    def _compile(self) -> bytes:
        architecture = _architecture(self._compute_capability, self._version)
        image = _run_nvrtc(self._text, self._name, [f"-arch={architecture}", *self._options])
        if self._kept is not None:
            _store(self._kept, image)
        return image


class _Lock:
    """The right to compile the code that will be ``kept`` in a file. One thread of one process of a machine has it.

    The operating system releases the lock of a process that dies. Without a cache, or on a file system without locks,
    everybody has it.
    """

    def __init__(self, kept: Path | None) -> None:
        self._file: IO[str] | None = None
        self._taken = False
        if kept is not None:
            self._path = kept.with_name(f"{kept.name}.lock")
            with contextlib.suppress(OSError):
                self._file = self._path.open("w")

    def take(self) -> bool:
        """Take the lock if it is free. Return whether it is taken here."""
        if self._file is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._taken = True
            except BlockingIOError:
                return False
            except OSError:
                pass
        return True

    def close(self) -> None:
        """Release the lock. Those who wait for it find the code; a later one uses another file, and finds it, too."""
        if self._file is not None:
            if self._taken:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            self._file.close()


def _headers(text: bytes, directories: tuple[Path, ...]) -> dict[str, bytes]:
    """Return digests of the headers that a source includes, and of those that these include, by their names."""
    found: dict[str, bytes] = {}
    names = _included(text)
    while names:
        name = names.pop()
        if name not in found:
            found[name], more = _header(name, directories)
            names |= more
    return found


def _included(text: bytes) -> set[str]:
    return {*map(bytes.decode, _INCLUDE.findall(text))}


@lru_cache  # kernels share most headers, and their text takes a while to read
def _header(name: str, directories: tuple[Path, ...]) -> tuple[bytes, set[str]]:
    """Return the digest of a header, and the names of the headers that it includes."""
    for directory in directories:
        with contextlib.suppress(OSError):
            text = (directory / name).read_bytes()
            return hashlib.sha256(text).digest(), _included(text)
    return b"", set()  # an error of the compiler


def _nvrtc_version() -> tuple[int, int]:
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-bindings raises it if it cannot load the library
        raise BackendUnavailableError(
            f'NVRTC cannot be loaded: {error}; run: pip install -e ".[cuda12]" (or cuda13, as CuPy is)'
        ) from error
    _check(status)
    return major, minor


@lru_cache
def _build(library: str) -> str:
    """Return a digest of both ends of a library, one of which holds the number of its build.

    Patches of NVRTC share the version that it tells, and the size of the library.
    """
    with Path(library).open("rb") as file:
        begin = file.read(_END_NBYTES)
        file.seek(-len(begin), os.SEEK_END)
        return hashlib.sha256(begin + file.read()).hexdigest()


def _architecture(compute_capability: tuple[int, int], version: tuple[int, int]) -> str:
    status, supported = nvrtc.nvrtcGetSupportedArchs()
    _check(status)
    major, minor = compute_capability
    wanted = 10 * major + minor
    if wanted in supported:
        return f"sm_{wanted}"
    older = [arch for arch in supported if arch < wanted]
    if not older:
        raise KernelCompileError(
            f"NVRTC {version[0]}.{version[1]} compiles for compute capability {min(supported) / 10:.1f} and newer, "
            f'this device has {major}.{minor}; from 7.0 on CUDA 12 will do: pip install -e ".[cuda12]"'
        )
    # The device is newer than this NVRTC, so the driver compiles PTX for it when it loads the module.
    return f"compute_{max(older)}"


def _run_nvrtc(text: bytes, name: str, options: list[str]) -> bytes:
    status, program = nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], [])
    _check(status)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise KernelCompileError(
                f"NVRTC cannot compile {name} with {' '.join(options)}: {status.name}\n"
                + log.rstrip(b"\0").decode(errors="replace")
            )
        if options[0].startswith("-arch=sm_"):
            return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(get_size: Any, get: Any, program: Any) -> bytes:
    status, size = get_size(program)
    _check(status)
    buffer = bytearray(size)
    (status,) = get(program, buffer)
    _check(status)
    return bytes(buffer)


def _check(status: Any) -> None:
    if int(status) != 0:
        raise KernelCompileError(f"NVRTC failed: {status.name}")


def _store(path: Path, image: bytes) -> None:
    # Ranks compile at the same time. Each rank writes a temporary file and renames it, so no rank reads half a file. If
    # the directory cannot be written, the only loss is that every start compiles again.
    with contextlib.suppress(OSError):
        fd, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(image)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink()


class Kernel:
    """A kernel whose code is on the device. ``types`` are the ctypes of its parameters."""

    def __init__(self, function: Any, types: tuple[Any, ...]) -> None:
        from cupy.cuda import driver as cupy_driver  # not above: tests import this module without CuPy

        self.address = int(function)
        self._types = types
        self._pointers = ctypes.c_void_p * len(types)
        # CuPy's function with pointers of ctypes, because the driver's binding takes three times as long.
        self._launch_kernel = cupy_driver.launchKernel
        self._error = cupy_driver.CUDADriverError

    def launch(self, stream: int, *arguments: Any) -> None:
        """Enqueue the kernel on ``stream`` with one thread. Local, does not block; raises `HandleError`."""
        values = [kind(argument) for kind, argument in zip(self._types, arguments, strict=True)]
        pointers = self._pointers(*map(ctypes.addressof, values))
        self.launch_at(stream, ctypes.addressof(pointers), 1, 1)

    def launch_at(self, stream: int, parameters: int, blocks: int, threads: int) -> None:
        """Enqueue a kernel with parameters at the addresses in the array at address ``parameters``."""
        try:
            self._launch_kernel(self.address, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)
        except self._error as error:
            raise HandleError(f"cuLaunchKernel failed: {error}") from None

    def launch_structure(self, stream: int, arguments: ctypes.Structure, *, blocks: int, threads: int) -> None:
        """Enqueue a kernel whose one parameter is a structure by value, which is copied before this returns."""
        self.launcher(arguments, blocks, threads).launch(stream)

    def launcher(self, arguments: ctypes.Structure, blocks: int, threads: int, *, early: bool = False) -> Launcher:
        """Return a launcher that launches the kernel again and again, each time with the content of ``arguments``.

        ``early`` is for kernels that begin with ``wait_for_predecessor``: the device may set up their blocks while the
        previous kernel still runs.
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
        self._launch = _driver_library().cuLaunchKernelEx

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on ``stream`` with a copy of its argument. Local, does not block; raises `HandleError`."""
        self._config.stream = stream
        status = self._launch(*self._passed)
        if status:
            check("cuLaunchKernelEx", driver.CUresult(status))


@lru_cache
def _driver_library() -> ctypes.CDLL:
    # Not PyDLL, which would keep the interpreter's lock: a launch waits if too many launches are in flight.
    return ctypes.CDLL("libcuda.so.1")


@lru_cache
def _early() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


class Module:
    """A compiled image in the current context."""

    def __init__(self, image: bytes) -> None:
        self._module: Any = call(driver.cuModuleLoadData, image)

    def kernel(self, name: str, types: tuple[Any, ...]) -> Kernel:
        """Return the kernel ``name``, whose code is on the device when this returns. Local, blocking."""
        function = call(driver.cuModuleGetFunction, self._module, name.encode())
        # This query loads the code now. Under lazy loading the first launch would load the code, and loading may wait
        # for the whole device. It would wait for ever if a kernel spins there for a signal of this launch.
        call(driver.cuFuncGetAttribute, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
        return Kernel(function, types)


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
        self._modules: dict[tuple[Path, tuple[str, ...]], Module] = {}
        self._kernels: dict[Variant, Kernel] = {}
        self._known: set[Variant] = set()
        self._expected: deque[Variant] = deque()
        self._helpers: list[threading.Thread] = []

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
                module = self.module(variant.source, variant.options)
                self._kernels[variant] = module.kernel(variant.entry, (ctypes.Structure,))
            return self._kernels[variant]

    def module(self, source: Path, options: tuple[str, ...] = ()) -> Module:
        """Return the module of a source, compiled and loaded if necessary, like `load`."""
        with self._lock:
            if (source, options) not in self._modules:
                code = _Code(source, self._compute_capability, options)
                self._modules[source, options] = Module(code.get(self._compile_ahead))
            return self._modules[source, options]

    def _compile_ahead(self) -> None:
        """Start the threads that compile the expected kernels."""
        self._helpers = [helper for helper in self._helpers if helper.is_alive()]
        # They leave a core to the program. With a single core one thread uses it while the program waits for a kernel.
        others = max(1, len(os.sched_getaffinity(0)) - 1)
        most = min(_MOST_HELPERS, others, len(self._expected))
        with contextlib.suppress(RuntimeError):  # the system refuses threads, or the interpreter ends
            for _ in range(most - len(self._helpers)):
                helper = threading.Thread(target=self._help, name="mpicomm-compile")
                helper.start()
                self._helpers.append(helper)

    def _help(self) -> None:
        while self._expected and threading.main_thread().is_alive():
            # Another helper may take the last one. Whoever needs a kernel gets the errors of its compilation.
            with contextlib.suppress(IndexError, MpicommError):
                variant = self._expected.popleft()
                _Code(variant.source, self._compute_capability, variant.options).keep()


@lru_cache
def kernels_of(device: DeviceInfo) -> KernelCache:
    """Return the kernel cache of a device."""
    return KernelCache(device)
