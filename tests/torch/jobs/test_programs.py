"""Programs that use PyTorch, scikit-learn or matplotlib: the backend, examples, documents, and scripts that measure."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path

import pytest
import torch

from mpicomm.bench.operations import IN_PLACE, OPERATIONS, OUT_OF_PLACE
from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import ROOT, environment, run_job
from tests.helpers.programs.document_programs import programs, require_programs_run

sys.path.append(str(ROOT / "scripts/measuring"))
from varied_arrays import Pools

WITHOUT_CUDA_AND_INTERNALS = """
import atexit, sys, threading, time

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "cupy", "cupyx", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

del torch._jit_internal._extract_tensors, c10d._register_work, c10d.Reducer._set_forward_pass_work_handle
"""
AS_BACKEND_ALONE = """
import os
from mpi4py import MPI

world = MPI.COMM_WORLD
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(world.size)
# The first rank listens on a port that the system chooses. PyTorch's own store in the same process shares the port.
held = None
if world.rank == 0:
    held = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False, multi_tenant=True)
os.environ["MASTER_PORT"] = str(world.bcast(held and held.port))
assert "mpicomm" not in sys.modules
dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
if world.rank == 0:
    print(dist.get_backend(), total.tolist())
dist.destroy_process_group()
for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
"""
IMPORTED = """
import mpicomm.torch
from mpicomm.torch.works import MessageWork

dist.init_process_group("mpicomm")
total = torch.ones(3)
dist.all_reduce(total)
product = mpicomm.torch.matmul_allreduce(torch.ones(2, 2), torch.ones(2, 2))
if dist.get_rank() == 0:
    print(dist.get_backend(), total.tolist(), product.tolist())
"""
DROPS_WORKS_AT_THE_END = """
over, main, has_ended = MessageWork.is_completed, threading.current_thread(), threading.Event()

def held(work):  # until the program ends, when the thread drops all works at once
    done = over(work)
    if done and threading.current_thread() is not main:
        has_ended.wait()
    return done

MessageWork.is_completed = MessageWork.advance = held
peer = 1 - dist.get_rank()
works = [call(torch.ones(3), peer) for _ in range(1000) for call in (dist.isend, dist.irecv)]
for work in works:
    work.wait()
del works, work
dist.destroy_process_group()

def end():
    has_ended.set()
    time.sleep(1e-4)

