"""``mpirun -np N python -m mpicomm.p2p``: on the host as a user runs it, and one rank of two on simulated GPUs."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicomm.bench.measure import Call, CallTimes, Machine
from tests.helpers.jobs.in_turn import changed, run_in_turn
from tests.helpers.jobs.mpiexec import run_job

P2P = ("-m", "mpicomm.p2p")
SHORT = ("--device", "cpu", "-b", "100003", "-n", "3", "-r", "2")


def test_three_ranks_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "p2p.json"
    job = run_job(3, *P2P, *SHORT, "--json", str(file))
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("# mpicomm ") and job.stdout.splitlines()[-1] == "# OK"
    found = json.loads(file.read_text())
    assert (found["ok"], found["wrong"], found["handle"], len(found["ranks"])) == (True, 0, "memfd", 3)
    assert found["options"]["bytes"] == 100003
    paths, access, *measured = found["matrices"]
    assert paths["cells"] == [["self" if a == b else "host memory" for a in range(3)] for b in range(3)]
    assert access["cells"] == [[None if a == b else True for a in range(3)] for b in range(3)]
    assert [matrix["title"] for matrix in measured] == [
        *(f"Bandwidth, {how}, copies {which}" for how in ("one way", "both ways") for which in WAYS),
        *(f"Latency, copies {which} of 16 bytes" for which in WAYS),
    ]
    for matrix in measured:
        assert f"{matrix['title']} ({matrix['unit']})\n" in job.stdout
        for source, row in enumerate(matrix["cells"]):
            for target, cell in enumerate(row):
                if source == target and "both ways" in matrix["title"]:
                    assert cell is None
                else:
                    assert cell > 0


WAYS = ("to the target", "from the source")


CORRUPT = """
from mpicomm.p2p.__main__ import Pairs
def corrupt(self, way, peer, nbytes):
    call = copy(self, way, peer, nbytes)
    def wrong():
        call()
        self._window.peer(peer)[nbytes - 1] ^= 1
    return wrong if RANK == 1 and not self.ways[way] else call
copy = patch(Pairs, "copy", corrupt)
"""
LOSE = """
from mpicomm.p2p.__main__ import Pairs
def lose(self, way, *options):
    return int if self.ways[way] else copy(self, way, *options)
copy = patch(Pairs, "copy", lose)
"""
TWO_NODES = "import os; os.environ['MPICOMM_HOSTID'] = str(RANK)"


def test_wrong_bytes_are_found_and_ranks_on_two_nodes_are_refused(tmp_path: Path) -> None:
    codes = (CORRUPT, LOSE, TWO_NODES)
    job, ended = run_in_turn(2, *((changed(tmp_path, "mpicomm.p2p.__main__", code), *SHORT) for code in codes))
    (corrupted, first), (lost, second), nodes = ended
    assert (job.returncode, first, second, nodes) == (0, 1, 1, ("", 2))
    # One way and with few bytes rank 1 puts in the cells of one row, both ways in the two cells that are measured.
    assert corrupted.splitlines()[-1] == "# FAILED: 6 wrong bytes"
    # One way all four cells, both ways two cells with two copies; some bytes are right by chance.
    assert int(lost.split()[-3]) > 0.99 * (4 + 2 * 2) * 100003
    assert job.stderr == (
        "error: the matrices are of mapped memory and need all ranks on one node; these 2 ranks are on 2 nodes: start "
        "them on one\n"
    )


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
