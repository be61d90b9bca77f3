"""Run jobs of peer_death.py from one process, and read the outcomes of their ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.programs.peer_death import Outcome

TRIAL_LIMIT_S = 3.0  # of one trial in a long row, without the waits of its ranks for each other
WAITS = 3  # of a trial that may each last until the deadline: a collective, and two attempts at `Free`
Seen = list[list[list[Outcome]]]


def run_jobs(
    directory: Path,
    jobs: int,
    ranks: int,
    trials: int,
    kills: int,
    *options: str,
    timeout_s: float = 0.3,
    first_seed: int = 0,
) -> Seen:
    """Run jobs, all at once because they wait most of the time. Return the outcomes by job, rank and trial."""
    running = []
    for seed in range(first_seed, first_seed + jobs):
        results = directory / str(seed)
        results.mkdir()
        own = [f"--trials={trials}", f"--kills={kills}", f"--seed={seed}", f"--timeout={timeout_s}", *options]
        command = mpiexec_command(ranks, "-m", "tests.helpers.programs.peer_death", str(results), *own)
        with (results / "output").open("w") as output:
            variables = {**sharing_of_cores(jobs * ranks), **environment()}
            job = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        running.append((job, results))
    deadline = time.monotonic() + HANG_S + (TRIAL_LIMIT_S + WAITS * timeout_s) * (trials + kills)
    try:
        for job, _ in running:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the error below shows its output
                job.wait(max(0.0, deadline - time.monotonic()))  # its exit status says only that a rank has died
    finally:
        for job, _ in running:
            job.terminate()  # this also ends its ranks
            job.wait()
    for _, results in running:
        if not (results / "done").exists():
            said = [f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(results.iterdir())]
            raise RuntimeError("\n".join(said))
    return [_outcomes(results) for _, results in running]


def _outcomes(results: Path) -> list[list[Outcome]]:
    """Return the outcomes of each rank, in the order of the trials."""
    files = sorted(results.glob("rank-*"), key=lambda path: int(path.name[5:]))
    return [[Outcome(**json.loads(line)) for line in path.read_text().splitlines()] for path in files]