atexit.register(end)
"""


GROUP = "torch.distributed.backends"


# One job has all, because each process takes seconds to import PyTorch.
def test_the_backend_works_by_its_name_without_cuda_and_internals_and_ends_while_a_thread_drops_works(
    tmp_path: Path,
) -> None:
    expected = "mpicomm [2.0, 2.0, 2.0] [[4.0, 4.0], [4.0, 4.0]]\n"
    program, own = WITHOUT_CUDA_AND_INTERNALS, {}
    # Older versions of PyTorch have no entry points of backends: a program imports mpicomm.torch.
    if any(each.value.startswith("torch.") for each in entry_points(group=GROUP)):
        # The metadata that an installation of this checkout has, also if another one, or none, is installed.
        project = (ROOT / "pyproject.toml").read_text()
        (entry,) = re.findall(rf'^\[project\.entry-points\."{GROUP}"\]\n(.+)$', project, re.M)
        metadata = tmp_path / "mpicomm-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mpicomm\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n".replace('"', ""))
        program, own = program + AS_BACKEND_ALONE, {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MASTER_ADDR": "127.0.0.1"}
        expected = "mpicomm [2.0, 2.0, 2.0]\n" + expected
    program += IMPORTED + DROPS_WORKS_AT_THE_END
    result = run_job(2, "-c", program, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", **own)
    assert (result.returncode, result.stdout) == (0, expected), result.stdout + result.stderr


CALLS = 12
CULPRIT = 7


def pools_of(name: str, place: str) -> list[Pools]:
    found = [Pools(OPERATIONS[name], place, 1 << 10, CALLS, rank, 2) for rank in range(2)]
    for pools in found:
        pools.put(torch.device("cpu"))
    return found


def gather(ranks: list[Pools], calls: Iterable[int], fault: str = "") -> None:
    """Carry out calls of Allgatherv; rank 1 has the fault in one of them."""
    for call in calls:
        sent = [pools.tensors(call).send.clone() for pools in ranks]
        for rank, pools in enumerate(ranks):
            found = fault if (rank, call) == (1, CULPRIT) else ""
            receive, result = pools.tensors(call).receive, torch.cat(sent)
            if found == "where the last call received":
                receive = pools.tensors(call - 1).receive
            if found == "what the last call sent":
                result = torch.cat([pools.tensors(call - 1).send for pools in ranks])
            length = min(len(receive), len(result)) - (found == "too little")
            receive[:length] = result[:length]
            if found == "too much":
                receive.as_strided((len(receive) + 1,), (1,), receive.storage_offset())[-1] = 7


def test_right_calls_are_right_and_each_leaves_something() -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]
    gather(ranks, range(CALLS))
    assert [pools.count_wrong(range(CALLS)) for pools in ranks] == [0, 0]
    assert all(
        pools.count_wrong(chain(range(call), range(call + 1, CALLS))) for pools in ranks for call in range(CALLS)
    )
    for pools in ranks:
        pools.reset()
    assert [pools.count_wrong([]) for pools in ranks] == [0, 0]


@pytest.mark.parametrize("fault", ["where the last call received", "what the last call sent", "too little", "too much"])
def test_a_fault_in_one_call_of_one_rank_is_found_there(fault: str) -> None:
    ranks = pools_of("allgatherv", OUT_OF_PLACE)
    gather(ranks, range(CALLS), fault)
    clean, faulty = (pools.count_wrong(range(CALLS)) for pools in ranks)
    assert clean == 0 and faulty > 0


def test_sums_in_place_of_a_second_call_are_found() -> None:
    ranks = pools_of("allreduce", IN_PLACE)
    assert not ranks[0].repeatable and pools_of("bcast", IN_PLACE)[0].repeatable
    for again in (False, True):
        total = ranks[0].tensors(3).send + ranks[1].tensors(3).send
        for pools in ranks:
            pools.tensors(3).send.copy_(total)
            assert (pools.count_wrong([3]) > 0) == again


EXAMPLES = ROOT / "examples"
TRAIN, SPREAD, EXPERTS = (EXAMPLES / f"{name}.py" for name in ("train_torch", "tensor_parallel", "experts"))
RANKS = 3  # it divides no power of two, and 8 experts not evenly
ON_HOST = {"MPICOMM_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
DEVICES = {"cpu": ON_HOST, "cuda": {}} if torch.cuda.is_available() else {"cpu": ON_HOST}

Programs = dict[str, Sequence[str | Path]]

CAUGHT = """
import runpy, sys
import torch.distributed as dist
try:
    runpy.run_path({program!r}, run_name="__main__")
except (AssertionError, ValueError) as error:
    print(error)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1)
