"""Unmodified programs find the data of a blocking call on every stream when the call has returned."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tests.helpers.programs
from tests.helpers.jobs.mpiexec import run_job

LIBRARIES = [name for name in ("cupy", "torch") if importlib.util.find_spec(name)]
PROGRAM = str(Path(tests.helpers.programs.__file__).with_name("complete_on_return.py"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_blocking_call_is_complete_on_return(library: str) -> None:
    result = run_job(2, "-m", "mpicomm", PROGRAM, library)
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(2):
        assert f"rank {rank} saw old data after []\nrank {rank} done" in result.stdout, result.stdout + result.stderr


def test_calls_in_stream_order_return_before() -> None:
    """So the test above can fail."""
    result = run_job(2, "-m", "mpicomm", "--stream-order", PROGRAM, "cupy")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'Allreduce'" in result.stdout and "'Sendrecv'" in result.stdout and "'put'" in result.stdout, result.stdout
