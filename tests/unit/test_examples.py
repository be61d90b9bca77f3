"""Examples with kernels of users, as far as they go on the host."""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.jobs.in_turn import run_in_turn
from tests.helpers.jobs.mpiexec import ROOT, run_job
from tests.helpers.jobs.pace import stretched

UNEVEN, SQUARE = 3, 4
"""Numbers of ranks: one divides no power of two, and the other one is a grid of two by two."""
STOCK = ROOT / "examples" / "stock_mpi4py.py"
COMPARED = {
    "producer_consumers": r"{consumers} of {nprocs} ranks read 60 batches of 2 MiB in 3 slots of rank 0, in place: ",
    "pipeline": r"{nprocs} ranks, 8 micro-batches: \S+ ms, \d+% of it idle ",
    "histogram": r"{nprocs} ranks counted 40 chunks of 50000 numbers in 4096 bins of all ranks\nchunks of the ranks: ",
    "work_stealing": r"static division of 64 tasks on {nprocs} ranks: [^;]+; 0 stolen\nstealing of 64 tasks on ",
    "fft_transpose": r"{nprocs} ranks transformed 90 x 128 x 100 numbers forward and back in \S+ ms\n"
    r"one turn takes \S+ ms, and \S+ ms with packing and Alltoallv\n",
}
"""The programs that compare with one rank, and their first words."""
SLEEP = f'__import__("time").sleep({stretched(0.1) / 3})'  # longer than the other rank needs until it reads
CHANGED = {
    "import mpicomm  # <- added\n": "",
    "comm = mpicomm.Communicator(MPI.COMM_WORLD)  # <- was: comm = MPI.COMM_WORLD\n": "comm = MPI.COMM_WORLD\n",
}


@functools.cache
def said(nprocs: int) -> dict[str, str]:
    """Return the programs' output on so many ranks, by their names; "original" is the stock program without mpicomm."""
    source = STOCK.read_text()
    for line, was in CHANGED.items():
        assert source.count(line) == 1
        source = source.replace(line, was)
    assert "mpicomm." not in source
    with tempfile.TemporaryDirectory() as directory:
        original = Path(directory, "original.py")
        original.write_text(source)
        names = ["halo_exchange", *(COMPARED if nprocs == UNEVEN else ())]
        programs = [original, STOCK, *(ROOT / f"examples/{name}.py" for name in names)]
        job, ended = run_in_turn(nprocs, *([program] for program in programs), MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr) == (0, "")
    assert [code for _, code in ended] == [0] * len(programs)
    return {program.stem: output for program, (output, _) in zip(programs, ended, strict=True)}


@pytest.mark.parametrize("nprocs", [1, UNEVEN, SQUARE])
def test_stock_program_gives_the_results_of_mpi4py(nprocs: int) -> None:
    for name in ("stock_mpi4py", "original"):
        assert said(nprocs)[name].startswith(f"{nprocs} ranks: eigenvalue 1.000000000 after ")


@pytest.mark.parametrize("nprocs", [1, UNEVEN, SQUARE])
def test_halo_exchange_computes_the_results_of_one_rank(nprocs: int) -> None:
    grid = " x ".join(map(str, MPI.Compute_dims(nprocs, 2)))
    exchange, steps = said(nprocs)["halo_exchange"].splitlines()
    assert exchange.startswith("an exchange alone takes ")
    assert steps.startswith(f"{grid} ranks: steps of ")
    assert said(nprocs)["halo_exchange"].endswith(" the same heat as one rank computes\n")


def test_losses_do_not_depend_on_the_number_of_ranks() -> None:
    hashes = set()
    for nprocs in (1, 2, SQUARE):
        job, ((output, code),) = run_in_turn(nprocs, [ROOT / "examples/train_reproducible.py"], MPICOMM_DEVICE="cpu")
        assert code == 0 and "every bit as of one rank" in output, (output, job.stderr)
        hashes.add(output.rpartition(" ")[2])
    assert len(hashes) == 1, hashes


def test_the_list_of_examples_names_all_programs() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", COMPARED)
def test_ranks_compute_the_results_of_one_rank(name: str) -> None:
    output = said(UNEVEN)[name]
    assert re.match(COMPARED[name].format(nprocs=UNEVEN, consumers=UNEVEN - 1), output), output
    assert re.search(r" differ by at most \S+; 1e-\d+ is allowed\n$", output), output


BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "empty slots": ("producer_consumers", {"ring.wait_signal(PRODUCER)": "pass"}),
    "full slots": (
        "producer_consumers",
        {
            "ring.wait_signal(consumer)": "pass",
            "ring.wait_signal(PRODUCER)": f"{SLEEP}; ring.wait_signal(PRODUCER)",
        },
    ),
    "copies": ("producer_consumers", {"batches[number % SLOTS]": "batches[number % SLOTS].copy()"}),
    "no activations": (
        "pipeline",
        {"arrived.wait_signal(comm.rank - 1)": "pass", "arrived.put(": f"{SLEEP}; arrived.put("},
    ),
    "no derivatives": (
        "pipeline",
        {"returned.wait_signal(comm.rank + 1)": "pass", "returned.put(": f"{SLEEP}; returned.put("},
    ),
    "counts that replace others": ("histogram", {"rank, op=MPI.SUM": "rank, op=MPI.REPLACE"}),
    "tasks that no rank takes": ("work_stealing", {'xp.ones(1, "int64")': 'xp.full(1, 2, "int64")'}),
    "swapped blocks": (
        "fft_transpose",
        {"from_=1, to=0)": "from_=mpicomm.Split(1, ranks=[1, 0]), to=0)"},
    ),
}


