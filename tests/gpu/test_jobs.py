"""Jobs on GPUs: the bench, tune and p2p, compute-sanitizer, the doctor, and ranks that die or come late."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.operations import ALLREDUCE
from mpicomm.doctor.__main__ import sample
from mpicomm.doctor.running import job_of
from mpicomm.doctor.waits import RankWait, TableRow
from mpicomm.waiting import wait_until
from tests.gpu import DEVICES
from tests.helpers.jobs.mpiexec import environment, mpiexec_command, run_job, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.jobs.survivors import calls_of
from tests.helpers.programs.deaths import DEATHS, WAYS, require_named

RANKS = max(2, len(DEVICES))
PEERS = ("nccl", "nccl-symmetric", "torch", "nvshmem", "mpi")
BENCH = ("-m", "mpicomm.bench", "allreduce", "-b", "1K", "-e", "1M", "-f", "32", "-n", "3", "-w", "1")


@pytest.mark.parametrize("how", [("-G", "1"), ("--eager",)])
def test_the_bench_compares_with_what_is_installed(how: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    job = run_job(RANKS, *BENCH, *how, "--compare", ",".join(PEERS), "-J", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    report = json.loads(path.read_text())
    assert {*report["peers"], *report["missing"]} == {*PEERS}
    assert [row["nbytes"] for row in report["results"]] == [1 << 10, 1 << 15, 1 << 20]


# The last case has a name, because pytest-mpi takes "mpi" for its marker and skips the test.
@pytest.mark.parametrize("algorithm", [*names_for(ALLREDUCE), "mpi"], ids="algorithm={}".format)
def test_nothing_is_wrong_with_any_algorithm(algorithm: str) -> None:
    job = run_job(RANKS, *BENCH, "-G", "1", "--algorithm", algorithm)
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr


def test_tune_writes_a_table_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    options = ("-b", "1K", "-e", "64K", "-f", "8", "-n", "3", "--operations", "allreduce,allgather")
    job = run_job(RANKS, "-m", "mpicomm.tune", *options, "--output", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    told = run_job(RANKS, "-m", "mpicomm.info", MPICOMM_TUNING=str(path))
    assert (told.returncode, str(path) in told.stdout) == (0, True), told.stdout + told.stderr


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_p2p_measures_every_pair(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "p2p.json"
    job = run_job(ranks, "-m", "mpicomm.p2p", "-b", "4M", "-n", "2", "-r", "1", "--json", str(path))
    assert (job.returncode, job.stdout.splitlines()[-1]) == (0, "# OK"), job.stdout + job.stderr
    found = json.loads(path.read_text())
    assert all(len(matrix["cells"]) == len(matrix["cells"][0]) == ranks for matrix in found["matrices"])


EVERY_KERNEL = ("-m", "mpi4py", "-m", "tests.helpers.programs.every_kernel")
# The tool sees only the writes of its own process. It takes memory that a peer has written for memory without data.
# Copies, and the kernels of messages that MPI matches, read such memory. All other kernels read memory of their own
# process. To look at copies, the tool also lets each copy wait for all earlier work. Two ranks whose copies wait for
# each other's work would wait for ever.
OPTIONS = {"initcheck": ("--check-api-memory-access", "no")}
# synccheck calls lanes divergent that come to a `barrier` one by one, which PTX allows without `.aligned`. The lanes
# of a row do so, because some have no data in the last step of a row.
ARGUMENTS = {"initcheck": ("--own-memory",), "synccheck": ("--whole-warps",)}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer", path="/usr/local/cuda/bin") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("there is no compute-sanitizer")
    *launcher, python = mpiexec_command(RANKS)  # relays need three
    command = [
        *launcher,
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        *OPTIONS.get(tool, ()),
        python,
        *EVERY_KERNEL,
    ]
    command += ARGUMENTS.get(tool, ())
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("ERROR SUMMARY: 0 errors") + output.count("RACECHECK SUMMARY: 0 hazards") == RANKS, output[
        -4000:
    ]


def test_ranks_that_come_late() -> None:
    command = mpiexec_command(RANKS, *EVERY_KERNEL, "--late")
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    sys.stdout.write(result.stdout)


LOOK_S = 0.5
WATCHED = 2
LATE_PROGRAM = """
import sys, time
from pathlib import Path
import cupy
import mpicomm

folder = Path(sys.argv[1])
comm = mpicomm.Communicator(timeout_s=60)
mine, ours = cupy.ones(1000, "f4"), cupy.empty(1000, "f4")
is_late = comm.rank == comm.size - 1

def come_to(call):
    (folder / f"{call}-{comm.rank}").touch()
    while is_late and not (folder / f"go-{call}").exists():
        time.sleep(0.02)

for _ in range(3):
    comm.Allreduce(mine, ours)
comm.check()
come_to("Allreduce")
comm.Allreduce(mine, ours)
comm.check()  # it waits for the stream, and so for the kernel that waits for the late rank
come_to("Recv")
if is_late:
    comm.Send(mine, 0, tag=5)
elif comm.rank == 0:
    comm.Recv(ours, comm.size - 1, tag=5)
comm.check()
comm.Free()
"""


def test_the_doctor_names_the_late_rank_of_a_job_on_gpus(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LATE_PROGRAM)
    waits: list[RankWait] = []
    rows: list[TableRow] = []
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            mpiexec_command(WATCHED, str(program), str(tmp_path)),
            env={**sharing_of_cores(WATCHED), **environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def somebody_waits() -> bool:
        (report,) = sample(lambda: [job_of(job.pid)], LOOK_S)
        waits[:], rows[:] = report.waits(), report.rows()
        return bool(waits) and waits[0].seconds >= LOOK_S

    try:
        for call in ("Allreduce", "Recv"):
            for rank in range(WATCHED):
                there = wait_until((tmp_path / f"{call}-{rank}").exists, HANG_S)
                assert there, (tmp_path / "output").read_text()
            assert wait_until(somebody_waits, HANG_S), call
            late = next(row.pid for row in rows if row.rank == WATCHED - 1)
            assert waits[0].pids == (late,)
            said = waits[0].text
            if call == "Allreduce":
                assert said.startswith(
                    "rank 1 is behind: it has made 3 calls of world, the others 4 (Allreduce(float32"
                )
                assert [row.waits_for for row in rows if row.rank == 0] == ["rank 1"]
            else:
                assert said.startswith("rank 0 waits in a receive from rank 1 (tag 5) of world. Rank 1")
            (tmp_path / f"go-{call}").touch()
        assert job.wait(HANG_S) == 0, (tmp_path / "output").read_text()
    finally:
        job.kill()
        job.wait()


TIMEOUT_S = 2.0


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivor_of_a_product_names_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 2, "cuda", kind, how, TIMEOUT_S)
    assert int((tmp_path / "products-0").read_text()) > 1, "the call does not overlap"


@pytest.mark.parametrize("how", WAYS)
def test_survivor_goes_on_at_other_locks_and_names_the_rank_that_died(tmp_path: Path, how: str) -> None:
    job = run_job(2, "-m", "tests.helpers.programs.deaths", str(tmp_path), "lock", how, str(TIMEOUT_S))
    assert (tmp_path / "done").exists(), job.stdout + job.stderr
    words = "has its turn to take the lock first" if how == "waiting" else "holds the lock"
    *others, last = calls_of(tmp_path, 0)
    assert not any(call.errors for call in others), others
    last.require_missing(TIMEOUT_S, 1, f"Win.Lock: rank 1 {words}")
