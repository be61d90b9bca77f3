"""The kernels under compute-sanitizer, and with ranks that come late."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.gpu import DEVICES
from tests.helpers.jobs.mpiexec import environment, mpiexec_command

PROGRAM = ("-m", "mpi4py", "-m", "tests.helpers.programs.every_kernel")
RANKS = max(2, len(DEVICES))
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
    command = [*launcher, sanitizer, "--tool", tool, "--error-exitcode", "9", *OPTIONS.get(tool, ()), python, *PROGRAM]
    command += ARGUMENTS.get(tool, ())
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("ERROR SUMMARY: 0 errors") + output.count("RACECHECK SUMMARY: 0 hazards") == RANKS, output[
        -4000:
    ]


def test_ranks_that_come_late() -> None:
    command = mpiexec_command(RANKS, *PROGRAM, "--late")
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    sys.stdout.write(result.stdout)
