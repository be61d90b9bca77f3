"""Ranks that die, stop or fail at random lines: `python scripts/soak_deaths.py --trials 1000`, from the project's root.

What a trial is, and what the survivors and the victims that live on have to do, says tests/helpers/peer_death.py.
Prints what happened, and exits with 1 if one of them did anything else. GPUs need time to set up: `--timeout 3`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.helpers.peer_death_jobs import run_jobs

TRIALS_PER_JOB = 50


def main() -> None:
    """Run the trials in as many jobs as they need, and print what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--timeout", type=float, default=0.3)
    parser.add_argument("--step", default="", help="where all victims die, copy_engine say")
    options = parser.parse_args()
    kills = options.ranks - 1
    ways: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    slowest, wrong, seed = 0.0, 0, 0
    while sum(ways.values()) < options.trials:
        with tempfile.TemporaryDirectory(prefix="mpicomm-deaths-") as directory:
            how = (f"--device={options.device}", f"--step={options.step}")
            left = options.trials - sum(ways.values())
            trials = min(TRIALS_PER_JOB, -(-left // options.at_once))
            count = (options.at_once, options.ranks, max(1, trials - kills), kills)
            jobs = run_jobs(Path(directory), *count, *how, timeout_s=options.timeout, first_seed=seed)
        seed += options.at_once
        for job in jobs:
            survivors = [(rank, each) for rank, seen in enumerate(job) for each in seen if each.victim != rank]
            ways.update({each.trial: each.how for _, each in survivors}.values())
            errors.update(each.error.split(":")[0] or "nothing was missing" for _, each in survivors)
            slowest = max([slowest, *(each.seconds for _, each in survivors)])
            for rank, each in ((rank, each) for rank, seen in enumerate(job) for each in seen):
                if each.wrong:
                    wrong += 1
                    sys.stdout.write(f"rank {rank}: {each}\n")
        sys.stdout.write(
            f"{sum(ways.values())} victims {dict(ways)}; survivors got {dict(errors)}, the slowest after {slowest:.2f} "
            f"s with a timeout of {options.timeout:g} s; {wrong} did something else\n"
        )
        sys.stdout.flush()
    sys.exit(bool(wrong))


main()