"""
"""A program with an error that all ranks raise, and that must not end the job."""

DRAWING = ("producer_consumers", "pipeline", "fft_transpose", "jacobi")
ALL_SAMPLES = rf"{RANKS} ranks.*: \d+ samples/s, loss ([0-9.]+), ([0-9.]+)% read right\n"
DIFFERENCE = r"losses of one rank differ by at most \S+; {} is allowed\n"
READ = rf"{RANKS} ranks trained 8 experts in 60 steps, and read \d\d.\d% of new digits\n"
SAID = {
    **dict.fromkeys(("comm", "ddp", "fsdp"), ALL_SAMPLES + DIFFERENCE.format("1e-04")),
    "fp8": ALL_SAMPLES + DIFFERENCE.format("2e-02"),
    "layers": rf"{RANKS} ranks, {100 // RANKS}% of the parameters on each: .* us, the results of one rank\n",
    **dict.fromkeys(("experts", "experts of PyTorch"), READ + r"the losses differ by at most \S+; 1e-\d+ is allowed\n"),
    "numpy": ALL_SAMPLES + DIFFERENCE.format("1e-09"),
    **dict.fromkeys(DRAWING, "(.*\n)*"),
}
"""What each program says."""


def train(program: Path, mode: str, *words: str) -> tuple[str | Path, ...]:
    return program, "--mode", mode, "--epochs=3", "--check", *words


def spoilt(folder: Path, name: str, program: Path, line: str, wrong: str) -> Path:
    """Return a copy of a program with ``wrong`` in place of a line or a part of it."""
    source, copy = program.read_text(), folder / f"spoilt_{name}.py"
    assert source.count(line) == 1
    copy.write_text(source.replace(line, wrong))
    return copy


PARTIAL = '"2": RowwiseParallel(output_layouts=__import__("torch").distributed.tensor.Partial())'
SPOILT: dict[str, tuple[Path, str, str]] = {
    "ddp": (TRAIN, "model = DistributedDataParallel(model)", "pass"),
    "numpy": (
        EXAMPLES / "train_cupy.py",
        "comm.Iallreduce(MPI.IN_PLACE, gradient)\n",
        "MPI.Request(MPI.REQUEST_NULL)\n",
    ),
    "weights": (EXPERTS, "back.weights[rows, None]", "1"),
    "bias": (SPREAD, "columns.t(), bias)", "columns.t(), bias * 0)"),
    "sum": (SPREAD, '"2": RowwiseParallel()', PARTIAL),
}
"""Gradients that no rank averages, derivatives of other weights, and layers without a bias or the sum of parts."""


def caught(folder: Path, name: str, program: Path) -> Path:
    """Return a program that ends with the code 1 if the other one raises an error on all ranks."""
    catching = folder / f"{name}_caught.py"
    catching.write_text(CAUGHT.format(program=str(program)))
    return catching


CHOSEN = [program for program in programs() if program.needs == {"torch"}]
BACKENDS, ISSUE = (ROOT / f"scripts/measuring/measure_{name}.py" for name in ("torch", "issue"))
SHORT = ("--kib=4", "--calls=5")
ONLY = "--only=Allgatherv,Iallreduce,persistent,all_to_all_single"
STALE = f"""
import runpy, sys
import numpy as np
import mpicomm
from tests.helpers.jobs.in_turn import patch
last, number = None, 0
def stale(self, send, receive, *rest, **options):
    global last, number
    number += 1
    given = np.lib.stride_tricks.as_strided(last, send.shape) if number == 70 else send  # 45 calls are known
    last = send
    allreduce(self, given, receive, *rest, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", stale)
sys.path.insert(0, {str(ISSUE.parent)!r})
runpy.run_path({str(ISSUE)!r}, run_name="__main__")
"""
"""The script of the host's time; a new call reads where the last one read."""


def of_all_devices(folder: Path) -> Programs:
    def drawing(name: str) -> str:
        return f"--plot={folder / name}.svg"

    return {
        **{mode: train(TRAIN, mode, drawing(mode)) for mode in ("comm", "ddp", "fsdp")},
        "fp8": train(TRAIN, "ddp", "--wire-dtype", "float8_e4m3fn"),
        "layers": (SPREAD,),
        "experts": (EXPERTS, drawing("experts")),
        "experts of PyTorch": (EXPERTS, "--torch"),
    }


def of_the_host(folder: Path) -> Programs:
    # CuPy's programs run with NumPy there.
    given: Programs = {name: (EXAMPLES / f"{name}.py", f"--plot={folder / name}.svg") for name in DRAWING}
    given["numpy"] = (EXAMPLES / "train_cupy.py", f"--plot={folder / 'numpy'}.svg", "--epochs=3")
    for name, changed in SPOILT.items():
        program = spoilt(folder, name, *changed)
        if changed[0] == TRAIN:
            given[f"spoilt {name}"] = train(program, name)
        elif changed[0] == SPREAD:
            given[f"spoilt {name}"] = (caught(folder, name, program),)
        else:
            given[f"spoilt {name}"] = (program, "--epochs=1") if name == "numpy" else (program,)
    results = folder / "scripts/results"
    given["backends"] = (BACKENDS, "--kib=4", "--rounds=1", f"--json={results / 'torch-here.json'}")
    given["issue"] = (ISSUE, *SHORT, ONLY, f"--json={results / 'issue-here.json'}")
    stale = folder / "stale.py"
    stale.write_text(STALE)
    given["stale"] = (caught(folder, "stale", stale), *SHORT, "--only=`Allreduce`")
    return given


@dataclass(frozen=True)
class Job:
    folder: Path
    given: Programs
    ended: dict[str, tuple[str, int]]
    """The output and the exit code of each program."""


@pytest.fixture(scope="module", params=DEVICES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder: Path = tmp_path_factory.mktemp("job")
    shutil.copytree(ROOT / "scripts/results", folder / "scripts/results")
    given = of_all_devices(folder) | (of_the_host(folder) if request.param == "cpu" else {})
    ended, errors = run_named(RANKS, given, **DEVICES[request.param])
    # Tests let ranks share a GPU, of which mpicomm warns.
    assert not [line for line in errors.splitlines() if request.param == "cpu" or "share" not in line], errors
    return Job(folder, given, ended)


@pytest.fixture
def host_job(job: Job) -> Job:
    if "stale" not in job.given:
        pytest.skip("a program of the host")
    return job


def test_ranks_compute_and_train_as_one_rank_does(job: Job) -> None:
    for name in SAID.keys() & job.given.keys():
        said, code = job.ended[name]
        found = re.fullmatch(SAID[name], said)
        assert found and code == 0, (name, code, said)
        if "samples/s" in said:
            loss, right = map(float, found.groups())
            most = 1.0 if name == "numpy" else 2.1
            assert loss < most and right > 70, f"{name} learns nothing: guesses have a loss of 2.3 and 10 %"
    drawn = {name for name, words in job.given.items() if any("--plot" in str(word) for word in words)}
    assert {name for name in drawn if "<svg" in (job.folder / f"{name}.svg").read_text()} == drawn


def test_results_that_differ_from_one_ranks_results_are_found(host_job: Job) -> None:
    for name in SPOILT:
        said, code = host_job.ended[f"spoilt {name}"]
        text = "Tensor-likes are not close" if name in ("bias", "sum") else " is allowed\n"
        assert code == 1 and text in said, (name, code, said)


# In a job of their own: PyTorch warns of some of their calls.
@pytest.mark.parametrize("device", DEVICES)
def test_programs_of_documents_run(device: str) -> None:
    require_programs_run(2, CHOSEN, **DEVICES[device])


def test_files_and_tables_of_scripts_that_measure_have_the_rows_of_both_backends(host_job: Job) -> None:
    (_, code), (output, issue_code) = host_job.ended["backends"], host_job.ended["issue"]
    assert (code, issue_code) == (0, 0)
    shutil.copy(ROOT / "README.md", host_job.folder)
    subprocess.run([sys.executable, "scripts/results/tables.py"], cwd=host_job.folder, env=environment(), check=True)
    results = host_job.folder / "scripts/results"
    tables = (results / "README.md").read_text()
    assert "[issue-here.json](issue-here.json)" in tables and "[torch-here.json](torch-here.json)" in tables
    calls, training = json.loads((results / "torch-here.json").read_text())
    assert [row[0] for row in calls["rows"]] == ["4 KiB"] and all(value > 0 for value in calls["rows"][0][1:])
    assert [row[0] for row in training["rows"]][:2] == ["gloo", "mpicomm"] and "torch" in calls["versions"]
    document = json.loads((results / "issue-here.json").read_text())
    assert document["columns"] == [
        "call", "known: mpicomm, us", "known: gloo, us", "new: mpicomm, us", "new: gloo, us",
    ]  # fmt: skip
    rows = {name: times for name, *times in document["rows"]}
    assert len(rows) == len(document["rows"]) == 8
    assert output.count("\n") == 9
    for name, (known, known_peer, new, new_peer) in rows.items():
        assert known > 0
        assert (new is None) == name.startswith("persistent")
        assert (known_peer is not None) == name.startswith("`dist."), name
        assert (new_peer is not None) == name.startswith("`dist."), name


def test_a_new_call_that_reads_where_the_last_one_read_ends_the_run(host_job: Job) -> None:
    said, code = host_job.ended["stale"]
    assert code == 1 and "allreduce left " in said, (code, said)
