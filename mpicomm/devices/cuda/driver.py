"""Calls of the CUDA driver that raise, and the devices that it shows to this process. Also imports without CUDA."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpicomm.devices.base import DeviceInfo
from mpicomm.errors import BackendUnavailableError, HandleError

_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class DriverShutDownError(HandleError):
    """The driver has shut down with the process, and has released everything already."""


class NoGpuError(BackendUnavailableError):
    """There is no NVIDIA driver, or it shows no GPU to this process."""


def call(function: Callable[..., Any], *arguments: Any, hint: str = "") -> Any:
    """Call a function of ``cuda.bindings.driver``, and return its results without its status.

    Local. Raises `HandleError` with the function, the error's name, its description and the way out, ``hint``.
    """
    status, *values = function(*arguments)
    check(function.__name__, status, hint)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def newest_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, without starting it; None without a driver. Local."""
    try:
        return _newest_cuda()
    except NoGpuError:
        return None


def cuda_major() -> int:
    """Return the major version of CuPy's CUDA. Packages for another version do not work with it."""
    import cupy

    return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000


def event_is_done(event: int) -> bool:
    """Return whether the work before an event is over; local."""
    return _is_over(library().cuEventQuery(ctypes.c_void_p(event)), "cuEventQuery")


def stream_is_done(stream: int) -> bool:
    """Return whether the work of a stream is over; local."""
    return _is_over(library().cuStreamQuery(ctypes.c_void_p(stream)), "cuStreamQuery")


@lru_cache
def library() -> Any:
    """Return the driver's library, for hot calls: the driver's binding takes two to four times as long."""
    # CuPy's queries keep the interpreter's lock, as PyDLL would. A tool that watches each call, such as
    # compute-sanitizer, lets a query wait for a launch of another thread, and a launch waits if too many launches are
    # in flight. If the thread that has to go on waits for the lock, all threads hang.
    return ctypes.CDLL("libcuda.so.1")


def _is_over(status: int, query: str) -> bool:
    if status not in (0, _NOT_READY):
        from cuda.bindings import driver

        check(query, driver.CUresult(status))
    return status == 0


def check(function: str, status: Any, hint: str = "") -> None:
    """Raise `HandleError` if ``status``, a ``CUresult`` that ``function`` returned, is an error."""
    if int(status) == 0:
        return
    message = f"{function} failed: {describe(status)}" + (f"; {hint}" if hint else "")
    if status.name == "CUDA_ERROR_DEINITIALIZED":
        raise DriverShutDownError(message)
    raise HandleError(message)


def describe(status: Any) -> str:
    """Return the name and the driver's description of a ``CUresult``."""
    from cuda.bindings import driver

    _, description = driver.cuGetErrorString(status)
    return f"{status.name} ({description.decode() if description else 'unknown to this driver'})"


def visible_devices() -> list[DeviceInfo]:
    """Return the GPUs of this process in ordinal order.

    Local; starts the driver, but creates no context. Raises `BackendUnavailableError`, with the reason and the way out,
    if there is no driver, no CuPy, no cuda-bindings, or no device.
    """
    driver_major, _ = _newest_cuda()
    extra = f'pip install -e ".[cuda{13 if driver_major >= 13 else 12}]"'
    try:
        importlib.import_module("cupy")
        driver: Any = importlib.import_module("cuda.bindings.driver")
        bindings_version: str = importlib.import_module("cuda.bindings").__version__
    except ImportError as error:
        raise BackendUnavailableError(f"GPUs need CuPy and cuda-bindings: {error}; run: {extra}") from error
    if int(bindings_version.split(".")[0]) > driver_major:
        raise BackendUnavailableError(
            f"cuda-bindings {bindings_version} needs a newer driver than this one, which is for CUDA {driver_major}; "
            f"run: {extra}"
        )
    (status,) = driver.cuInit(0)
    if int(status) != 0 and status.name != "CUDA_ERROR_NO_DEVICE":
        raise BackendUnavailableError(f'the NVIDIA driver did not start: {describe(status)}; or use device="cpu"')
    count = 0 if int(status) != 0 else call(driver.cuDeviceGetCount)
    if count == 0:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise NoGpuError(
            "no GPU is visible: CUDA_VISIBLE_DEVICES is "
            + ("not set, so the driver itself lists none" if mask is None else f"{mask!r}; widen or unset it")
            + ', or use device="cpu"'
        )
    return [_device_info(driver, ordinal) for ordinal in range(count)]


def _newest_cuda() -> tuple[int, int]:
    # Through ctypes, because the error for missing cuda-bindings names the version that fits the driver.
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoGpuError(
            f"no NVIDIA driver: {error}; install it (or start the container with GPUs, e.g. --gpus all), "
            'or use device="cpu"'
        ) from error
    version = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _device_info(driver: Any, ordinal: int) -> DeviceInfo:
    device = call(driver.cuDeviceGet, ordinal)
    # In CUDA 12 the function with _v2 returns the UUID of a MIG instance. The function without _v2 returns the UUID of
    # the whole GPU. CUDA 13 has only the former function, without the suffix.
    get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    attribute = driver.CUdevice_attribute
    pci_bus_id = _text(call(driver.cuDeviceGetPCIBusId, 32, device)).lower()
    return DeviceInfo(
        ordinal=ordinal,
        name=_text(call(driver.cuDeviceGetName, 256, device)),
        uuid=call(get_uuid, device).bytes,
        pci_bus_id=pci_bus_id,
        numa_node=_numa_node(pci_bus_id),
        compute_capability=(
            call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
            call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
        ),
    )


def _text(buffer: bytes) -> str:
    return buffer.split(b"\0")[0].decode().strip()


def _numa_node(pci_bus_id: str) -> int:
    try:
        return int(Path(f"/sys/bus/pci/devices/{pci_bus_id}/numa_node").read_text())
    except (OSError, ValueError):
        return -1
