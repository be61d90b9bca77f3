"""How the bench measures graphs, libraries with several ways and calls that vary, on a machine that imitates them.

``python -m mpicomm.p2p`` measures on one rank of two on simulated GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.bench.compare import ROOM_NBYTES, Library, Mpicomm, draw, mean_share
from mpicomm.bench.compare import measure as measure_all
from mpicomm.bench.libraries import Nvshmem, SymmetricNccl, TorchSymmetric
from mpicomm.bench.measure import Call, CallTimes, Machine, Measured, Measuring, Outcome
from mpicomm.bench.operations import OPERATIONS, Case, CaseBuffers, Content
from mpicomm.devices.cuda import nccl

FLOAT = np.dtype(np.float32)
CASE = Case(OPERATIONS["allreduce"], FLOAT, "sum", 100, False, 0, 1)


class Replaying(Machine):
    """A host that can capture calls; each launch makes the first byte of ``corrupt`` wrong."""

    def __init__(self) -> None:
        self.corrupt: Any = None

    def capture(self, call: Call, count: int) -> Any:
        return [call] * count

    def launch(self, graph: Any) -> None:
        for call in graph:
            call()
        if self.corrupt is not None:
            self.corrupt[0] ^= 1

    def time_graph(self, graph: Any) -> CallTimes:
        return CallTimes(7e-6)


class ImitatedLibrary(Library):
    """A peer with these ways."""

    exact = True

    def __init__(self, ways: Mapping[str, Any]) -> None:
        self.ways = ways
        self.calls: dict[str, Call] = {}

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        return {way: partial(self._run, buffers, change) for way, change in self.ways.items()}

    def _run(self, buffers: CaseBuffers, change: Any) -> None:
        buffers.receive[:] = buffers.send
        change(buffers)


@pytest.fixture
def comm() -> Iterator[mpicomm.Communicator]:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        yield comm


def right(buffers: CaseBuffers) -> None:
    """Leave the result as it is, because the sum of one rank is its input."""


def measure(
    comm: mpicomm.Communicator,
    library: ImitatedLibrary,
    *,
    name: str = "other",
    graphs: bool = True,
    machine: Any = None,
) -> Measured:
    machine = machine or Replaying()
    library.name, library.first, library.second = name, *(np.empty(CASE.nbytes, np.uint8) for _ in range(2))
    content = Content(np, FLOAT, "sum", 1, CASE.count, reduces=True)
    measuring = Measuring(comm, machine, iterations=3, warmups=1, rounds=2, graphs=graphs)
    return measure_all(measuring, [library], content, CASE, checks=1)


def test_a_graph_is_timed_or_each_call(comm: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(comm, ImitatedLibrary({"way": right})) == ({"other": Outcome(7e-6 * 1e6, None, 0, "", "way")}, {})
    bare, machine = ImitatedLibrary({"way": right}), Replaying()
    bare.capturable = False
    monkeypatch.setattr(machine, "capture", lambda call, count: 1 / 0)
    for eager, (outcomes, _) in {
        "": measure(comm, ImitatedLibrary({"way": right}), graphs=False),
        "it cannot be captured": measure(comm, bare),
        "ZeroDivisionError: division by zero": measure(comm, ImitatedLibrary({"way": right}), machine=machine),
    }.items():
        outcome = outcomes["other"]
        assert (outcome.eager, outcome.wrong) == (eager, 0)
        assert outcome.issue_us is not None and 0 < outcome.issue_us <= outcome.time_us


def test_the_fastest_way_counts_and_a_broken_one_is_left_out(comm: mpicomm.Communicator) -> None:
    def slow(buffers: CaseBuffers) -> None:
        import time

        time.sleep(1e-3)

    def broken(buffers: CaseBuffers) -> None:
        raise RuntimeError("no such kernel")

    ways = {"slow": slow, "fast": right, "broken": broken}
    outcomes, failures = measure(comm, ImitatedLibrary(ways), graphs=False)
    assert outcomes["other"].way == "fast"
    assert outcomes["other"].time_us < 1000
    assert failures == {"other": "broken RuntimeError: no such kernel"}


def test_wrong_elements_of_any_way_are_counted_and_what_a_graph_leaves(comm: mpicomm.Communicator) -> None:
    def corrupt(buffers: CaseBuffers) -> None:
        buffers.receive.view(np.uint32)[[3, 99]] ^= 1

    def remember(buffers: CaseBuffers) -> None:
        machine.corrupt = buffers.receive

    assert measure(comm, ImitatedLibrary({"right": right, "corrupt": corrupt}))[0]["other"].wrong == 2
    machine = Replaying()
    assert measure(comm, ImitatedLibrary({"": remember}), name="mpicomm", machine=machine)[0]["mpicomm"].wrong == 1


@pytest.mark.parametrize(
    ("algorithm", "on_host", "on_gpus"),
    [
        ("auto", False, True),
        ("mpi", False, False),
        ("ring", False, False),
        *((name, True, True) for name in ("one_shot", "two_shot", "chain", "copy_engine")),
    ],
)
def test_all_bits_are_compared_if_a_call_reduces_in_rank_order(
    algorithm: str, on_host: bool, on_gpus: bool, comm: mpicomm.Communicator
) -> None:
    gpu: Any = SimpleNamespace(stream="a stream")
    for machine, exact in ((Machine(), on_host), (gpu, on_gpus)):
        assert Mpicomm(comm, machine, symmetric=False, algorithm=algorithm).exact == exact


@pytest.mark.parametrize("largest", [1, 2, 7, 256, 1 << 28])
def test_every_call_is_another_one_within_a_factor_of_two(largest: int) -> None:
    found = draw(largest, 30)
    assert len(found) == len(set(found)) == 30
    assert all(largest < 2 * block <= 2 * largest for block, _ in found)
    assert all(0 <= shift < ROOM_NBYTES and shift % 512 == 0 for _, shift in found)
    blocks, shifts = map(set, zip(*found, strict=True))
    assert len(shifts) > 10 and len(blocks) >= min(largest - largest // 2, 10)


def test_ranks_draw_the_same_calls_and_the_share_counts_all_sizes() -> None:
    assert draw(1000, 50) == draw(1000, 50) != draw(1001, 50)
    # A class of few sizes gives all variations once.
    assert sorted(draw(2, 1000)) == [(2, shift) for shift in range(0, ROOM_NBYTES, 512)]
    for largest in (1, 2, 7, 8):
        blocks = {block for block, _ in draw(largest, 10_000)}
        assert mean_share(largest) == pytest.approx(sum(blocks) / len(blocks) / largest)


@pytest.mark.parametrize("major", [12, 13])
def test_packages_fit_the_cuda_in_use(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: major * 1000 + 90)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(nccl, "_path", lambda: "libnccl-of-nowhere.so")
    nccl.load.cache_clear()
    assert str(SymmetricNccl.missing()).endswith(f": pip install nvidia-nccl-cu{major}")
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "has", lambda name: False)
    monkeypatch.setattr(nccl, "version", lambda: "2.26.5")
    reason = f"NCCL 2.26.5 has no symmetric windows: pip install 'nvidia-nccl-cu{major}>=2.27'"
    assert SymmetricNccl.missing() == reason
    torch: Any = SimpleNamespace(__version__="2.11.0", __spec__=ModuleSpec("torch", None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = f"torch 2.11.0 is without CUDA: install one that is built for CUDA {major}"
    for cuda, said in ((None, reason), ("12.9", None)):
        torch.version = SimpleNamespace(cuda=cuda)
        assert TorchSymmetric.missing() == said
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Nvshmem.missing() == f"not installed: pip install nvshmem4py-cu{major}"


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
    cuda = SimpleNamespace(Device=lambda: device, driver=None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
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
    for number, (method, loads) in enumerate(pairs.methods.items(), start=1):
        source, target = pairs._data.local, pairs._window.peer(1)
        if loads:
            source, target = pairs._data.peer(1), pairs._window.local
        source[:] = number
        time_us = pairs.move_us(method, [(0, 1), (1, 0)], nbytes - 1, count)
        gb_s = GB_S["kernel" if "kernels" in method else "engine"]
        assert time_us == pytest.approx(count * (nbytes - 1) / gb_s * 1e-3)
        assert (target[:-1] == number).all() and target[-1] != number
    assert met == [1, 1, 1]
