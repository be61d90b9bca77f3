"""``python -m mpicomm.p2p`` on one rank of two on simulated GPUs."""

from __future__ import annotations

import argparse
import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.bench.measure import Call, CallTimes, Machine

GB_S = {"engine": 200.0, "kernel": 100.0}


class Memory(np.ndarray[Any, Any]):
    """An array that says where it lies as CuPy's arrays do."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @data.setter
    def data(self, value: Any) -> None:
        raise NotImplementedError


class Gpu(Machine):
    """A GPU that does work when it is enqueued, and moves the clock of its stream."""

    xp = SimpleNamespace(asarray=np.asarray, count_nonzero=np.count_nonzero)

    def __init__(self) -> None:
        self.now_us = 0.0
        self.stream = SimpleNamespace(ptr=5)

    def capture(self, call: Call, count: int) -> Any:
        return call, count

    def time_graph(self, graph: Any) -> CallTimes:
        call, count = graph
        begin_us = self.now_us
        for _ in range(count):
            call()
        return CallTimes((self.now_us - begin_us) / count / 1e6)

    def load(self, variant: Any) -> Any:
        return SimpleNamespace(launch_structure=self._launch)

    def move(self, target: int, source: int, nbytes: int, kind: str) -> None:
        ctypes.memmove(target, source, nbytes)
        self.now_us += nbytes / GB_S[kind] * 1e-3

    def _launch(self, stream: int, arguments: Any, *, blocks: int, threads: int) -> None:
        assert stream == self.stream.ptr
        self.move(arguments.target, arguments.source, arguments.nbytes, "kernel")


class Part:
    """A symmetric array of two ranks; rank 0 is here."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, self._parts = gpu, [np.zeros(nbytes, np.uint8).view(Memory) for _ in range(2)]
        self.local = self._parts[0]

    def peer(self, rank: int) -> Any:
        return self._parts[rank]

    def put(self, src: Any, peer: int, *, stream: Any) -> None:
        assert stream is self._gpu.stream
        self._gpu.move(self.peer(peer).data.ptr, src.data.ptr, src.nbytes, "engine")


def test_a_rank_moves_bytes_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="the driver's names need cuda-bindings")
    from mpicomm.p2p import __main__ as room

    gpu, met = Gpu(), []
    device = SimpleNamespace(attributes={"MultiProcessorCount": 2})
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    monkeypatch.setattr("mpicomm.devices.cuda.load.kernels_of", lambda info: gpu)
    monkeypatch.setattr("mpicomm.devices.cuda.driver.visible_devices", lambda: [None])
    monkeypatch.setattr(room, "machine_of", lambda comm: gpu)

    def empty(shape: int, dtype: Any) -> Part:
        return Part(gpu, shape)

    def gather(mine: Any) -> list[Any]:
        return [mine, ([], 0)]

    comm: Any = SimpleNamespace(device=0, rank=0, size=2, empty=empty, check=int, barrier=int, allgather=gather)
    comm.sendrecv = lambda *arguments, source: met.append(source)
    nbytes, count = 1 << 20, 3
    pairs = room.Pairs(comm, argparse.Namespace(bytes=nbytes, iters=count, rounds=1))
    for number, (way, loads) in enumerate(pairs.ways.items(), start=1):
        source, target = pairs._data.local, pairs._window.peer(1)
        if loads:
            source, target = pairs._data.peer(1), pairs._window.local
        source[:] = number
        time_us = pairs.move_us(way, [(0, 1), (1, 0)], nbytes - 1, count)
        gb_s = GB_S["kernel" if "kernels" in way else "engine"]
        assert time_us == pytest.approx(count * (nbytes - 1) / gb_s * 1e-3)
        assert (target[:-1] == number).all() and target[-1] != number
    assert met == [1, 1, 1]
