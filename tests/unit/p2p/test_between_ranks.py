"""``mpirun -np N python -m mpicomm.p2p``: on the host as a user runs it, and one rank of two on simulated GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.helpers.jobs.in_turn import run_changed
from tests.helpers.jobs.mpiexec import run_job

P2P = ("-m", "mpicomm.p2p")
SHORT = ("--device", "cpu", "-b", "100003", "-n", "3", "-r", "2")


def test_three_ranks_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "p2p.json"
    job = run_job(3, *P2P, *SHORT, "--json", str(file))
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("mpicomm ") and job.stdout.splitlines()[-1] == "OK"
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
from mpicomm.p2p.between_ranks import BetweenRanks
def corrupt(self, way, peer, nbytes, *options):
    result = round_us(self, way, peer, nbytes, *options)
    if RANK == 1 and not self.ways[way]:
        self._window.peer(peer)[nbytes - 1] ^= 1
    return result
round_us = patch(BetweenRanks, "round_us", corrupt)
"""
LOSE = """
from mpicomm.p2p.between_ranks import BetweenRanks
def lose(self, way, *options):
    return 1.0 if self.ways[way] else round_us(self, way, *options)
round_us = patch(BetweenRanks, "round_us", lose)
"""
TWO_NODES = "import os; os.environ['MPICOMM_HOSTID'] = str(RANK)"


def test_wrong_bytes_are_found_and_ranks_on_two_nodes_are_refused(tmp_path: Path) -> None:
    changes = [(code, SHORT) for code in (CORRUPT, LOSE, TWO_NODES)]
    job, ended = run_changed(tmp_path, 2, "mpicomm.p2p.between_ranks", *changes)
    (corrupted, first), (lost, second), nodes = ended
    assert (job.returncode, first, second, nodes) == (0, 1, 1, ("", 2))
    # One way and with few bytes rank 1 puts in the cells of one row, both ways in the two cells that are measured.
    assert corrupted.splitlines()[-1] == "FAILED: 6 wrong bytes"
    # One way all four cells, both ways two cells with two copies; some bytes are right by chance.
    assert int(lost.split()[-3]) > 0.99 * (4 + 2 * 2) * 100003
    assert job.stderr == (
        "error: the matrices are of mapped memory and need all ranks on one node; these 2 ranks are on 2 nodes: start "
        "them on one\n"
    )


class Part:
    """A symmetric array of two ranks; rank 0 is here."""

    def __init__(self, gpus: Any, shape: int, dtype: Any) -> None:
        self._parts = []
        for owner in range(2):
            with gpus.Device(owner):
                self._parts.append(gpus.own(np.zeros(shape, dtype)))
        self.local = self._parts[0]
        self._gpus = gpus

    def peer(self, rank: int) -> Any:
        return self._parts[rank]

    def put(self, src: Any, peer: int, *, stream: Any) -> None:
        with self._gpus.Device(0):
            self._gpus.memcpyPeerAsync(self.peer(peer).data.ptr, peer, src.data.ptr, 0, src.nbytes, stream.ptr)


@pytest.fixture
def gpus() -> Iterator[Any]:
    pytest.importorskip("cuda.bindings.driver", reason="the driver's names need cuda-bindings")
    from tests.helpers.fakes.fake_gpus import FakeGpus, installed

    gpus = FakeGpus(2)
    gpus.enabled.add((0, 1))  # as mapped memory is
    with installed(gpus):
        yield gpus


def test_a_rank_moves_bytes_of_gpus_and_loads_a_word(gpus: Any) -> None:
    from mpicomm.p2p.between_ranks import BetweenRanks
    from tests.helpers.fakes.fake_gpus import BACK, KERNEL, LINK, LOAD_US

    nbytes, count, met = 1 << 20, 3, []

    def empty(shape: int, dtype: Any) -> Part:
        return Part(gpus, shape, dtype)

    comm: Any = SimpleNamespace(
        device=0, rank=0, size=2, empty=empty, zeros=empty, check=int, barrier=int, bcast=lambda found, root: found
    )
    job = BetweenRanks(comm, argparse.Namespace(bytes=nbytes, iters=count, rounds=1))
    for number, (way, loads) in enumerate(job.ways.items(), start=1):
        source, target = job._data.local, job._window.peer(1)
        if loads:
            source, target = job._data.peer(1), job._window.local
        source[:] = number
        time_us = job.round_us(way, 1, nbytes - 1, count, lambda: met.append(1))
        gb_s = (BACK if loads else LINK) + (KERNEL if "kernels" in way else 0)
        assert time_us == pytest.approx(count * (nbytes - 1) / gb_s * 1e-3)
        assert (target[:-1] == number).all() and target[-1] != number
    assert job.load_us(1, 0) == LOAD_US
    assert job.load_us(0, 1) is None  # rank 1 knows the time
    assert met == [1, 1, 1]
