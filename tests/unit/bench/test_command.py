"""``python -m mpicomm.bench`` as a user runs it, and with faults planted into the calls that it measures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ml_dtypes")

import mpicomm
from mpicomm.bench.__main__ import parser, require_possible
from mpicomm.errors import InvalidUsageError
from tests.helpers.jobs.in_turn import run_changed, run_in_turn
from tests.helpers.jobs.mpiexec import run_job

BENCH = ("-m", "mpicomm.bench")
SHORT = ("-D", "cpu", "-n", "2", "-w", "1", "-G", "2")


def rows(stdout: str) -> list[list[str]]:
    return [line.split() for line in stdout.splitlines() if not line.startswith("#")]


def test_all_is_well(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("-b", "8", "-e", "1M", "-f", "8", "--compare", "mpi,nccl", "--buffers", "both", "-J", str(path))
    coded = ("-b", "1K", "-e", "1K", "--wire-dtype", "int8", "-J", tmp_path / "coded.json")
    calls = [(*BENCH, "allreduce", *SHORT, *each) for each in (options, coded)]
    job, ((said, status), (_, second)) = run_in_turn(2, *calls)
    assert (job.returncode, job.stderr, status, second) == (0, "", 0, 0)
    lines = said.splitlines()
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} bench allreduce: 2 ranks")
    assert "# nccl: skipped, because it needs GPUs and these ranks are on the cpu" in lines
    assert lines[-1] == "# OK"
    shown = rows(said)
    sizes = [8 << 3 * step for step in range(6)]
    assert [int(row[0]) for row in shown] == sizes
    assert {len(row) for row in shown} == {5 + 2 * (5 + 2 * 2)}
    assert all(row[9] == row[18] == "0" for row in shown)

    report = json.loads(path.read_text())
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "allreduce")
    assert list(report["peers"]) == ["mpi"]
    assert report["missing"] == {"nccl": "skipped, because it needs GPUs and these ranks are on the cpu"}
    assert report["options"]["iters"] == 2
    assert [info["rank"] for info in report["ranks"]] == [0, 1]
    assert set(report["geometric_means"]) == {"mpicomm-ordinary", "mpi"}
    for row, measured in zip(shown, report["results"], strict=True):
        assert measured["nbytes"] == int(row[0])
        own = measured["places"]["out-of-place"]["mpicomm"]
        assert own["time_us"] == pytest.approx(float(row[5]), abs=0.0051)
        ratio = measured["places"]["in-place"]["mpi"]["time_us"] / measured["places"]["in-place"]["mpicomm"]["time_us"]
        assert float(row[22]) == pytest.approx(ratio, abs=0.0051)

    # Calls with codes stand beside calls without.
    report = json.loads((tmp_path / "coded.json").read_text())
    assert (report["ok"], report["options"]["wire_dtype"]) == (True, "int8")
    assert set(report["results"][0]["places"]["out-of-place"]) == {"mpicomm", "mpicomm-uncoded"}
    assert list(report["peers"]) == list(report["geometric_means"]) == ["mpicomm-uncoded"]


def test_every_collective_runs(tmp_path: Path) -> None:
    # One job for all, because the start of Python takes most of the time of a run.
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys\nfrom mpicomm.bench import __main__ as bench\nfrom mpicomm.bench.operations import OPERATIONS\n"
        "from mpicomm.cli import options as command_line\n"
        f"options = {[*SHORT, '-b', '24', '-e', '48K', '-f', '2048']}\n"
        "def main():\n    status = 0\n    for name in OPERATIONS:\n        for dtype in 'int32', 'bfloat16':\n"
        "            sys.argv = ['bench', name, *options, '-d', dtype, '--compare', 'mpi']\n"
        "            status = max(status, bench.main())\n    return status\ncommand_line.run(main)\n"
    )
    job = run_job(3, str(driver))
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.count("# OK") == 2 * 12
    assert [row[0] for row in rows(job.stdout)] == 2 * 11 * ["24", "49152"] + 2 * ["0"]


def test_names_of_nccl_tests_are_understood() -> None:
    options = parser().parse_args(["broadcast", "-d", "half", "--compare", "nccl, torch,nccl"])
    assert (options.collective, options.datatype, options.compare) == ("bcast", "float16", ["nccl", "torch"])


WRONG = {
    # The first rank parses.
    ("allreduc",): "argument COLLECTIVE: 'allreduc' is no collective",
    ("allreduce", "-d", "int3"): "argument -d/--datatype: 'int3' is no type",
    ("allreduce", "-o", "land"): "argument -o/--op",
    ("allreduce", "--compare", "nccl,mccl"): "argument --compare: 'mccl' is no peer",
    ("allreduce", "-d", "int32", "-o", "avg"): "error: op=avg is not defined for int32",
    ("allreduce", "-b", "1M", "-e", "1K"): "error: no size to measure: -b 1M is above -e 1K",
    ("allreduce", "--algorithm", "magic", "-e", "8"): "error: algorithm='magic' is unknown",
}


def test_a_wrong_option_is_said_once() -> None:
    job, ended = run_in_turn(2, *((*BENCH, *options, "-D", "cpu") for options in WRONG))
    assert [code for _, code in ended] == [2] * len(WRONG), job.stderr
    assert all(rows(said) == [] for said, _ in ended)
    assert [job.stderr.count(message) for message in WRONG.values()] == [1] * len(WRONG)
    assert job.stderr.count("error:") == len(WRONG)
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("allreduce", "--eager"), "--eager is for GPUs: on the host all calls are timed without graphs: leave it out"),
        (("barrier", "--vary"), "--vary is not for the barrier, which has no sizes to vary: "),
        (("barrier", "--algorithm", "one_shot"), "--algorithm is not for the barrier, which has one way: "),
    ],
)
def test_what_means_nothing_here_is_refused(options: tuple[str, ...], message: str) -> None:
    comm: Any = SimpleNamespace(num_nodes=1, size=2, device="cpu")
    with pytest.raises(InvalidUsageError) as raised:
        require_possible(parser().parse_args(options), comm)
    assert str(raised.value).startswith(message) and str(raised.value).endswith("leave it out")


def test_what_is_refused_leaves_no_file(tmp_path: Path) -> None:
    job = run_job(2, *BENCH, "barrier", *SHORT, "--vary", "-J", str(tmp_path / "j.json"))
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == "error: --vary is not for the barrier, which has no sizes to vary: leave it out\n"
    assert list(tmp_path.iterdir()) == []


CHANGED = ("allreduce", *SHORT, "-b", "4K", "-e", "16K")
CORRUPT = """
def corrupt(self, send, receive, *args, **options):
    allreduce(self, send, receive, *args, **options)
    if RANK == {}:
        receive[517] += 1
