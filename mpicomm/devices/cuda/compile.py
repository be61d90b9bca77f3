"""Compile mpicomm's kernels with NVRTC, once per machine: a cache on disk keeps the results.

This needs NVRTC, but neither a driver nor a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from mpicomm import environment
from mpicomm.errors import BackendUnavailableError, KernelCompileError
from mpicomm.kernels.variant import SHARED


def compile_kernel(source: Path, compute_capability: tuple[int, int], extra_options: Sequence[str] = ()) -> bytes:
    """Return ``source`` (a .cu file) compiled for a device: CUBIN, or PTX for a device newer than this NVRTC.

    Local, blocking (up to some seconds the first time). Raises `KernelCompileError` with NVRTC's log, and
    `BackendUnavailableError` if NVRTC is missing.
    """
    text = source.read_bytes()
    version = _nvrtc_version()
    architecture = _architecture(compute_capability, version)
    directories = (SHARED, source.parent)
    includes = [*(f"-I{directory}" for directory in directories), *_cuda_headers()]
    options = [f"-arch={architecture}", "-std=c++17", *includes, *extra_options]
    digest = hashlib.sha256(repr((version, options, text)).encode())
    for header in (header for directory in directories for header in sorted(directory.glob("*.cuh"))):
        digest.update(repr((header.name, header.read_bytes())).encode())
    directory = environment.cache_directory()
    cached = directory and directory / f"{source.stem}-{architecture}-{digest.hexdigest()[:32]}"
    if cached:
        with contextlib.suppress(OSError):
            return cached.read_bytes()
    image = _run_nvrtc(text, source.name, options)
    if cached:
        _store(cached, image)
    return image


def _nvrtc_version() -> tuple[int, int]:
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-bindings raises it if it cannot load the library
        raise BackendUnavailableError(
            f'NVRTC cannot be loaded: {error}; run: pip install -e ".[cuda12]" (or cuda13, as CuPy is)'
        ) from error
    _check(status)
    return major, minor


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


def _cuda_headers() -> list[str]:
    # CUDA's headers for fp16 and bf16 need CUDA's other headers; the kernels themselves do not.
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:  # an older cuda-pathfinder
        return []
    directory = find_nvidia_header_directory("cudart")
    return [f"-I{directory}"] if directory else []


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
