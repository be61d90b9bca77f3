"""GPUs in memory of the host: as much of CuPy and of the driver as ``mpicomm.p2p`` uses, and a clock for each stream.

Work is done when it is enqueued, and moves the clock of its stream. A kernel that reaches memory of a GPU without peer
access fails.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from mpicomm.devices.base import DeviceInfo
from mpicomm.p2p.gpu import Copying, Gate, PointerChase

# GB/s of copies within a GPU, from GPU 0 to GPU 1, between others, and through the host; kernels have one more.
OWN, LINK, BACK, HOST = 1000.0, 200.0, 100.0, 20.0
KERNEL = 1.0
COPY_US, LOAD_US = 2.0, 0.75
"""Each copy adds the first; a load of a word takes the second."""
_OVER_CUPY = ["mpicomm.p2p.one_process"]


class CUDARuntimeError(RuntimeError):
    pass


class Memory(np.ndarray[Any, Any]):
    """An array that says where it lies as CuPy's arrays do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @data.setter
    def data(self, value: Any) -> None:
        raise NotImplementedError


class Event:
    def __init__(self, disable_timing: bool = False) -> None:
        self.at_us = 0.0

    def record(self, stream: Stream) -> None:
        self.at_us = stream.now_us

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream; its address is its number."""

    made: list[Stream]

    def __init__(self, gpus: FakeGpus) -> None:
        self.ordinal = gpus.current
        self.now_us = 0.0
        gpus.streams.append(self)
        self.ptr = len(gpus.streams) - 1

    def record(self, event: Event) -> Event:
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.now_us = max(self.now_us, event.at_us)

    def synchronize(self) -> None:
        pass


class FakeGpus:
    """``size`` GPUs. The GPUs in ``apart`` have no peer access to each other."""

    def __init__(self, size: int, apart: tuple[int, int] = (-1, -1)) -> None:
        self.size = size
        self.apart = apart
        self.current = 0
        self.streams: list[Stream] = []
        self.enabled: set[tuple[int, int]] = set()
        self.corrupts: str | None = None
        """Copies of this kind ("engine", "kernel") have a wrong last byte."""
        self.loses: str | None = None
        """The kind of copies that move nothing."""
        self._owners: list[tuple[int, int, int]] = []
        self._kept: list[Any] = []

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(n, "Fake", bytes(15) + bytes([n]), f"0000:0{n}:00.0", -1, (9, 0)) for n in range(self.size)]

    # ---- CuPy

    @contextmanager
    def _device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def Device(self, ordinal: int | None = None) -> Any:
        if ordinal is not None:
            return self._device(ordinal)
        return SimpleNamespace(synchronize=lambda: None, attributes={"MultiProcessorCount": 2})

    def context(self, info: DeviceInfo) -> Any:
        return SimpleNamespace(current=lambda: self._device(info.ordinal))

    def own(self, array: Any) -> Any:
        memory = array.view(Memory)
        self._owners.append((memory.ctypes.data, memory.ctypes.data + memory.nbytes, self.current))
        self._kept.append(memory)
        return memory

    def owner(self, address: int) -> int | None:
        return next((owner for start, end, owner in self._owners if start <= address < end), None)

    def deviceEnablePeerAccess(self, peer: int) -> None:
        if {self.current, peer} == {*self.apart}:
            raise CUDARuntimeError("cudaErrorPeerAccessUnsupported")
        assert peer != self.current and (self.current, peer) not in self.enabled
        self.enabled.add((self.current, peer))

    def deviceDisablePeerAccess(self, peer: int) -> None:
        self.enabled.remove((self.current, peer))

    def memcpyPeerAsync(self, target: int, to: int, source: int, start: int, nbytes: int, stream: int) -> None:
        assert (self.owner(target), self.owner(source)) == (to, start)
        self._move(target, source, nbytes, stream, "engine")

    def modules(self) -> dict[str, Any]:
        runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            deviceEnablePeerAccess=self.deviceEnablePeerAccess,
            deviceDisablePeerAccess=self.deviceDisablePeerAccess,
            memcpyPeerAsync=self.memcpyPeerAsync,
        )
        cuda = SimpleNamespace(
            Device=self.Device,
            Event=Event,
            Stream=lambda non_blocking: Stream(self),
            get_elapsed_time=lambda start, stop: (stop.at_us - start.at_us) / 1e3,
            alloc_pinned_memory=bytearray,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            runtime=runtime,
        )
        numpy = {name: getattr(np, name) for name in ("add", "right_shift", "bitwise_xor", "multiply", "count_nonzero")}
        cupy = SimpleNamespace(
            cuda=cuda,
            empty=lambda shape, dtype: self.own(np.empty(shape, dtype)),
            zeros=lambda shape, dtype: self.own(np.zeros(shape, dtype)),
            arange=lambda count, dtype: self.own(np.arange(count, dtype=dtype)),
            empty_like=lambda array: self.own(np.empty_like(array)),
            **numpy,
        )
        return {"cupy": cupy, "cupy.cuda": cuda}

    # ---- the driver

    def cuDeviceGetP2PAttribute(self, attribute: Any, own: int, peer: int) -> tuple[int, int]:
        names = driver.CUdevice_P2PAttribute
        assert own != peer
        reachable = {own, peer} != {*self.apart}
        return 0, {
            names.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK: abs(own - peer) - 1,
            names.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: 0,
        }.get(attribute, int(reachable))

    # ---- kernels

    def load(self, variant: Any) -> Any:
        return SimpleNamespace(launch_structure=self._launch)

    def _launch(self, stream: int, arguments: ctypes.Structure, *, blocks: int, threads: int) -> None:
        here = self.streams[stream].ordinal
        assert here == self.current
        if isinstance(arguments, Copying):
            for address in (arguments.target, arguments.source):
                self._require_access(here, address)
            self._move(arguments.target, arguments.source, arguments.nbytes, stream, "kernel")
        elif isinstance(arguments, PointerChase):
            self._require_access(here, arguments.word)
            assert ctypes.c_uint64.from_address(arguments.word).value == 0
            result = (ctypes.c_uint64 * 2).from_address(arguments.result)
            result[:] = [int(1e3 * LOAD_US * arguments.loads), arguments.loads]
        else:
            assert isinstance(arguments, Gate)

    def _require_access(self, here: int, address: int) -> None:
        owner = self.owner(address)  # None: the host
        assert owner in (None, here) or (here, owner) in self.enabled, f"GPU {here} has no access to GPU {owner}"

    def _move(self, target: int, source: int, nbytes: int, stream: int, kind: str) -> None:
        if self.loses != kind:
            ctypes.memmove(target, source, nbytes)
        if self.corrupts == kind:
            ctypes.c_uint8.from_address(target + nbytes - 1).value += 1
        ends = self.owner(target), self.owner(source)
        reached = {ends, ends[::-1]} & self.enabled
        gb_s = OWN if ends[0] == ends[1] else HOST if not reached else LINK if ends == (1, 0) else BACK
        gb_s += KERNEL if kind == "kernel" else 0
        self.streams[stream].now_us += nbytes / gb_s * 1e-3 + (COPY_US if nbytes < 100 else 0)


@contextmanager
def installed(gpus: FakeGpus) -> Iterator[None]:
    """Let ``mpicomm.p2p`` find these GPUs inside a ``with`` block."""
    before = {name: sys.modules.pop(name) for name in _OVER_CUPY if name in sys.modules}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, module in gpus.modules().items():
                patch.setitem(sys.modules, name, module)
            patch.setattr(driver, "cuDeviceGetP2PAttribute", gpus.cuDeviceGetP2PAttribute)
            patch.setattr("mpicomm.devices.cuda.load.kernels_of", lambda info: gpus)
            patch.setattr("mpicomm.devices.cuda.context.PrimaryContext", gpus.context)
            for module in ("mpicomm.p2p.__main__", "mpicomm.devices.cuda.driver"):
                patch.setattr(f"{module}.visible_devices", gpus.devices)
            yield
    finally:
        for name in _OVER_CUPY:
            sys.modules.pop(name, None)
        sys.modules.update(before)
