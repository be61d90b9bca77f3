"""The command lines as users run them: ``python -m mpicomm``, and its tools, on one, two and three ranks."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import re
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mpi4py
import numpy as np
import pytest
from mpi4py import MPI
from rich.console import Console

pytest.importorskip("ml_dtypes")

import mpicomm
from mpicomm.bench.operations import OPERATIONS
from mpicomm.doctor.checks import CHECKS
from mpicomm.info import tables
from tests.helpers.jobs.in_turn import changed, run_named
from tests.helpers.jobs.pace import HANG_S

DEVICE = ("--device", "cpu")
SHORT = (*DEVICE, "-n", "2", "-w", "1", "-G", "2")
EXPERTS = ("experts", *DEVICE, "-n", "1")
MATMUL = ("matmul", *DEVICE, "-n", "1", "-G", "2", "--shape", "48,32")
RING = ("ring", *DEVICE, "-b", "1K", "-e", "64K", "-n", "2", "-w", "1")
ONCE = ("ring", *DEVICE, "-n", "1", "-w", "0")
P2P = ("p2p", *DEVICE, "-b", "100003", "-n", "3", "-r", "2")
BENCHES = {
    "sums": ("allreduce", *SHORT, "-b", "8", "-e", "1M", "-f", "8", "--compare", "mpi,nccl"),
    "quantized": ("allreduce", *SHORT, "-b", "1K", "-e", "1K", "--wire-dtype", "int8", "--buffers", "ordinary"),
    "experts": (*EXPERTS, "--tokens", "5,9", "--hidden", "16", "--experts", "7", "--top-k", "3"),
    "experts by default": EXPERTS,
    "products": (*MATMUL, "--rows", "8,64", "--compare", "nccl,torch"),
    "products by default": (*MATMUL[:3], "-n", "1", "-G", "1", "--shape", "48,32"),
}
ON_TWO = {
    "tables": ("info", *DEVICE),
    "info": ("info", *DEVICE, "--json"),
    "info in a file": ("info", *DEVICE, "--json", "info.json"),
    "doctor": ("doctor", *DEVICE),
    "doctor in a file": ("doctor", *DEVICE, "--json", "doctor.json"),
    "ring": (*RING, "--json", "ring-2.json"),
    "put": (*ONCE, "-b", "1K", "-e", "1K", "--direction", "put"),
    "get": (*ONCE, "-b", "1K", "-e", "1K", "--direction", "get"),
    "odd sizes": (*ONCE, "-b", "1", "-e", "1200000", "-f", "101"),
    "help": ("ring", "--help"),
    **{name: ("bench", *options, "-J", f"{name}.json") for name, options in BENCHES.items()},
}
ON_THREE = {"ring": (*RING, "--json", "ring-3.json"), "p2p": (*P2P, "--json", "p2p.json")}
SET = "import os; os.environ['MPICOMM_{}'] = {}"
REFUSED = {
    # The first rank parses.
    ("bench", "allreduc"): "argument COLLECTIVE: invalid choice: 'allreduc'",
    ("bench", "allreduce", "-d", "int3"): "argument -d/--datatype: invalid choice: 'int3'",
    ("bench", "allreduce", "-o", "land"): "argument -o/--op",
    ("bench", "allreduce", "--compare", "nccl,mccl"): "argument --compare: 'mccl' is no peer",
    ("bench", "matmul", "--shape", "8"): "argument --shape: '8': use K,N",
    ("ring", "-b", "12Q"): "argument -b/--minbytes: '12Q' is no size",
    ("ring", "-f", "1"): "argument -f/--stepfactor: '1': use a whole number from 2 up",
    ("ring", "--json", "/no/such/directory/file"): "argument -J/--json",
    ("ring", "--direction", "up"): "argument --direction",
    ("ring", "--bogus"): "unrecognized arguments: --bogus",
    ("tune", "--operations", "allreduce,scan"): "argument --operations: 'scan' is no operation with a choice: use all",
    ("tune", "-e", "0"): "argument -e/--maxbytes: '0' is no size",
    ("tune", "--output", "/no/such/directory/file"): "argument --output",
    # All ranks raise.
    ("bench", "allreduce", "-d", "int32", "-o", "avg"): "error: op=avg is not defined for int32",
    ("bench", "allreduce", "-b", "1M", "-e", "1K"): "error: no size to measure: -b 1M is above -e 1K",
    ("bench", "allreduce", "--algorithm", "magic", "-e", "8"): "error: algorithm='magic' is unknown",
    ("bench", "allreduce", "--eager"): "error: --eager is for GPUs",
    ("bench", "barrier", "--vary"): "error: --vary is not for the barrier, which has no sizes to vary: leave it out",
    ("bench", "barrier", "--algorithm", "one_shot"): "error: --algorithm is not for the barrier, which has one way",
    ("bench", *MATMUL, "--rows", "9"): "--rows 9: 2 ranks cannot share them: pass a multiple of 2",
    ("bench", *MATMUL, "-d", "bfloat16"): "--datatype bfloat16 is for GPUs: on the host pass float32",
    ("ring", "--handle", "ipc"): 'handle="ipc"',
    ("tune", "--output", "none.json"): "error: the table is for collectives on GPU arrays, and these ranks are on the",
}
ALONE: dict[tuple[str, ...], tuple[int, str]] = {
    ("",): (2, "no program is named"),
    ("", "--help"): (0, "usage: mpirun -np N python -m mpicomm [--stream-order] SCRIPT"),
    ("", "-h"): (0, "python -m mpicomm.info, .doctor"),
    ("", "--version"): (0, f"mpicomm {mpicomm.__version__}"),
    ("", "-m"): (2, "-m needs an argument"),
    ("", "--what"): (2, "unknown option --what"),
    ("", "doctor"): (2, "mpicomm: there is no file 'doctor': name the file of a program, or start the tool by python"),
    ("", "-m", "no_such.module"): (
        2,
        "mpicomm: there is no module 'no_such.module' on the path of this Python: correct",
    ),
    ("", "-m", "json.no_such"): (2, "mpicomm: there is no module 'json.no_such' on the path of this Python: correct"),
    ("doctor", "--pid", "1", "--job"): (2, "not allowed with argument"),
    ("doctor", "--pid", "x"): (2, "invalid int value: 'x'"),
    ("doctor", "--job", "--json", "file"): (2, "--json: not allowed with --pid and --job"),
    (*RING, "--json", "ring-1.json"): (0, "# OK"),
}
NO_GPUS = "skipped, because it needs GPUs and these ranks are on the cpu"
KINDS = ["allgather_matmul", "matmul_reduce_scatter", "matmul_allreduce"]
SIZES = [1024, 4096, 16384, 65536]
HOST = socket.gethostname()


class Job(NamedTuple):
    """Output and exit code of each program of a job, what they said on stderr, and the folder of their files."""

    ended: dict[str, tuple[str, int]]
    stderr: str
    folder: Path

    def right(self, name: str) -> list[str]:
        """Return the lines of a measurement that is well."""
        said, code = self.ended[name]
        lines = said.splitlines()
        assert (code, lines[-1]) == (0, "# OK"), said
        return lines

    def rows(self, name: str) -> list[list[str]]:
        return [line.split() for line in self.ended[name][0].splitlines() if not line.startswith("#")]

    def report(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Job]:
    """Gives the job of all runs on a number of ranks."""

    @cache
    def run(nprocs: int) -> Job:
        folder, codes = tmp_path_factory.mktemp("reports"), tmp_path_factory.mktemp("codes")

        def program(command: str, *options: str) -> tuple[str, ...]:
            files = [str(folder / option) if option.endswith(".json") else option for option in options]
            return ("-m", f"mpicomm.{command}".rstrip("."), *files)

        if nprocs == 1:
            programs: dict[str, Any] = {" ".join(words): program(*words) for words in ALONE}
        elif nprocs == 2:
            programs = {name: program(*words) for name, words in ON_TWO.items()}
            programs |= {" ".join(words): program(*words, *DEVICE) for words in REFUSED}
        else:
            programs = {name: program(*words) for name, words in ON_THREE.items()}
            # At last, because the environment stays so.
            programs["ring on nodes"] = (changed(codes, "mpicomm.ring", SET.format("HOSTID", "str(RANK)")), *DEVICE)
            programs |= {
                "p2p on nodes": program("p2p", *DEVICE),
                "bench on nodes": program("bench", "barrier", *DEVICE),
            }
            programs["wrong variable"] = (changed(codes, "mpicomm.info", SET.format("TIMEOUT", "'soon'")), *DEVICE)
        ended, said = run_named(nprocs, programs, MPICOMM_TIMEOUT=str(HANG_S))
        return Job(ended, said, folder)

    return run


def test_a_wrong_option_is_said_once_and_so_is_help(job: Callable[[int], Job]) -> None:
    found = job(2)
    assert {found.ended[" ".join(words)][1] for words in REFUSED} == {2}
    assert not any(found.rows(" ".join(words)) for words in REFUSED)
    messages = [*REFUSED.values()]
    assert [found.stderr.count(message) for message in messages] == [messages.count(message) for message in messages]
    assert found.stderr.count("error:") == len(REFUSED)
    assert "Traceback" not in found.stderr and "abort" not in found.stderr.lower()
    usage, status = found.ended["help"]
    assert (usage.count("usage:"), status) == (1, 0)
    # A refused run leaves no file.
    files = {option for words in ON_TWO.values() for option in words if option.endswith(".json")}
    assert {path.name for path in found.folder.iterdir()} == files


def test_one_process_gets_information_and_refusals(job: Callable[[int], Job]) -> None:
    found = job(1)
    for words, (code, text) in ALONE.items():
        said, ended = found.ended[" ".join(words)]
        assert (ended, text in (found.stderr if code else said)) == (code, True), (words, found.stderr)


def test_ranks_on_several_nodes_and_a_wrong_variable_are_refused(job: Callable[[int], Job]) -> None:
    found = job(3)
    refused = ["ring on nodes", "p2p on nodes", "bench on nodes", "wrong variable"]
    assert [found.ended[name] for name in refused] == [("", 2)] * 4
    *nodes, variable = found.stderr.splitlines()
    why = "this command needs mapped memory; these 3 ranks are on 3 nodes: start them on one"
    assert nodes == [f"error: {why}"] * 3
    assert variable.startswith("error: ranks 0, 1, 2: MPICOMM_TIMEOUT='soon': use a positive number of seconds")


def table(job: Job, name: str) -> dict[int, list[float]]:
    return {int(size): [*map(float, cells)] for size, *cells in job.rows(name)}


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_a_ring_that_is_well(job: Callable[[int], Job], nprocs: int) -> None:
    found, name = job(nprocs), "ring" if nprocs > 1 else " ".join((*RING, "--json", "ring-1.json"))
    lines = found.right(name)
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} ring: {nprocs} rank")
    ranks = [line for line in lines if line.startswith("#  Rank")]
    assert len(ranks) == nprocs
    assert all(re.fullmatch(rf"#  Rank +\d+ Pid +\d+ on {re.escape(HOST)} device cpu", line) for line in ranks)
    assert "# handle: memfd (the best for this device)" in lines
    # One header, ranks, handle, rounds, blank, head of table, table, agreed end: only the first rank wrote.
    assert len(lines) == 1 + nprocs + 1 + 1 + 1 + 3 + len(SIZES) + 1
    shown = table(found, name)
    assert list(shown) == SIZES
    for nbytes, (put_us, _, put_gb_s, put_wrong, get_us, _, get_gb_s, get_wrong) in shown.items():
        assert put_wrong == get_wrong == 0
        assert put_gb_s == pytest.approx(nbytes / put_us / 1e3, abs=0.0051, rel=0.01)
        assert get_gb_s == pytest.approx(nbytes / get_us / 1e3, abs=0.0051, rel=0.01)

    report = found.report(f"ring-{nprocs}")
    assert (report["ok"], report["wrong"], report["handle"]) == (True, 0, "memfd")
    assert (report["options"]["iters"], report["options"]["maxbytes"]) == (2, 65536)
    assert report["processor"] and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["date"])
    assert report["versions"].items() >= {"mpicomm": mpicomm.__version__, "numpy": np.__version__}.items()
    assert {"Python", "mpi4py", "MPI"} <= set(report["versions"])
    for row in report["results"]:
        outcomes = [row["places"][name]["mpicomm"] for name in ("put", "get")]
        cells = [round(each[key], 2) for each in outcomes for key in ("time_us", "algbw_gb_s", "wrong")]
        cells_shown = shown.pop(row["nbytes"])
        assert cells == pytest.approx([cells_shown[at] for at in (0, 2, 3, 4, 6, 7)], abs=0.011)
    assert not shown


def test_one_direction_and_sizes_that_are_no_multiple_of_anything(job: Callable[[int], Job]) -> None:
    for name in ("put", "get"):
        said, status = job(2).ended[name]
        assert (status, [len(row) for row in job(2).rows(name)]) == (0, [5])
        assert re.findall(r" (put|get)\b", said) == [name]
    job(2).right("odd sizes")
    assert list(table(job(2), "odd sizes")) == [1, 101, 10201, 1030301]


def test_matrices_of_three_ranks(job: Callable[[int], Job]) -> None:
    said, found = job(3).right("p2p"), job(3).report("p2p")
    assert (found["ok"], found["wrong"], found["options"]["bytes"]) == (True, 0, 100003)
    measured = found["matrices"]
    ways = ("to the target", "from the source")
    assert [matrix["title"] for matrix in measured] == [
        *(f"Bandwidth, {how}, copies {which}" for how in ("one way", "both ways") for which in ways),
        *(f"Latency, copies {which} of 16 bytes" for which in ways),
    ]
    for matrix in measured:
        assert f"{matrix['title']} ({matrix['unit']})" in said
        for source, row in enumerate(matrix["cells"]):
            nothing = [source] if "both ways" in matrix["title"] else []
            assert [target for target, cell in enumerate(row) if cell is None] == nothing
            assert all(cell > 0 for cell in row if cell is not None)


def test_the_bench_of_sums_and_its_peers(job: Callable[[int], Job]) -> None:
    lines, shown, report = job(2).right("sums"), job(2).rows("sums"), job(2).report("sums")
    assert lines[0].startswith(f"# mpicomm {mpicomm.__version__} bench allreduce: 2 ranks")
    assert f"# nccl: {NO_GPUS}" in lines
    assert [int(row[0]) for row in shown] == [8 << 3 * step for step in range(6)]
    assert {len(row) for row in shown} == {5 + 2 * (5 + 2)}
    assert all(row[9] == row[16] == "0" for row in shown)
    assert (report["ok"], report["wrong"], report["collective"]) == (True, 0, "allreduce")
    assert (list(report["peers"]), report["missing"]) == (["mpi"], {"nccl": NO_GPUS})
    assert set(report["geometric_means"]) == {"mpi"}
    assert [each["nbytes"] for each in report["results"]] == [int(row[0]) for row in shown]


def test_the_bench_of_quantized_calls_beside_others(job: Callable[[int], Job]) -> None:
    job(2).right("quantized")
    report = job(2).report("quantized")
    assert report["options"]["wire_dtype"] == "int8"
    assert set(report["results"][0]["places"]["out-of-place"]) == {"mpicomm", "mpicomm-unquantized"}
    assert list(report["peers"]) == list(report["geometric_means"]) == ["mpicomm-unquantized"]


def test_the_bench_of_experts_and_its_defaults_on_the_host(job: Callable[[int], Job]) -> None:
    assert any("hidden 1024 of float32" in line for line in job(2).right("experts by default"))
    assert [row[0] for row in job(2).rows("experts by default")] == ["16", "16", "128", "128"]
    job(2).right("experts")
    shown, report = job(2).rows("experts"), job(2).report("experts")
    expected = [(tokens, layout) for tokens in ("5", "9") for layout in ("experts", "tokens")]
    assert [(*row[:2], row[5], row[9]) for row in shown] == [(*each, "0", "0") for each in expected]
    assert [(str(row["tokens"]), row["layout"]) for row in report["results"]] == expected
    for row in report["results"]:
        found = row["places"]["dispatch"]["mpicomm"]
        assert found["crossing_gb_s"] == pytest.approx(row["crossing_nbytes"] / found["time_us"] * 1e-3)


def test_the_bench_of_products_and_its_defaults_on_the_host(job: Callable[[int], Job]) -> None:
    job(2).right("products by default")
    assert [row[1] for row in job(2).rows("products by default")] == ["256", "512"] * len(KINDS)
    lines, shown, report = job(2).right("products"), job(2).rows("products"), job(2).report("products")
    assert f"# nccl: {NO_GPUS}" in lines
    assert [(row[0], int(row[1])) for row in shown] == [(kind, each) for kind in KINDS for each in (8, 64)]
    assert report["missing"] == dict.fromkeys(("nccl", "torch"), NO_GPUS)
    for row, result in zip(shown, report["results"], strict=True):
        times = {name: each["time_us"] for name, each in result["places"]["matmul"].items()}
        assert list(times) == ["collective", "product", "mpicomm", "serial"]
        ratios = [times[name] / times["mpicomm"] for name in ("collective", "product", "serial")]
        assert [float(cell) for cell in row[6::2]] == [pytest.approx(ratio, abs=0.0051) for ratio in ratios]
        assert row[4] == "0"


def test_every_collective_runs() -> None:
    options = (*SHORT, "-b", "24", "-e", "48K", "-f", "2048", "--compare", "mpi")
    calls = {
        f"{name} of {of}": ("-m", "mpicomm.bench", name, *options, "-d", of)
        for name, operation in OPERATIONS.items()
        for of in ("int32", *["bfloat16"] * operation.reduces)
    }
    found = Job(*run_named(3, calls), Path())
    assert found.stderr == ""
    for name in calls:
        found.right(name)
        assert [row[0] for row in found.rows(name)] == (["0"] if "barrier" in name else ["24", "49152"])


@pytest.fixture
def answer(job: Callable[[int], Job]) -> dict[str, Any]:
    """The answer of `info` in JSON."""
    found: dict[str, Any] = json.loads(job(2).ended["info"][0])
    assert job(2).report("info") == found and job(2).ended["info in a file"] == ("", 0)
    return copy.deepcopy(found)


def test_info_in_json_is_one_complete_object(answer: dict[str, Any]) -> None:
    found = answer
    assert [info["rank"] for info in found["ranks"]] == [0, 1]
    assert len({info["pid"] for info in found["ranks"]}) == 2
    for rank, info in enumerate(found["ranks"]):
        assert (info["host"], info["node"], info["device"]) == (HOST, 0, "cpu")
        assert (info["handle"], info["rejected"], info["device_uuid"]) == ("memfd", {}, None)
        assert info["environment"] == {"MPICOMM_TIMEOUT": str(HANG_S)}
        assert info["links"][rank]["path"] == "self"
        assert info["links"][1 - rank]["path"] == "host memory"
        held = {use["purpose"]: (use["device_nbytes"], use["host_nbytes"] > 0) for use in info["memory"]}
        assert held == dict.fromkeys(("signal pads", "call log", "host arena"), (0, True))
    assert found["first_calls"] == "work"
    assert found["versions"]["mpicomm"] == mpicomm.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["versions"]["mpi4py"] == mpi4py.__version__
    assert found["versions"]["MPI"].split()[0] == MPI.Get_library_version().split()[0]
    assert set(found["cuda_aware_mpi"]) == {"aware", "how"}


def test_tables_show_memory_of_gpus_apart_and_the_bandwidth_of_paths(answer: dict[str, Any]) -> None:
    memory = [{"purpose": "collectives: arena", "device_nbytes": 43 << 20, "host_nbytes": 4096}]
    answer["ranks"][1]["memory"] = memory
    assert answer["ranks"][1]["links"][0]["gb_s"] is None
    answer["ranks"][0]["links"][1].update(path="NVLink", gb_s=478.116)
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(*tables(answer))
    said = captured.get()
    assert "collectives: arena │ device: 44,032 KiB, host: 4 KiB" in said
    assert "NVLink 478 GB/s" in said and said.count("GB/s") == 1


def test_info_for_people(job: Callable[[int], Job]) -> None:
    said, _ = job(2).ended["tables"]
    # All ranks have as much of the arena.
    counts = {"Ranks": 1, "host memory": 2, "MPICOMM_TIMEOUT": 1, "MPI is CUDA-aware": 1, "host arena": 1}
    assert {text: said.count(text) for text in counts} == counts


def test_the_doctor_finds_nothing_and_its_json_has_the_facts_of_all_ranks(job: Callable[[int], Job]) -> None:
    said, status = job(2).ended["doctor"]
    expected = {check.name: f"ok    {check.name}: {check.title}" for check in CHECKS}
    if importlib.util.find_spec("torch") is None:
        expected["pytorch"] = "skip  pytorch: no rank has PyTorch"
    assert (status, said.splitlines()) == (0, [*expected.values()])
    assert job(2).ended["doctor in a file"] == ("", 0)
    ranks = job(2).report("doctor")["ranks"]
    assert [(one["rank"], one["world_size"], one["memory"]["handle"]) for one in ranks] == [
        (0, 2, "memfd"),
        (1, 2, "memfd"),
    ]
    assert len({one["pid"] for one in ranks}) == 2
