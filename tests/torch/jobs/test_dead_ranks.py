"""A rank dies: the calls of the others raise in time, also those of a training step."""

from __future__ import annotations

import subprocess

import pytest

from mpicomm.waiting import wait_until
from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.jobs.survivors import Call, calls_of
from tests.helpers.programs.torch_lost_ranks import NAMES

RANKS = 3
TIMEOUT_S = 1.0
SLACK_S = 1.5
SURVIVORS = range(RANKS - 1)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Call]]:
    """The results of the calls of each rank that lives on, by name."""
    results = tmp_path_factory.mktemp("results")
    command = mpiexec_command(
        RANKS, "-m", "tests.helpers.programs.torch_lost_ranks", str(results), str(stretched(TIMEOUT_S))
    )
    with (results / "output").open("w") as output:
        job = subprocess.Popen(
            command,
            env={**sharing_of_cores(RANKS), **environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    ends = [results / f"end-{rank}" for rank in SURVIVORS]
    wait_until(lambda: all(end.exists() for end in ends) or job.poll() is not None, HANG_S)
    (results / "done").touch()
    job.wait(HANG_S)
    assert all(end.exists() for end in ends), (results / "output").read_text()[-5000:]
    return [{call.name: call for call in calls_of(results, rank)} for rank in SURVIVORS]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "destroy"])
def test_calls_raise_in_time(calls: list[dict[str, Call]], name: str) -> None:
    for of_rank in calls:
        call = of_rank[name]
        # Autograd passes on the text of another thread's error.
        assert ("RuntimeError" if name == "training" else "CollectiveTimeoutError") in call.errors, call
        assert f"rank {RANKS - 1}" in call.text, call
        call.require_in_time(stretched(TIMEOUT_S), SLACK_S)


def test_a_group_is_destroyed_all_the_same(calls: list[dict[str, Call]]) -> None:
    for of_rank in calls:
        call = of_rank["destroy"]
        assert not call.errors, call
        call.require_in_time(stretched(TIMEOUT_S), SLACK_S)