allreduce = patch(mpicomm.Communicator, "Allreduce", corrupt)
"""
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
LEFT_BY_ANOTHER_CALL = [
    STALE.format("send = at(last[0], send.size)"),
    STALE.format("receive = at(last[1], receive.size)"),
    STALE.format("count = min(send.size, last[0].size); send, receive = send[:count], receive[:count]"),
]


def test_wrong_elements_fail_the_run(tmp_path: Path) -> None:
    nothing = 'patch(mpicomm.Communicator, "Allreduce", lambda *args, **options: None)'
    changes = [
        *((code, CHANGED) for code in (CORRUPT.format(0), CORRUPT.format(1), nothing)),
        *((code, (*CHANGED, "--vary")) for code in LEFT_BY_ANOTHER_CALL),
    ]
    job, ended = run_changed(tmp_path, 2, "mpicomm.bench.__main__", *changes)
    assert (job.returncode, job.stderr) == (0, "")
    assert [status for _, status in ended] == [1] * len(changes)
    assert all(said.splitlines()[-1].startswith("# FAILED: ") for said, _ in ended)
    for said, _ in ended[:2]:
        assert said.splitlines()[-1] == "# FAILED: 6 wrong"  # three sizes, in and out of place
        assert all(row[9] == row[14] == "1" for row in rows(said))
    for said, _ in ended[3:]:
        assert all(int(row[9]) > 0 and row[14] == "0" for row in rows(said))


def test_calls_vary_and_are_right(tmp_path: Path) -> None:
    code = f"""
