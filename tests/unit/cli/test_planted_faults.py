"""Command lines that measure find faults planted into the calls that they measure, and time these calls."""

from __future__ import annotations

import ast
import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ml_dtypes")

from mpicomm.collectives.gpu.tuning import Kind, Row, Tuning, load, to_json
from tests.helpers.jobs.in_turn import changed, run_in_turn, run_named
from tests.helpers.jobs.pace import HANG_S

BENCH = ("-D", "cpu", "-n", "2", "-w", "1", "-G", "2")
SUMS = ("allreduce", *BENCH, "-b", "4K", "-e", "16K")
EXPERTS = ("experts", "-D", "cpu", "-n", "1", "--tokens", "5", "--hidden", "16", "--experts", "7", "--top-k", "3")
PRODUCT = ("matmul", "-D", "cpu", "-n", "1", "-G", "2", "--shape", "48,32", "--rows", "8")
RING = ("-D", "cpu", "-b", "1K", "-e", "64K", "-n", "2", "-w", "1")
P2P = ("-D", "cpu", "-b", "100003", "-n", "3", "-r", "2")
TUNE = ("-D", "cpu", "-n", "2", "-w", "1", "-b", "1K", "-e", "16K", "-f", "4", "--operations", "allreduce")

ALLREDUCE = "Communicator.Allreduce"
CHANGED = """
from mpicomm import Communicator, Experts
from mpicomm.p2p.__main__ import Pairs
FIRST, LAST = {{}}, []
def at(array, size):
    return np.lib.stride_tricks.as_strided(array, (size,))
def changed(self, *given, **options):
    {body}
call = patch({owner}, {name!r}, changed)
"""


def instead(method: str, *body: str) -> str:
    """These lines in the place of a method, which they know as `call`."""
    owner, _, name = method.partition(".")
    return CHANGED.format(owner=owner, name=name, body="\n    ".join(body))


def then(method: str, line: str) -> str:
    """A line after each call of a method, which knows what the call has returned as `received`."""
    return instead(method, "received = call(self, *given, **options)", line, "return received")


def stale(line: str) -> str:
    """A call that leaves what another call has left, or takes a buffer or a count of it."""
    return instead(
        ALLREDUCE,
        "send, receive = given[:2]",
        "if send is not MPI.IN_PLACE:",
        "    if LAST:",
        f"        {line}",
        "    LAST[:] = given[:2]",
        "call(self, send, receive, *given[2:], **options)",
    )


class Fault(NamedTuple):
    """Code that plants a fault, the options of the command, and what each column of wrong elements then shows."""

    code: str
    options: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    total: int | None = None


