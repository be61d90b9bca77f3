"""``python -m mpicomm.bench`` as a user runs it, and with faults planted into the calls that it measures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ml_dtypes")

import mpicomm
from mpicomm.bench.__main__ import parser
from mpicomm.bench.operations import OPERATIONS
from tests.helpers.jobs.in_turn import changed, run_named

BENCH = ("-m", "mpicomm.bench")
SHORT = ("-D", "cpu", "-n", "2", "-w", "1", "-G", "2")
SUMS = ("allreduce", *SHORT, "-b", "4K", "-e", "16K")
EXPERTS = ("experts", "-D", "cpu", "-n", "1", "--tokens", "5,9", "--hidden", "16", "--experts", "7", "--top-k", "3")
MATMUL = ("matmul", "-D", "cpu", "-n", "1", "-G", "2", "--shape", "48,32")
KINDS = ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]
NO_GPUS = "skipped, because it needs GPUs and these ranks are on the cpu"

RIGHT = {
    "sums": ("allreduce", *SHORT, "-b", "8", "-e", "1M", "-f", "8", "--compare", "mpi,nccl", "--buffers", "both"),
    "coded": ("allreduce", *SHORT, "-b", "1K", "-e", "1K", "--wire-dtype", "int8"),
    "experts": EXPERTS,
    "experts by default": EXPERTS[:5],
    "products": (*MATMUL, "--rows", "8,64", "--compare", "nccl,torch"),
    "products by default": (*MATMUL[:3], "-n", "1", "-G", "1"),
}
REFUSED = {
    # The first rank parses.
    ("allreduc",): "argument COLLECTIVE: 'allreduc' is no collective",
    ("allreduce", "-d", "int3"): "argument -d/--datatype: 'int3' is no type",
    ("allreduce", "-o", "land"): "argument -o/--op",
    ("allreduce", "--compare", "nccl,mccl"): "argument --compare: 'mccl' is no peer",
    ("matmul", "--shape", "8"): "argument --shape: '8': use K,N",
    ("allreduce", "-d", "int32", "-o", "avg"): "error: op=avg is not defined for int32",
    ("allreduce", "-b", "1M", "-e", "1K"): "error: no size to measure: -b 1M is above -e 1K",
    ("allreduce", "--algorithm", "magic", "-e", "8"): "error: algorithm='magic' is unknown",
    ("allreduce", "--eager"): "error: --eager is for GPUs",
    ("barrier", "--vary"): "error: --vary is not for the barrier, which has no sizes to vary: leave it out",
    ("barrier", "--algorithm", "one_shot"): "error: --algorithm is not for the barrier, which has one way: leave it",
    (*MATMUL, "--rows", "9"): "--rows 9: 2 ranks cannot share them: pass a multiple of 2",
    (*MATMUL, "--eager", "-n", "1"): "error: --eager is for GPUs",
    (*MATMUL, "-d", "bfloat16"): "--datatype bfloat16 is for GPUs: on the host pass float32",
}

CORRUPT = """
def corrupt(self, send, receive, *args, **options):
    allreduce(self, send, receive, *args, **options)
    if RANK == {}:
        receive[517] += 1
allreduce = patch(mpicomm.Communicator, "Allreduce", corrupt)
"""
# A call that leaves what another call has left, or takes a buffer or a count of it.
STALE = """
last = None
def at(array, size):
    return np.lib.stride_tricks.as_strided(array, (size,))
