"""Compile kernels with NVRTC, once per machine: a cache on disk keeps the code. No driver or GPU is needed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from cuda.bindings import nvrtc
from cuda.pathfinder import load_nvidia_dynamic_lib

from mpicomm import environment
from mpicomm.errors import BackendUnavailableError, KernelCompileError
from mpicomm.kernels.variant import KERNEL_DIR

_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_END_NBYTES = 4096
_POLL_S = 0.002
_LONGEST_WAIT_S = 10.0
"""The time after which a rank compiles a kernel itself, because a process that has stopped keeps its lock."""


def start_compiler(compute_capability: tuple[int, int]) -> None:
    """Let NVRTC do what it does before its first kernel, which takes 0.3 s (NVRTC 13.0); blocking. Raises as `Code`."""
    _run_nvrtc(b"", "nothing.cu", [f"-arch={_architecture(compute_capability, _nvrtc_version())}"])


def has_kernels(compute_capability: tuple[int, int]) -> bool:
    """Return whether the cache on disk holds kernels for such a device, perhaps of another version."""
    directory = environment.cache_directory()
    return directory is not None and any(directory.glob(f"*-{_device_name(compute_capability)}-*"))


class Code:
    """The code of a kernel for a device, compiled once per machine: CUBIN, or PTX for a device newer than this NVRTC.

    ``source`` is a .cu file. Construction raises `BackendUnavailableError` if NVRTC is missing.
    """

    def __init__(self, source: Path, compute_capability: tuple[int, int], extra_options: Sequence[str] = ()) -> None:
        self._text, self._name = source.read_bytes(), source.name
        self._compute_capability = compute_capability
        self._version = _nvrtc_version()
        directories = (KERNEL_DIR, source.parent)
        headers = sorted(_headers(self._text, directories).items())
        build = _build(load_nvidia_dynamic_lib("nvrtc").abs_path)
        facts = self._version, build, tuple(extra_options), self._text, headers
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._options = ["-std=c++17", *(f"-I{directory}" for directory in directories), *extra_options]
        directory = environment.cache_directory()
        self._kept = directory and directory / f"{source.stem}-{_device_name(compute_capability)}-{digest[:32]}"

    def get(self, meanwhile: Callable[[], None] = lambda: None) -> bytes:
        """Return the code; blocking, up to some seconds the first time. Raises `KernelCompileError` with NVRTC's log.

        If it is not in the cache, call ``meanwhile`` while somebody else compiles it, or after compiling it here: other
        kernels that this process compiles would make this one late.
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


def _device_name(compute_capability: tuple[int, int]) -> str:
    major, minor = compute_capability
    return f"sm_{major}{minor}"


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


def _headers(text: bytes, directories: tuple[Path, ...]) -> dict[bytes, bytes]:
    """Return digests of the headers that a source includes, and of those that these include, by their names."""
    found: dict[bytes, bytes] = {}
    names = {*_INCLUDE.findall(text)}
    while names:
        name = names.pop()
        if name not in found:
            found[name], more = _header(name, directories)
            names |= more
    return found


@lru_cache  # kernels share most headers, and their text takes a while to read
def _header(name: bytes, directories: tuple[Path, ...]) -> tuple[bytes, set[bytes]]:
    """Return the digest of a header, and the names of the headers that it includes."""
    for directory in directories:
        with contextlib.suppress(OSError):
            text = (directory / name.decode()).read_bytes()
            return hashlib.sha256(text).digest(), {*_INCLUDE.findall(text)}
    return b"", set()  # an error of the compiler


def _nvrtc_version() -> tuple[int, int]:
    try:
        major, minor = _call(nvrtc.nvrtcVersion)
    except RuntimeError as error:  # cuda-bindings raises it if it cannot load the library
        raise BackendUnavailableError(
            f'NVRTC cannot be loaded: {error}; run: pip install -e ".[cuda12]" (or cuda13, as CuPy is)'
        ) from error
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
    (supported,) = _call(nvrtc.nvrtcGetSupportedArchs)
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
    (program,) = _call(nvrtc.nvrtcCreateProgram, text, name.encode(), 0, [], [])
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


def _output(get_size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    (size,) = _call(get_size, program)
    buffer = bytearray(size)
    _call(get, program, buffer)
    return bytes(buffer)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of ``cuda.bindings.nvrtc``, and return its results without its status."""
    status, *results = function(*arguments)
    if int(status) != 0:
        raise KernelCompileError(f"NVRTC failed: {status.name}")
    return results


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