SOME = "more than 0"
FAULTS = {
    "bench on rank 0": Fault(then(ALLREDUCE, "given[1][517] += RANK == 0"), SUMS, ("1", "1")),
    "bench on rank 1": Fault(then(ALLREDUCE, "given[1][517] += RANK == 1"), SUMS, ("1", "1")),
    "bench of nothing": Fault(instead(ALLREDUCE, "pass"), SUMS, (SOME, SOME)),
    **{
        line: Fault(stale(line), (*SUMS, "--vary"), (SOME, "0"))
        for line in (
            "send = at(LAST[0], send.size)",
            "receive = at(LAST[1], receive.size)",
            "count = min(send.size, LAST[0].size); send, receive = send[:count], receive[:count]",
        )
    },
    **{
        line: Fault(then(f"Experts.{name}", f"if RANK == 1: {line}"), (*EXPERTS, "--layouts", layout))
        for line, name, layout in (
            ("received.x[2, 3] += 1", "dispatch", "experts"),
            ("received.sources[[0, 1]] = received.sources[[1, 0]]", "dispatch", "experts"),
            ("received.offsets[-1] -= 1", "dispatch", "experts"),
            ("received.x[1, 0] += 1", "dispatch", "tokens"),
            ("received.rows[[0, 1]] = received.rows[[1, 0]]", "dispatch", "tokens"),
            ("received.row_count[0] += 1", "dispatch", "tokens"),
            ("received[4, 5] += 8", "combine", "experts"),
            ("received[3, 5] += 8", "combine", "tokens"),
        )
    },
    "bench of a product": Fault(
        then("Communicator.matmul_allreduce", "given[2][-1, -1] += RANK == 1"), PRODUCT, total=1
    ),
    # The ring: one byte of each call that is checked, two calls for each size and direction.
    **{
        f"put, then {line}": Fault(then("SymmetricArray.put", line), RING, ("2", "0"), 8)
        for line in (
            "if RANK == 0: self.peer(given[1])[0] ^= 1",
            "if RANK == 1: self.peer(given[1])[517] ^= 1",
            "if RANK == 0: self.peer(given[1])[-1] ^= 1",
        )
    },
    "get of another last bit": Fault(
        then("SymmetricArray.get", "if RANK == 0: given[1][-1] ^= 0x80"), RING, ("0", "2"), 8
    ),
    "no put": Fault(instead("SymmetricArray.put", "pass"), RING, (SOME, "0")),
    "put for another rank": Fault(
        instead("SymmetricArray.put", "call(self, given[0], 1 - given[1])"), RING, (SOME, "0")
    ),
    "memory as it was": Fault(
        instead(
            "SymmetricArray.peer", "return FIRST.setdefault((id(self), *given), (self, call(self, *given).copy()))[1]"
        ),
        RING,
        (SOME, SOME),
    ),
    # One way and with few bytes rank 1 puts in the cells of one row, both ways in the two cells that are measured.
    "p2p on rank 1": Fault(
        instead(
            "Pairs.copy",
            "copy, (method, peer, nbytes) = call(self, *given), given",
            "def wrong():",
            "    copy()",
            "    self._window.peer(peer)[nbytes - 1] ^= 1",
            "return wrong if RANK == 1 and not self.methods[method] else copy",
        ),
        P2P,
        total=6,
    ),
    "p2p of nothing": Fault(instead("Pairs.copy", "return int if self.methods[given[0]] else call(self, *given)"), P2P),
}
FAILING_LIBRARY = """
from mpicomm.bench import compare
def fail(*args):
    raise RuntimeError("planted")
if RANK == 1:
    patch(compare.PlainMpi, {!r}, fail)
"""
STEPS = ("__init__", "prepare", "close")
LOOK = """
measure, seen = main, set()
def main():
    status = measure()
    open({!r} + f"/{{RANK}}", "w").write(repr((len(seen), sorted({{size for size, _ in seen}}))))
    return status
"""
SEEN = then(ALLREDUCE, "seen.add((given[1].size, given[1].ctypes.data))")
CLOCK = """
from types import SimpleNamespace
from mpicomm.bench import measure as timed
now_s = 0.0
def pass_s(seconds):
    global now_s
    now_s += seconds
    return now_s
patch(timed, "time", SimpleNamespace(perf_counter=lambda: pass_s(1e-6)))
"""
"""Time passes only in calls that say so, and a little when it is read."""
EDITED = """
from mpicomm.collectives.gpu.tuning import find
from mpicomm import tune
patch(tune, "require_possible", lambda comm, ranks: None)
patch(tune, "algorithms_of", lambda operation: ("one_shot", "two_shot", "magic"))
"""


def slow(method: str) -> str:
    return CLOCK + then(method, "pass_s((0.002, 0.01)[RANK])")


def tuned(line: str) -> str:
    # The engine for GPUs looks for the table.
    return CLOCK + EDITED + then(ALLREDUCE, f"find('this', lambda: None)\n    {line}")


# From 16 KiB on one_shot is slow on rank 1, below that two_shot: the slowest rank counts.
UNEVEN = 'RANK == 1 and (options["algorithm"] == "one_shot") == (given[1].nbytes >= 16384) and pass_s(0.02)'
# The last bit, as another order of the sum would change it.
WRONG_SUMS = 'if RANK == 1 and options["algorithm"] == "two_shot": given[1][7:8].view("i4")[0] ^= 1'
KEPT = Row(Kind("Bcast", False), 8, ((0, "two_shot"),))
REPLACED = Row(Kind("Allreduce", False), 2, ((0, "copy_engine"),))


