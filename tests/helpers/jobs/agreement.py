"""A pytest plugin for runs in which every MPI rank is a pytest process (see run_ranks.py)."""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.helpers.jobs.pace import HANG_S, measured, set_pace

# Collection and the end of a session have no test, hence no time limit of pytest-timeout's.
# mpiexec ends every rank as soon as one has exited: the stacks have to be written before pytest-timeout exits.
STACKS_BEFORE_TIMEOUT_S = 1.0
_BEGINNING = 2000
_LETTER = np.dtype([("nbytes", np.int64), ("begin", np.void, _BEGINNING)])


@dataclass(frozen=True)
class Outcome:
    """The outcome of one phase (setup, call or teardown) of one test on one rank."""

    phase: str
    outcome: str
    stopped: float
    text: str
    sections: list[tuple[str, str]]


def agreed_error(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome that all ranks report: the first failure of a rank, or the common outcome."""
    size = len(outcomes)
    failed = [rank for rank in range(size) if outcomes[rank].outcome == "failed"]
    if failed:
        # Ranks that waited for the failed rank often fail later, because of a timeout. The first failure shows the
        # cause.
        first = min(failed, key=lambda rank: outcomes[rank].stopped)
        ranks = ", ".join(map(str, failed))
        text = f"failed on ranks [{ranks}] of {size}; first on rank {first}:\n\n{outcomes[first].text}"
        return Outcome(outcomes[first].phase, "failed", outcomes[first].stopped, text, outcomes[first].sections)
    if len({(each.phase, each.outcome) for each in outcomes}) > 1:
        lines = [f"rank {rank}: {each.phase}: {each.outcome} {each.text}" for rank, each in enumerate(outcomes)]
        return Outcome(outcomes[0].phase, "failed", outcomes[0].stopped, "\n".join(["ranks disagree", *lines]), [])
    return outcomes[0]


class RankAgreement:
    """Makes every rank report the same outcome for every test, and only rank 0 print it.

    A rank writes its exit status into the file ``rank-<r>`` of ``results``, and what it does into ``place-<r>``. The
    file ``last-words-<r>`` gets the news that the rank could not tell the others. These are the stacks of a test that
    hangs, a crash, or a failure while others do not arrive.
    """

    def __init__(self, config: pytest.Config, results: Path) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._status_file = results / f"rank-{self._comm.rank}"
        self._place_file = results / f"place-{self._comm.rank}"
        self._stand("at the collection of the tests")
        self._last_words = os.open(results / f"last-words-{self._comm.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._collection_errors: list[str] = []
        # pytest's own plugin is off (run_ranks.py): it cancels the watchdog whenever a test fails.
        faulthandler.enable(self._last_words)
        self._end_session_in(HANG_S)
        if self._comm.rank != 0:
            reporter: Any = config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(type(reporter)(config, io.StringIO()), "terminalreporter")
            config.option.results = None  # an option of part_results.py: ranks cannot write one file

    def allgather(self, value: object) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        mine = pickle.dumps(value)
        # The ranks exchange the beginning first, because it nearly always is the whole outcome. Each meeting takes
        # long, and a test has three.
        letter = np.array((len(mine), mine[:_BEGINNING]), _LETTER)
        letters = np.empty(self._comm.size, _LETTER)
        _wait(self._comm.Iallgather([letter, MPI.BYTE], [letters, MPI.BYTE]))
        rests = np.maximum(letters["nbytes"] - _BEGINNING, 0)
        everyone = np.empty(rests.sum(), np.uint8)
        if everyone.size:
            rest = np.frombuffer(mine[_BEGINNING:], np.uint8)
            _wait(self._comm.Iallgatherv(rest, [everyone, rests, MPI.BYTE]))
        parts = np.split(everyone, np.cumsum(rests)[:-1])
        # Zeros follow short outcomes, and unpickling does not come to them.
        begins = [bytes(each["begin"]) for each in letters]
        return [pickle.loads(begin + part.tobytes()) for begin, part in zip(begins, parts, strict=True)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = (self._collection_errors, [item.nodeid for item in session.items])
        everyone = self.allgather(mine)
        if any(each != mine for each in everyone):
            lines = [
                f"rank {rank}: {len(nodeids)} tests\n" + "\n".join(errors)
                for rank, (errors, nodeids) in enumerate(everyone)
            ]
            pytest.exit("\n".join(["ranks collected different tests", *lines]), returncode=1)
        faulthandler.cancel_dump_traceback_later()

    def _stand(self, place: str) -> None:
        self._place_file.write_text(f"(process {os.getpid()}) was {place}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._stand(f"in {nodeid}")

    def pytest_timeout_set_timer(self, settings: Any) -> None:
        # Returns None: pytest-timeout goes on to set its own timer, which ends the process.
        delay = max(settings.timeout - STACKS_BEFORE_TIMEOUT_S, settings.timeout / 2)
        faulthandler.dump_traceback_later(delay, file=self._last_words)

    def pytest_timeout_cancel_timer(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mine = Outcome(
            f"{item.nodeid} {call.when}", report.outcome, call.stop, report.longreprtext, list(report.sections)
        )
        if report.failed:
            os.write(self._last_words, f"{mine.phase} failed:\n{mine.text}\n".encode())
        self._stand(f"waiting for the other ranks after {mine.phase}, which {mine.outcome}")
        agreed = agreed_error(self.allgather(mine))
        self._stand(f"in {item.nodeid}, after its {call.when}")
        os.ftruncate(self._last_words, 0)
        if agreed.outcome == "failed":
            report.outcome = "failed"
            report.longrepr = agreed.text
            report.sections = agreed.sections
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status_file.write_text(f"{int(exitstatus)}\n")
        self._end_session_in(HANG_S)

    def pytest_unconfigure(self) -> None:
        # A rank that exits with a status other than 0 aborts the others: rank 0 has to have printed its report.
        sys.stdout.flush()
        self.allgather(None)
        self._comm.Free()

    def _end_session_in(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._last_words)


AGREEMENT = pytest.StashKey[RankAgreement]()
DEVICES = pytest.StashKey[list[str]]()
ALONE = {"gpu_alone": "cuda", "host_alone": "cpu"}


def parametrize_devices(metafunc: pytest.Metafunc, has_gpu: Callable[[], bool]) -> None:
    """Run a test on each device that every rank has, or on one by its marker; collective at the first call."""
    stash = metafunc.config.stash
    if DEVICES not in stash:
        mine = has_gpu()
        everyone = stash[AGREEMENT].allgather(mine) if AGREEMENT in stash else [mine]
        stash[DEVICES] = ["cpu", "cuda"] if all(everyone) else ["cpu"]
    devices = stash[DEVICES]
    alone = [ALONE[mark.name] for mark in metafunc.definition.iter_markers() if mark.name in ALONE]
    # The marker of a test comes before the marker of its file.
    metafunc.parametrize("device", alone[:1] or devices, indirect=True)


def require_device(request: pytest.FixtureRequest) -> str:
    """Return the device of a test, or skip the test if a rank lacks it."""
    if request.param not in request.config.stash[DEVICES]:
        pytest.skip("not every rank has a GPU")
    return str(request.param)


def agree(config: pytest.Config) -> None:
    """Let the ranks of this run agree; called in ``pytest_configure`` of folders with tests on several ranks."""
    config.addinivalue_line("markers", "host_alone: a test, or all tests of a file, that says nothing of GPUs")
    config.addinivalue_line("markers", "gpu_alone: a test that says nothing of the host")
    if not config.getoption("--with-mpi") or AGREEMENT in config.stash:  # another folder of this run may come first
        return
    results = os.environ.get("TEST_RESULTS")
    if results is None:
        raise pytest.UsageError("run the ranks with: python -m tests.helpers.jobs.run_ranks N FOLDER")
    # Each rank has its own temporary directory. Pytest numbers these and removes old ones, and ranks would remove each
    # other's.
    temporary = Path(results, f"temporary-{MPI.COMM_WORLD.rank}")
    temporary.mkdir()
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(temporary)
    config.stash[AGREEMENT] = RankAgreement(config, Path(results))
    config.pluginmanager.register(config.stash[AGREEMENT])


def _wait(request: MPI.Request) -> None:
    # MPI's own Wait spins, which takes the core from a rank that is still in the test.
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause + 1e-4, 5e-3)


@pytest.fixture(scope="module", autouse=True)
def pace(request: pytest.FixtureRequest) -> None:
    """Deadlines are the same on all ranks."""
    mine = measured()
    agreement = request.config.stash.get(AGREEMENT, None)
    set_pace(max(agreement.allgather(mine)) if agreement else mine)