def stale(self, send, receive, *rest, **options):
    global last
    given = send, receive
    if send is not MPI.IN_PLACE:
        if last is not None:
            {}
        last = given
    allreduce(self, send, receive, *rest, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", stale)
"""
WRONG_ROWS = """
from mpicomm import Experts
def wrong(*arguments, **options):
    received = right(*arguments, **options)
    if RANK == 1:
        {}
    return received
right = patch(Experts, {!r}, wrong)
"""
WRONG_PRODUCT = """
def wrong(self, a, b, out):
    right(self, a, b, out)
    out[-1, -1] += self.rank == 1
right = patch(mpicomm.Communicator, "matmul_allreduce", wrong)
"""


class Fault(NamedTuple):
    """Code that plants a fault, options of the bench, and the wrong elements out of place and in place, if known."""

    code: str
    options: tuple[str, ...] = SUMS
    wrong: tuple[int | None, int | None] = (None, None)


FAULTS = {
    "on rank 0": Fault(CORRUPT.format(0), wrong=(1, 1)),
    "on rank 1": Fault(CORRUPT.format(1), wrong=(1, 1)),
    "nothing": Fault('patch(mpicomm.Communicator, "Allreduce", lambda *args, **options: None)'),
    **{
        line: Fault(STALE.format(line), (*SUMS, "--vary"), (None, 0))
        for line in (
            "send = at(last[0], send.size)",
            "receive = at(last[1], receive.size)",
            "count = min(send.size, last[0].size); send, receive = send[:count], receive[:count]",
        )
    },
    **{
        line: Fault(WRONG_ROWS.format(line, name), (*EXPERTS, "--layouts", layout))
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
    "a product": Fault(WRONG_PRODUCT, (*MATMUL, "--rows", "8")),
}
# They fail no run.
FAILING_PEER = """
from mpicomm.bench import peers
def fail(*args):
    raise RuntimeError("planted")
if RANK == 1:
    patch(peers.PlainMpi, {!r}, fail)
"""
STEPS = ("__init__", "prepare", "close")
SLOW = """
import time
def slow(self, *args, **options):
    if RANK == 1:
        time.sleep(0.01)
    allreduce(self, *args, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", slow)
"""
LOOK = """
measure, seen = main, set()
def look(self, send, receive, *rest, **options):
    seen.add((receive.size, receive.ctypes.data))
    allreduce(self, send, receive, *rest, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", look)
def main():
    status = measure()
    open({!r} + f"/{{RANK}}", "w").write(repr((len(seen), sorted({{size for size, _ in seen}}))))
    return status
"""


class Job(NamedTuple):
    """One job of all runs: output and exit code of each, what they said on stderr, and the folder of their files."""

    ended: dict[str, tuple[str, int]]
    stderr: str
    folder: Path

    def right(self, name: str) -> tuple[list[str], list[list[str]], Any]:
        """Return the lines of a run that is well, the cells of its rows, and its report."""
        said, code = self.ended[name]
        lines = said.splitlines()
        assert (code, lines[-1]) == (0, "# OK"), said
        return lines, rows(said), json.loads((self.folder / f"{name}.json").read_text())


def rows(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder, codes = tmp_path_factory.mktemp("reports"), tmp_path_factory.mktemp("codes")

    def program(code: str, options: tuple[str, ...]) -> tuple[str | Path, ...]:
        return (changed(codes, "mpicomm.bench.__main__", code), *options)

    programs: dict[str, tuple[str | Path, ...]] = {
        name: (*BENCH, *options, "-J", folder / f"{name}.json") for name, options in RIGHT.items()
    }
    programs |= {" ".join(options): (*BENCH, *options, "-J", folder / "no.json") for options in REFUSED}
    programs |= {name: program(fault.code, fault.options) for name, fault in FAULTS.items()}
    programs |= {step: program(FAILING_PEER.format(step), (*SUMS, "--compare", "mpi")) for step in STEPS}
    programs["slow"] = program(SLOW, SUMS)
    varied = (*SUMS, "--vary", "--compare", "mpi", "-e", "4K", "-J", str(folder / "varied.json"))
    programs["varied"] = program(LOOK.format(str(codes)), varied)
    ended, said = run_named(2, programs)
    for rank in (0, 1):
        (codes / str(rank)).rename(folder / str(rank))
    return Job(ended, said, folder)


def test_all_is_well(job: Job) -> None:
    lines, shown, report = job.right("sums")
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} bench allreduce: 2 ranks")
    assert f"# nccl: {NO_GPUS}" in lines
    assert [int(row[0]) for row in shown] == [8 << 3 * step for step in range(6)]
    assert {len(row) for row in shown} == {5 + 2 * (5 + 2 * 2)}
    assert all(row[9] == row[18] == "0" for row in shown)
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "allreduce")
    assert (list(report["peers"]), report["missing"]) == (["mpi"], {"nccl": NO_GPUS})
    assert report["options"]["iters"] == 2
    assert [info["rank"] for info in report["ranks"]] == [0, 1]
    assert set(report["geometric_means"]) == {"mpicomm-ordinary", "mpi"}
    for row, measured in zip(shown, report["results"], strict=True):
        assert measured["nbytes"] == int(row[0])
        own = measured["places"]["out-of-place"]["mpicomm"]
        assert own["time_us"] == pytest.approx(float(row[5]), abs=0.0051)
        ratio = measured["places"]["in-place"]["mpi"]["time_us"] / measured["places"]["in-place"]["mpicomm"]["time_us"]
        assert float(row[22]) == pytest.approx(ratio, abs=0.0051)


def test_calls_with_codes_stand_beside_calls_without(job: Job) -> None:
    _, _, report = job.right("coded")
    assert (report["ok"], report["options"]["wire_dtype"]) == (True, "int8")
    assert set(report["results"][0]["places"]["out-of-place"]) == {"mpicomm", "mpicomm-uncoded"}
    assert list(report["peers"]) == list(report["geometric_means"]) == ["mpicomm-uncoded"]


def test_every_collective_runs() -> None:
    options = (*SHORT, "-b", "24", "-e", "48K", "-f", "2048", "--compare", "mpi")
    types = ("int32", "bfloat16")
    calls = {f"{name} of {of}": (*BENCH, name, *options, "-d", of) for name in OPERATIONS for of in types}
    ended, said = run_named(3, calls)
    assert said == ""
    for name, (output, code) in ended.items():
        assert (code, output.splitlines()[-1]) == (0, "# OK"), name
        assert [row[0] for row in rows(output)] == (["0"] if "barrier" in name else ["24", "49152"])


def test_names_of_nccl_tests_are_understood() -> None:
    options = parser().parse_args(["broadcast", "-d", "half", "--compare", "nccl, torch,nccl"])
    assert (options.collective, options.datatype, options.compare) == ("bcast", "float16", ["nccl", "torch"])


def test_a_wrong_option_is_said_once_and_leaves_no_file(job: Job) -> None:
    assert {job.ended[" ".join(options)][1] for options in REFUSED} == {2}
    assert not any(rows(job.ended[" ".join(options)][0]) for options in REFUSED)
    messages = [*REFUSED.values()]
    assert [job.stderr.count(message) for message in messages] == [messages.count(message) for message in messages]
    assert job.stderr.count("error:") == len(REFUSED) and "Traceback" not in job.stderr
    written = {*(f"{name}.json" for name in (*RIGHT, "varied")), "0", "1"}
    assert {path.name for path in job.folder.iterdir()} == written


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_elements_fail_the_run(job: Job, name: str) -> None:
    said, code = job.ended[name]
    _, _, (out_of_place, in_place) = FAULTS[name]
    assert code == 1 and said.splitlines()[-1].startswith("# FAILED: ")
    if out_of_place:
        assert said.splitlines()[-1] == "# FAILED: 6 wrong"  # three sizes, in and out of place
    if in_place is not None:
        assert all(int(row[9]) > 0 and row[14] == str(in_place) for row in rows(said))
        assert out_of_place in (None, *(int(row[9]) for row in rows(said)))
    assert name != "a product" or said.endswith("# FAILED: 1 wrong\n")


def test_calls_vary_and_are_right(job: Job) -> None:
    lines, _, report = job.right("varied")
    assert any("2 times 2 calls, each of another size and at other addresses" in line for line in lines)
    # In each place 8 checked calls, one to warm up, and 2 rounds of 2 calls.
    first, second = (ast.literal_eval((job.folder / str(rank)).read_text()) for rank in (0, 1))
    number, sizes = first
    assert first == second and number == 2 * 13
    assert len(sizes) > 10 and min(sizes) > 512 and max(sizes) <= 1024
    assert report["options"]["vary"] and report["results"][0]["places"]["in-place"]["mpi"]["issue_us"] > 0


def test_a_peer_that_fails_is_a_line_and_no_more(job: Job) -> None:
    for step in STEPS:
        said, status = job.ended[step]
        assert (status, said.splitlines()[-1]) == (0, "# OK")
        assert said.count("rank 1: RuntimeError: planted") == (step != "close")


def test_time_is_one_call_of_the_slowest_rank(job: Job) -> None:
    said, status = job.ended["slow"]
    assert status == 0 and all(10_000 <= float(row[5]) < 50_000 for row in rows(said))


def test_every_row_of_experts_is_checked_and_the_defaults_fit_the_host(job: Job) -> None:
    lines, shown, _ = job.right("experts by default")
    assert any("hidden 1024 of float32" in line for line in lines)
    assert [row[0] for row in shown] == ["16", "16", "128", "128"]
    _, shown, report = job.right("experts")
    expected = [(tokens, layout) for tokens in ("5", "9") for layout in ("experts", "tokens")]
    assert [(*row[:2], row[5], row[9]) for row in shown] == [(*each, "0", "0") for each in expected]
    assert [(str(row["tokens"]), row["layout"]) for row in report["results"]] == expected
    for row in report["results"]:
        found = row["places"]["dispatch"]["mpicomm"]
        assert found["crossing_gb_s"] == pytest.approx(row["crossing_nbytes"] / found["time_us"] * 1e-3)


def test_products_are_right_and_the_defaults_fit_the_host(job: Job) -> None:
    assert [row[1] for row in job.right("products by default")[1]] == ["256", "512"] * len(KINDS)
    lines, shown, report = job.right("products")
    assert f"# nccl: {NO_GPUS}" in lines
    assert [(row[0], int(row[1])) for row in shown] == [(kind, each) for kind in KINDS for each in (8, 64)]
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "matmul")
    assert report["missing"] == dict.fromkeys(("nccl", "torch"), NO_GPUS)
    for row, result in zip(shown, report["results"], strict=True):
        times = {name: each["time_us"] for name, each in result["places"]["matmul"].items()}
        assert list(times) == ["collective", "product", "mpicomm", "serial"]
        ratios = [times[name] / times["mpicomm"] for name in ("collective", "product", "serial")]
        assert [float(cell) for cell in row[6::2]] == [pytest.approx(ratio, abs=0.0051) for ratio in ratios]
        assert row[4] == "0"
