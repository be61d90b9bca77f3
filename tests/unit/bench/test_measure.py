"""How the bench measures graphs, libraries with several ways and calls that vary, on a machine that imitates them."""

from __future__ import annotations

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
from mpicomm.bench.libraries import Nvshmem, SymmetricNccl, TorchSymmetric
from mpicomm.bench.measure import Call, CallTimes, Machine, Measuring, Outcome
from mpicomm.bench.operations import OPERATIONS, Case, CaseBuffers, Content
from mpicomm.bench.peers import ROOM_NBYTES, Mpicomm, Peer, draw, mean_share
from mpicomm.bench.peers import measure as measure_all
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


class Library(Peer):
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
    comm: mpicomm.Communicator, library: Library, *, name: str = "other", graphs: bool = True, machine: Any = None
) -> tuple[dict[str, Outcome], dict[str, str]]:
    machine = machine or Replaying()
    library.name, library.first, library.second = name, *(np.empty(CASE.nbytes, np.uint8) for _ in range(2))
    content = Content(np, FLOAT, "sum", 1, CASE.count, reduces=True)
    measuring = Measuring(comm, machine, iterations=3, warmups=1, rounds=2, graphs=graphs)
    return measure_all(measuring, [library], content, CASE, checks=1)


def test_a_graph_is_timed_or_each_call(comm: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(comm, Library({"way": right})) == ({"other": Outcome(7e-6 * 1e6, None, 0, "", "way")}, {})
    bare, machine = Library({"way": right}), Replaying()
    bare.capturable = False
    monkeypatch.setattr(machine, "capture", lambda call, count: 1 / 0)
    for eager, (outcomes, _) in {
        "": measure(comm, Library({"way": right}), graphs=False),
        "it cannot be captured": measure(comm, bare),
        "ZeroDivisionError: division by zero": measure(comm, Library({"way": right}), machine=machine),
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
    outcomes, silent = measure(comm, Library(ways), graphs=False)
    assert outcomes["other"].way == "fast"
    assert outcomes["other"].time_us < 1000
    assert silent == {"other": "broken RuntimeError: no such kernel"}


def test_wrong_elements_of_any_way_are_counted_and_what_a_graph_leaves(comm: mpicomm.Communicator) -> None:
    def corrupt(buffers: CaseBuffers) -> None:
        buffers.receive.view(np.uint32)[[3, 99]] ^= 1

    def remember(buffers: CaseBuffers) -> None:
        machine.corrupt = buffers.receive

    assert measure(comm, Library({"right": right, "corrupt": corrupt}))[0]["other"].wrong == 2
    machine = Replaying()
    assert measure(comm, Library({"": remember}), name="mpicomm", machine=machine)[0]["mpicomm"].wrong == 1


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


@pytest.fixture(params=[12, 13])
def major(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The major version of CuPy's CUDA."""
    major: int = request.param
    runtime = SimpleNamespace(runtimeGetVersion=lambda: major * 1000 + 90)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    return major


def test_packages_fit_the_cuda_in_use(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
