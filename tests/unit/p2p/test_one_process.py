"""``python -m mpicomm.p2p`` in one process: on simulated GPUs, and without GPUs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="the driver's names need cuda-bindings")

from tests.helpers.fakes.fake_gpus import (
    BACK,
    COPY_US,
    HOST,
    KERNEL,
    LINK,
    LOAD_US,
    OWN,
    FakeGpus,
    installed,
)
from tests.helpers.jobs.mpiexec import run_command

NBYTES = 40 << 20
Command = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run the command on simulated GPUs; return the exit status, the text, and the JSON file."""

    def run(gpus: FakeGpus, *options: str, nbytes: int = 100_003) -> tuple[int, str, dict[str, Any]]:
        file = tmp_path / "p2p.json"
        arguments = ["-b", str(nbytes), "-n", "2", "-r", "1", "--json", str(file), *options]
        monkeypatch.setattr(sys, "argv", ["p2p", *arguments])
        with installed(gpus), pytest.raises(SystemExit) as ended:
            importlib.import_module("mpicomm.p2p.__main__").main()
        assert not gpus.enabled  # access is off again
        return int(ended.value.code or 0), capfd.readouterr().out, json.loads(file.read_text())

    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    return run


def cells(found: dict[str, Any], title: str) -> list[list[Any]]:
    (matrix,) = (each for each in found["matrices"] if each["title"] == title)
    rows: list[list[Any]] = matrix["cells"]
    return rows


def test_bandwidths_and_latencies_of_two_gpus(command: Command) -> None:
    status, text, found = command(FakeGpus(2), nbytes=NBYTES)
    assert (status, text.splitlines()[-1]) == (0, "OK")
    assert (found["ok"], found["wrong"], found["gpus"][1]["pci"]) == (True, 0, "0000:01:00.0")

    def close_to(within: float, there: float, back: float) -> Any:
        return [[pytest.approx(each, rel=0.01) for each in row] for row in ((within, there), (back, within))]

    for way, more in (("copy engines", 0.0), ("kernels that store", KERNEL), ("kernels that load", KERNEL)):
        own, there, back = OWN + more, LINK + more, BACK + more
        assert cells(found, f"Bandwidth, one way, {way}") == close_to(own, there, back)
        # The slower direction ends last.
        assert cells(found, f"Bandwidth, both ways, {way}") == both_ways(2 * back)
    through_host = "copy engines through host memory"
    assert cells(found, f"Bandwidth, one way, {through_host}") == close_to(OWN, HOST, HOST)
    assert cells(found, f"Bandwidth, both ways, {through_host}") == both_ways(2 * HOST)
    for way in ("copy engines", through_host):
        assert cells(found, f"Latency, {way} of 16 bytes") == close_to(*[COPY_US] * 3)
    assert cells(found, "Latency, a kernel's load") == close_to(*[LOAD_US] * 3)
    assert len(found["matrices"]) == 4 + 8 + 3


def both_ways(gb_s: float) -> Any:
    cell = pytest.approx(gb_s, rel=0.01)
    return [[None, cell], [cell, None]]


def test_links(command: Command) -> None:
    _, text, found = command(FakeGpus(3, apart=(0, 1)))
    own = "same device"
    assert cells(found, "path to memory") == [[own, "PCIe", "PCIe"], ["PCIe", own, "PCIe"], ["PCIe", "PCIe", own]]
    assert cells(found, "peer access") == [[True, False, True], [False, True, True], [True, True, True]]
    assert cells(found, "performance rank (0 is the fastest)") == [[None, 0, 1], [0, None, 0], [1, 0, None]]
    assert cells(found, "native atomics") == [[True, False, False], [False, True, False], [False, False, True]]
    assert "│ 0          │ yes │  no │ yes │" in text


def test_gpus_without_peer_access_are_measured_through_the_host(command: Command) -> None:
    status, _, found = command(FakeGpus(3, apart=(0, 1)))
    assert status == 0
    for matrix in found["matrices"][4:]:
        missing = {(a, b) for a, row in enumerate(matrix["cells"]) for b, cell in enumerate(row) if cell is None}
        apart = set() if "through host memory" in matrix["title"] else {(0, 1), (1, 0)}
        assert missing == apart | ({(n, n) for n in range(3)} if "both ways" in matrix["title"] else set())


def test_one_gpu(command: Command) -> None:
    status, _, found = command(FakeGpus(1))
    assert status == 0 and not any("both ways" in matrix["title"] for matrix in found["matrices"])
    assert all(len(matrix["cells"]) == len(matrix["cells"][0]) == 1 for matrix in found["matrices"])
    assert all(matrix["cells"] != [[None]] for matrix in found["matrices"])


@pytest.mark.parametrize("fault", ["corrupts", "loses"])
@pytest.mark.parametrize("kind", ["engine", "kernel"])
def test_copies_that_do_wrong_or_nothing_are_found(command: Command, fault: str, kind: str) -> None:
    gpus = FakeGpus(2)
    setattr(gpus, fault, kind)
    status, text, found = command(gpus)
    assert (status, found["ok"]) == (1, False)
    assert text.splitlines()[-1] == f"FAILED: {found['wrong']} wrong bytes"


@pytest.mark.parametrize("option", [("--device", "cpu"), ("--handle", "ipc")])
def test_options_of_ranks_are_refused(option: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = alone(*option)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr.startswith(f"error: {option[0]} is for ranks: start them with mpirun -np N")


def alone(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_command(sys.executable, "-m", "mpicomm.p2p", *options, **variables)


def test_without_a_gpu_it_says_so_and_starts_no_mpi(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    # An MPI that mpi4py does not find, and no GPU of this machine.
    job = alone("--json", str(file), MPI4PY_MPIABI="none", CUDA_VISIBLE_DEVICES="")
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("no GPU to measure on ")
    found = json.loads(file.read_text())
    assert (found["gpus"], found["matrices"], found["ok"]) == ([], [], True)
    assert "MPI" not in found["versions"] and found["versions"]["mpi4py"]


def test_help() -> None:
    job = alone("--help", **{name: "1" for name in ("PMI_SIZE",) if name not in os.environ})
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith("usage: python -m mpicomm.p2p ")
