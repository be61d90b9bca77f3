"""The long runs, for a short time."""

from __future__ import annotations

import sys

from tests.helpers.jobs.mpiexec import ROOT, run_command, run_job


# test_recorded_results.py makes communicators and registers memory.
def test_nothing_is_wrong_and_nothing_grows() -> None:
    result = run_job(2, "-m", "mpi4py", str(ROOT / "scripts/testing/soak.py"), "--device=cpu", "--seconds=3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all results are right" in result.stdout


def test_damaged_packets_are_refused() -> None:
    result = run_command(sys.executable, "scripts/testing/fuzz.py", "--packets=30000")
    assert result.returncode == 0, result.stderr