class Job(NamedTuple):
    """Output and exit code of each program of the job, and the folder of their reports."""

    ended: dict[str, tuple[str, int]]
    folder: Path

    def rows(self, name: str) -> list[list[str]]:
        return [line.split() for line in self.ended[name][0].splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder, codes = tmp_path_factory.mktemp("reports"), tmp_path_factory.mktemp("codes")
    table = folder / "table.json"
    table.write_text(json.dumps(to_json(Tuning("", (KEPT, REPLACED), "cpu"))))

    def program(command: str, code: str, *options: str | Path) -> tuple[str | Path, ...]:
        module = f"mpicomm.{command}{'.__main__' if command in ('bench', 'p2p') else ''}"
        return (changed(codes, module, code), *options)

    programs = {}
    for number, (name, fault) in enumerate(FAULTS.items()):
        command = {RING: "ring", P2P: "p2p"}.get(fault.options, "bench")
        programs[name] = program(command, fault.code, *fault.options, "-J", folder / f"{number}.json")
    programs |= {step: program("bench", FAILING_LIBRARY.format(step), *SUMS, "--compare", "mpi") for step in STEPS}
    varied = (*SUMS, "--vary", "--compare", "mpi", "-e", "4K", "-J", folder / "varied.json")
    programs["varied"] = program("bench", LOOK.format(str(codes)) + SEEN, *varied)
    programs["slow sums"] = program("bench", slow(ALLREDUCE), *SUMS)
    programs["slow put"] = program("ring", slow("SymmetricArray.put"), *RING)
    programs["tune"] = program("tune", tuned(UNEVEN), *TUNE, "--output", table)
    programs["tune of wrong sums"] = program("tune", tuned(WRONG_SUMS), *TUNE, "--output", folder / "unwritten.json")
    # A table that is named is ignored.
    ended, _ = run_named(2, programs, MPICOMM_TUNING="not/there.json")
    for rank in (0, 1):
        (codes / str(rank)).rename(folder / str(rank))
    return Job(ended, folder)


def wrong_cells(said: str) -> list[list[str]]:
    """The cells of each row below the titles "#wrong"."""
    lines = said.splitlines()
    titles = next((line.split()[1:] for line in lines if "#wrong" in line), [])
    places = [place for place, title in enumerate(titles) if title == "#wrong"]
    return [[line.split()[place] for place in places] for line in lines if places and not line.startswith("#")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(job: Job, name: str) -> None:
    fault, (said, code) = FAULTS[name], job.ended[name]
    match = re.fullmatch(r"# FAILED: (\d+) wrong", said.splitlines()[-1])
    assert match and code == 1 and "# OK" not in said, said
    total, cells = int(match[1]), wrong_cells(said)
    assert total > 0 and fault.total in (None, total)
    if fault.options is not P2P:
        assert total == sum(int(cell) for row in cells for cell in row if cell != "N/A")
    else:
        # One way all four cells, both ways two cells with two copies; some bytes are right by chance.
        assert fault.total or total > 0.99 * (4 + 2 * 2) * 100003
    for row in cells if fault.wrong else ():
        assert all(
            int(cell) > 0 if right is SOME else cell == right for cell, right in zip(row, fault.wrong, strict=True)
        )
    report = json.loads((job.folder / f"{[*FAULTS].index(name)}.json").read_text())
    assert (report["ok"], report["wrong"]) == (False, total)


def test_calls_vary_and_are_right(job: Job) -> None:
    said, code = job.ended["varied"]
    assert code == 0 and "2 times 2 calls, each of another size and at other addresses" in said
    # In each place 8 checked calls, one to warm up, and 2 rounds of 2 calls.
    first, second = (ast.literal_eval((job.folder / str(rank)).read_text()) for rank in (0, 1))
    number, sizes = first
    assert first == second and number == 2 * 13
    assert len(sizes) > 10 and min(sizes) > 512 and max(sizes) <= 1024
    report: dict[str, Any] = json.loads((job.folder / "varied.json").read_text())
    assert report["options"]["vary"] and report["results"][0]["places"]["in-place"]["mpi"]["issue_us"] > 0


def test_a_peer_that_fails_is_a_line_and_no_more(job: Job) -> None:
    for step in STEPS:
        said, status = job.ended[step]
        assert (status, said.splitlines()[-1]) == (0, "# OK")
        assert said.count("rank 1: RuntimeError: planted") == (step != "close")


def test_time_is_one_call_of_the_slowest_rank(job: Job) -> None:
    assert [float(row[5]) for row in job.rows("slow sums")] == [pytest.approx(10_000, abs=2)] * 3
    for _, put_us, _, _, _, get_us, *_ in job.rows("slow put"):
        assert float(put_us) == pytest.approx(10_000, abs=2) and float(get_us) < 10


def test_tune_writes_the_fastest_algorithms_unless_one_is_wrong(job: Job) -> None:
    wrong, failed = job.ended["tune of wrong sums"]
    assert failed == 1 and wrong.splitlines()[-1] == "# FAILED: 6 wrong; nothing was written"
    assert wrong.count("# - two_shot: 1 wrong at 16384 B") == 2
    assert not (job.folder / "unwritten.json").exists()
    right, status = job.ended["tune"]
    lines, table = right.splitlines(), job.folder / "table.json"
    assert (status, lines[-1]) == (0, "# OK")
    assert f"# {table} (cpu)" in lines
    assert "# Allreduce, 2 ranks: one_shot, two_shot from 16 KiB, copy_engine from 16 KiB" in lines
    assert sum(line.startswith("# - magic: InvalidUsageError: algorithm='magic' is unknown") for line in lines) == 2
    chosen = [("1024", "one_shot"), ("4096", "one_shot"), ("16384", "two_shot")]
    assert [(row[0], row[-1]) for row in job.rows("tune")] == chosen * 2
    written = {(row.kind, row.size): row for row in load(table).rows}
    assert written.pop((KEPT.kind, 8)) == KEPT
    assert set(written) == {(Kind("Allreduce", registered), 2) for registered in (False, True)}
    for row in written.values():
        # Larger sizes keep their algorithm. Symmetric arrays had no row, so the row of ordinary arrays held for them.
        assert row.choices == ((0, "one_shot"), (16384, "two_shot"), (16385, "copy_engine"))
        assert row.measured is not None
        times_us = {times["nbytes"]: times["us"] for times in row.measured["times"]}
        assert {name for each in times_us.values() for name in each} == {"one_shot", "two_shot"}
        assert times_us[16384]["one_shot"] >= 20_000 > times_us[16384]["two_shot"]


ENDS = {
    "InvalidUsageError: planted": (
        then("SymmetricArray.put", "if RANK == 1: raise mpicomm.InvalidUsageError('planted')"),
        "rank 1 on {host}",
    ),
    # All ranks raise it at once.
    "ZeroDivisionError": ("command_line.Communicator = lambda *args, **options: 1 / 0", "rank [01] on {host}"),
}


@pytest.mark.parametrize("error", ENDS)
def test_an_error_on_one_rank_ends_the_job(error: str, tmp_path: Path) -> None:
    code, who = ENDS[error]
    program = (changed(tmp_path, "mpicomm.ring", code), *RING)
    job, ended = run_in_turn(2, program, MPICOMM_TIMEOUT=f"{2 * HANG_S:g}")  # which no rank waits
    assert job.returncode != 0 and not ended
    assert "# OK" not in job.stdout and "# FAILED" not in job.stdout
    said = re.findall(r"mpicomm: (.+) failed\n", job.stderr)
    assert said and all(re.fullmatch(who.format(host=re.escape(socket.gethostname())), each) for each in said), (
        job.stderr
    )
    assert error in job.stderr


PRESSED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored
patch(SymmetricArray, "put", lambda *given: os.kill(os.getpid(), signal.SIGINT))
"""


def test_an_interrupt_is_quiet(tmp_path: Path) -> None:
    job, ended = run_in_turn(2, (changed(tmp_path, "mpicomm.ring", PRESSED), *RING))
    assert job.returncode != 0 and not ended and "algbw" in job.stdout
    assert "Traceback" not in job.stderr and "mpicomm" not in job.stderr