def test_programs_find_wrong_results(tmp_path: Path) -> None:
    programs = []
    for mistake, (name, changes) in BROKEN.items():
        source = (ROOT / f"examples/{name}.py").read_text()
        for line, broken in changes.items():
            assert source.count(line) == 1
            source = source.replace(line, broken)
        programs.append(tmp_path / f"{mistake}.py")
        programs[-1].write_text(source)
    job, ended = run_in_turn(2, *([program] for program in programs), MPICOMM_DEVICE="cpu")
    for mistake, (output, code) in zip(BROKEN, ended, strict=True):
        assert code != 0 and " is allowed\n" in output, (mistake, output, job.stderr)


def last_words(folder: Path, *programs: list[str]) -> list[str]:
    """Run programs that refuse to run, one after the other on one rank; return the texts that they exit with."""
    driver = folder / "driver.py"
    driver.write_text(f"""
import runpy, sys
for program, *options in {programs!r}:
    sys.argv = ["{ROOT}/examples/" + program + ".py", *options]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code)
""")
    job = run_job(1, str(driver), MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr) == (0, "")
    return job.stdout.splitlines()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is there")
def test_a_picture_without_matplotlib_is_refused(tmp_path: Path) -> None:
    said = last_words(tmp_path, *([name, "--plot=picture.svg"] for name in COMPARED))
    assert said == ["--plot needs matplotlib: pip install matplotlib"] * len(COMPARED)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn has the digits")
def test_matplotlib_is_only_for_pictures(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none here')")
    program = str(ROOT / "examples/train_cupy.py")
    result = run_job(1, program, "--epochs=1", PYTHONPATH=f"{tmp_path}:{ROOT}", MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")


def test_gpu_program_says_what_is_missing() -> None:
    others = {"gpu_allreduce": "stock_mpi4py", "ring_sum": "peer_memory"}
    programs = ([ROOT / f"examples/{name}.py"] for name in others)
    job, ended = run_in_turn(2, *programs, CUDA_VISIBLE_DEVICES="", MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stderr) == (0, "")
    for (output, code), other in zip(ended, others.values(), strict=True):
        said = rf"this example needs CuPy and a GPU on every rank: .+; examples/{other}\.py runs without\n"
        assert code == 0 and re.fullmatch(said, output)


def test_programs_say_which_package_is_missing(tmp_path: Path) -> None:
    extras = {
        "train_torch": "torch,examples",
        "tensor_parallel": "torch",
        "train_cupy": "examples",
        "experts": "examples",
    }
    for package in ("torch", "sklearn"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('none here')")
    said = last_words(tmp_path, *([name] for name in extras))
    for text, of_program in zip(said, extras.values(), strict=True):
        assert "(none here)" in text and f'pip install -e ".[{of_program}]"' in text


JACOBI = ROOT / "examples/jacobi.py"
EDGES = "[before, counts, displacements, {}]"


@pytest.mark.parametrize("nprocs", [1, 4])
def test_heat_equals_the_heat_of_one_rank_in_every_way(nprocs: int) -> None:
    result = run_job(nprocs, str(JACOBI), MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    grid = " x ".join(map(str, MPI.Compute_dims(nprocs, 2)))
    first, *rows = result.stdout.splitlines()
    assert first == f"{grid} ranks of 60 x 90 cells: the heat of one rank, bit for bit"
    names = ("Neighbor_alltoallw", "Sendrecv", "slices of peers' memory", "one kernel for all")
    for name, row in zip(names, rows, strict=True):
        assert re.fullmatch(rf"{name} +(\d+\.\d us a step|needs a GPU on every rank)", row)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        (f"    grid.Neighbor_alltoallw({EDGES.format('sent')}, {EDGES.format('received')})\n", ""),
        ("(ABOVE, above, BELOW, below),", "(BELOW, above, ABOVE, below),"),
        ("        planes.wait_signal(peer)\n", ""),
    ],
    ids=["no edges", "wrong edges", "no wait"],
)
def test_wrong_heat_is_found(line: str, broken: str, tmp_path: Path) -> None:
    source = JACOBI.read_text()
    assert source.count(line) == 1
    program = tmp_path / "jacobi.py"
    program.write_text(source.replace(line, broken))
    result = run_job(2, str(program), MPICOMM_DEVICE="cpu")
    assert result.returncode != 0 and "one rank computes other heat" in result.stderr, result.stderr


@pytest.mark.parametrize("name", ["own_kernel_numba", "own_kernel_triton"])
def test_kernels_of_other_libraries_say_what_they_need(name: str) -> None:
    result = run_job(2, str(ROOT / f"examples/{name}.py"), CUDA_VISIBLE_DEVICES="", MPICOMM_DEVICE="cpu")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"this example needs \w+, .*CuPy and a GPU on every rank: .+\n", result.stdout)
