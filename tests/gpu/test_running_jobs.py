"""The doctor looks at a job whose ranks wait in kernels, and in receives of device arrays, for a rank that is late."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mpicomm.doctor.__main__ import watch
from mpicomm.doctor.running import job_of
from mpicomm.doctor.waits import Line, RankWait
from mpicomm.waiting import wait_until
from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S

LOOK_S = 0.5
RANKS = 2
PROGRAM = """
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
    program.write_text(PROGRAM)
    waits: list[RankWait] = []
    lines: list[Line] = []
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            mpiexec_command(RANKS, str(program), str(tmp_path)),
            env={**sharing_of_cores(RANKS), **environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def somebody_waits() -> bool:
        (seen,) = watch(lambda: [job_of(job.pid)], LOOK_S)
        waits[:], lines[:] = seen.waits(), seen.lines()
        return bool(waits) and waits[0].seconds >= LOOK_S

    try:
        for call in ("Allreduce", "Recv"):
            for rank in range(RANKS):
                there = wait_until((tmp_path / f"{call}-{rank}").exists, HANG_S)
                assert there, (tmp_path / "output").read_text()
            assert wait_until(somebody_waits, HANG_S), call
            late = next(line.pid for line in lines if line.rank == RANKS - 1)
            assert waits[0].pids == (late,)
            said = waits[0].text
            if call == "Allreduce":
                assert said.startswith(
                    "rank 1 is behind: it has made 3 calls of world, the others 4 (Allreduce(float32"
                )
                assert [line.waits_for for line in lines if line.rank == 0] == ["rank 1"]
            else:
                assert said.startswith("rank 0 waits in a receive from rank 1 (tag 5) of world. Rank 1")
            (tmp_path / f"go-{call}").touch()
        assert job.wait(HANG_S) == 0, (tmp_path / "output").read_text()
    finally:
        job.kill()
        job.wait()