measure, seen = main, set()
def look(self, send, receive, *rest, **options):
    seen.add((receive.size, receive.ctypes.data))
    allreduce(self, send, receive, *rest, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", look)
def main():
    status = measure()
    open({str(tmp_path)!r} + f"/{{RANK}}", "w").write(repr((len(seen), sorted({{size for size, _ in seen}}))))
    return status
"""
    options = (*CHANGED, "--vary", "--compare", "mpi", "-e", "4K", "-J", str(tmp_path / "out.json"))
    job, ((said, status),) = run_changed(tmp_path, 2, "mpicomm.bench.__main__", (code, options))
    assert (job.returncode, job.stderr, status) == (0, "", 0)
    assert "2 times 2 calls, each of another size and at other addresses" in said
    # In each place 8 checked calls, one to warm up, and 2 rounds of 2 calls.
    texts = {(tmp_path / str(rank)).read_text() for rank in (0, 1)}
    assert len(texts) == 1
    number, sizes = ast.literal_eval(texts.pop())
    assert number == 2 * 13
    assert len(sizes) > 10 and min(sizes) > 512 and max(sizes) <= 1024
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["options"]["vary"] and report["results"][0]["places"]["in-place"]["mpi"]["issue_us"] > 0


def test_a_peer_that_fails_is_a_line_and_no_more(tmp_path: Path) -> None:
    fail = """
from mpicomm.bench import peers
def fail(*args):
    raise RuntimeError("planted")
if RANK == 1:
    patch(peers.PlainMpi, {!r}, fail)
"""
    steps = ("__init__", "prepare", "close")
    changes = [(fail.format(step), (*CHANGED, "--compare", "mpi")) for step in steps]
    job, ended = run_changed(tmp_path, 2, "mpicomm.bench.__main__", *changes)
    assert (job.returncode, job.stderr) == (0, "")
    for step, (said, status) in zip(steps, ended, strict=True):
        assert (status, said.splitlines()[-1]) == (0, "# OK")
        assert said.count("rank 1: RuntimeError: planted") == (step != "close")


def test_time_is_one_call_of_the_slowest_rank(tmp_path: Path) -> None:
    code = """
import time
def slow(self, *args, **options):
    if RANK == 1:
        time.sleep(0.01)
    allreduce(self, *args, **options)
allreduce = patch(mpicomm.Communicator, "Allreduce", slow)
"""
    _, ((said, status),) = run_changed(tmp_path, 2, "mpicomm.bench.__main__", (code, CHANGED))
    assert status == 0
    assert all(10_000 <= float(row[5]) < 50_000 for row in rows(said))


EXPERTS = ("experts", "-D", "cpu", "-n", "1", "--tokens", "5,9", "--hidden", "16", "--experts", "7", "--top-k", "3")


def test_every_row_is_checked_and_the_defaults_fit_the_host(tmp_path: Path) -> None:
    path, command = tmp_path / "out.json", ("-m", "mpicomm.bench")
    job, ((said, status), (by_default, second)) = run_in_turn(
        2, (*command, *EXPERTS, "-J", path), (*command, *EXPERTS[:5])
    )
    assert (job.returncode, job.stderr, status, second) == (0, "", 0, 0)
    assert "hidden 1024 of float32" in by_default
    assert [line.split()[0] for line in by_default.splitlines() if line[0] != "#"] == ["16", "16", "128", "128"]
    lines = said.splitlines()
    assert lines[-1] == "# OK"
    shown = [line.split() for line in lines if not line.startswith("#")]
    expected = [("5", "experts"), ("5", "tokens"), ("9", "experts"), ("9", "tokens")]
    assert [(*row[:2], row[5], row[9]) for row in shown] == [(*each, "0", "0") for each in expected]
    report = json.loads(path.read_text())
    assert report["ok"]
    assert [(str(row["tokens"]), row["layout"]) for row in report["results"]] == expected
    for row in report["results"]:
        found = row["places"]["dispatch"]["mpicomm"]
        assert found["crossing_gb_s"] == pytest.approx(row["crossing_nbytes"] / found["time_us"] * 1e-3)


EXPERT_FAULTS = {
    "received.x[2, 3] += 1": ("dispatch", "experts"),
    "received.sources[[0, 1]] = received.sources[[1, 0]]": ("dispatch", "experts"),
    "received.offsets[-1] -= 1": ("dispatch", "experts"),
    "received.x[1, 0] += 1": ("dispatch", "tokens"),
    "received.rows[[0, 1]] = received.rows[[1, 0]]": ("dispatch", "tokens"),
    "received.row_count[0] += 1": ("dispatch", "tokens"),
    "received[4, 5] += 8": ("combine", "experts"),
    "received[3, 5] += 8": ("combine", "tokens"),
}


def test_one_wrong_row_fails_the_run(tmp_path: Path) -> None:
    code = """
from mpicomm import Experts
def wrong(*arguments, **options):
    received = right(*arguments, **options)
    if RANK == 1:
        {}
    return received
right = patch(Experts, {!r}, wrong)
"""
    changes = [
        (code.format(fault, name), (*EXPERTS, "--layouts", layout)) for fault, (name, layout) in EXPERT_FAULTS.items()
    ]
    job, ended = run_changed(tmp_path, 2, "mpicomm.bench.__main__", *changes)
    assert job.returncode == 0, job.stderr
    assert [status for _, status in ended] == [1] * len(EXPERT_FAULTS)
    assert all(said.splitlines()[-1].startswith("# FAILED: ") for said, _ in ended)


MATMUL = ("-m", "mpicomm.bench", "matmul", "-D", "cpu", "-n", "1", "-G", "2", "--shape", "48,32")
KINDS = ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]


def test_products_are_right_and_the_defaults_fit_the_host(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    named = (*MATMUL, "--rows", "8,64", "--compare", "nccl,torch", "-J", path)
    job, ((said, status), by_default) = run_in_turn(2, named, (*MATMUL[:5], "-n", "1", "-G", "1"))
    assert (job.returncode, job.stderr, status, by_default[1]) == (0, "", 0, 0)
    assert [line.split()[1] for line in by_default[0].splitlines() if line[0] != "#"] == ["256", "512"] * len(KINDS)
    lines = said.splitlines()
    assert lines[-1] == "# OK" and "# nccl: skipped, because it needs GPUs and these ranks are on the cpu" in lines
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [(row[0], int(row[1])) for row in rows] == [(kind, each) for kind in KINDS for each in (8, 64)]
    report = json.loads(path.read_text())
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "matmul")
    assert report["missing"] == dict.fromkeys(
        ("nccl", "torch"), "skipped, because it needs GPUs and these ranks are on the cpu"
    )
    for row, result in zip(rows, report["results"], strict=True):
        times = {name: each["time_us"] for name, each in result["places"]["matmul"].items()}
        assert list(times) == ["collective", "product", "mpicomm", "serial"]
        assert [float(cell) for cell in row[6::2]] == [
            pytest.approx(times[name] / times["mpicomm"], abs=0.0051) for name in ("collective", "product", "serial")
        ]
        assert row[4] == "0"


def test_wrong_results_of_products_are_counted(tmp_path: Path) -> None:
    code = """
def wrong(self, a, b, out):
    right(self, a, b, out)
    out[-1, -1] += self.rank == 1
right = patch(mpicomm.Communicator, "matmul_allreduce", wrong)
"""
    _, ((said, status),) = run_changed(tmp_path, 2, "mpicomm.bench.__main__", (code, (*MATMUL[2:], "--rows", "8")))
    assert (status, said.splitlines()[-1]) == (1, "# FAILED: 1 wrong")


REFUSED = {
    ("--rows", "9"): "--rows 9: 2 ranks cannot share them: pass a multiple of 2",
    ("--shape", "8"): "argument --shape: '8': use K,N",
    ("--eager",): "--eager is for GPUs",
    ("-d", "bfloat16"): "--datatype bfloat16 is for GPUs: on the host pass float32",
}


def test_bad_options_of_products_are_refused() -> None:
    job, ended = run_in_turn(2, *((*MATMUL, *options) for options in REFUSED))
    assert [code for _, code in ended] == [2] * len(REFUSED), job.stderr
    assert all(message in job.stderr for message in REFUSED.values())
