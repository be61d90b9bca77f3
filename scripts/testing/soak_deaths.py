"""Ranks that die, stop or fail at random lines.

Run `python scripts/testing/soak_deaths.py --trials 1000`, from the project's root.

tests/helpers/programs/peer_death.py describes a trial, and the duties of the survivors and of the victims that live on.
The script prints the victims and the survivors' errors, and exits with 1 if a rank fails one of its duties. Pass
`--timeout 3` on GPUs, because they need time to set up. ``--json FILE`` adds a row to a result file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.helpers.jobs.peer_death_jobs import run_jobs

TRIALS_PER_JOB = 50


def main() -> None:
    """Run the trials in as many jobs as they need, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--timeout", type=float, default=0.3)
    parser.add_argument("--step", default="", help="the step in which all victims die, as copy_engine")
    parser.add_argument("--hosts", type=int, default=1, help="the hosts that the ranks claim to be on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kills = options.ranks - 1
    ways: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    slowest, wrong, seed = 0.0, 0, 0
    while sum(ways.values()) < options.trials:
        with tempfile.TemporaryDirectory(prefix="mpicomm-deaths-") as directory:
            how = (f"--device={options.device}", f"--step={options.step}", f"--hosts={options.hosts}")
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
            f"s with a timeout of {options.timeout:g} s; {wrong} ranks failed a duty\n"
        )
        sys.stdout.flush()
    if options.json is not None and not wrong:
        record(options, sum(ways.values()), slowest)
    sys.exit(bool(wrong))


def record(options: argparse.Namespace, victims: int, slowest: float) -> None:
    """Add the row of a run to a result file."""
    # Imported here, because this import starts MPI in this process, and the jobs above must not inherit it.
    sys.path.append(str(Path(__file__).parents[1] / "measuring"))
    from result_file import LONG_RUNS, Table, add_tables, hardware, today

    from mpicomm.devices.cuda.driver import visible_devices
    from mpicomm.errors import BackendUnavailableError

    gpus = []
    if options.device != "cpu":
        with contextlib.suppress(BackendUnavailableError):
            gpus = visible_devices()[: options.ranks]
    ranks = [{"device_uuid": each.uuid, "device_name": each.name, "links": [], "node": 0} for each in gpus]
    where = f" in {options.step}" if options.step else ""
    what = (
        f"ranks that stop, raise, are interrupted, exit or are killed at random lines{where}; {options.ranks} ranks, "
        f"`timeout_s` {options.timeout:g}"
    )
    outcome = (
        f"survivors raised after at most {slowest:.2f} s; they and the victims that lived on released all resources of "
        "the communicator; other communicators worked"
    )
    title = "Long runs on GPUs" if gpus else "Long runs on the host"
    row = [what, today(), f"{victims:,}", outcome]
    add_tables(options.json, [Table("Reliability", title, hardware(ranks), LONG_RUNS, [row])])


main()
