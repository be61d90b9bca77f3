"""Examples give the results of one rank, find wrong results, and say what is missing, as far as the host goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.jobs.pace import stretched

EXAMPLES = ROOT / "examples"
UNEVEN, SQUARE = 3, 4
"""Numbers of ranks: one divides no power of two, and the other one is a grid of two by two."""
COMPARED = {
    "producer_consumers": r"2 of 3 ranks read 12 batches of 2 MiB in 3 slots of rank 0, in place: ",
    "pipeline": r"3 ranks, 8 micro-batches: \S+ ms, \d+% of it idle ",
    "histogram": r"3 ranks counted 40 chunks of 50000 numbers in 4096 bins of all ranks\nchunks of the ranks: ",
    "work_stealing": r"static division of 64 tasks on 3 ranks: [^;]+; 0 stolen\nstealing of 64 tasks on ",
    "fft_transpose": r"3 ranks transformed 30 x 32 x 20 numbers forward and back in \S+ ms\n"
    r"one turn takes \S+ ms, and \S+ ms with packing and Alltoallv\n",
}
"""The programs that compare with one rank, and their first words on three ranks."""
ON_GRIDS = ("halo_exchange", "jacobi", "train_reproducible")
SLEEP = f'__import__("time").sleep({stretched(0.1) / 3})'  # longer than the other rank needs until it reads
EDGES = "[before, counts, displacements, {}]"
BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "empty slots": ("producer_consumers", {"ring.wait_signal(PRODUCER)": "pass"}),
    "full slots": (
        "producer_consumers",
        {
            # The producer writes its last batch before a consumer reads the first one.
            "ring.wait_signal(consumer)": "pass",
            "= load(number)": "= load(number); number < BATCHES - 1 or comm.Barrier()",
            "ring.wait_signal(PRODUCER)": "number or comm.Barrier(); ring.wait_signal(PRODUCER)",
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
    "swapped blocks": ("fft_transpose", {"from_=1, to=0)": "from_=mpicomm.Split(1, ranks=[1, 0]), to=0)"}),
    "no edges": (
        "jacobi",
        {f"    grid.Neighbor_alltoallw({EDGES.format('sent')}, {EDGES.format('received')})\n": ""},
    ),
    "wrong edges": ("jacobi", {"(ABOVE, above, BELOW, below),": "(BELOW, above, ABOVE, below),"}),
    "no wait": ("jacobi", {"        planes.wait_signal(peer)\n": ""}),
}
SHORTER = {
    "producer_consumers": {"BATCHES, SLOTS = 60, 3": "BATCHES, SLOTS = 12, 3"},
    "work_stealing": {"STEPS, STRIDE = 400, 20": "STEPS, STRIDE = 100, 20"},
    "fft_transpose": {"shape = (90, 128, 100)": "shape = (30, 32, 20)"},
    "pipeline": {"samples, width = 256, 512": "samples, width = 64, 128"},
}
"""Programs need neither run long nor compute much to compare their results, and to find wrong ones."""
FOUND = {"jacobi": "one rank computes other heat"}
NEED_GPUS = {
    "gpu_allreduce": "CuPy and a GPU on every rank: .+; examples/stock_mpi4py.py runs without",
    "ring_sum": "CuPy and a GPU on every rank: .+; examples/peer_memory.py runs without",
    "own_kernel_numba": "Numba, CuPy and a GPU on every rank: .+",
    "own_kernel_triton": r"\w+, .*CuPy and a GPU on every rank: .+",
}
EXTRAS = {"train_torch": "torch,examples", "tensor_parallel": "torch", "train_cupy": "examples", "experts": "examples"}
WITHOUT_MPICOMM = {
    "import mpicomm  # <- added\n": "",
    "comm = mpicomm.Communicator(MPI.COMM_WORLD)  # <- was: comm = MPI.COMM_WORLD\n": "comm = MPI.COMM_WORLD\n",
}
# An error that all ranks raise must not end the job.
CAUGHT = """
import runpy, sys
try:
    runpy.run_path({!r}, run_name="__main__")
except AssertionError as error:
    sys.exit(str(error))
"""
WITHOUT_PACKAGES = """
import runpy, sys
missing = dict.fromkeys(("matplotlib", "sklearn", "sklearn.datasets", "torch"))
sys.modules.update(missing)  # so that their imports fail, and no program finds them
try:
    runpy.run_path({!r}, run_name="__main__")
finally:
    for name in missing:
        del sys.modules[name]
"""


def example(name: str) -> Path:
    return EXAMPLES / f"{name}.py"


def changed(name: str, changes: dict[str, str]) -> str:
    """Return the source of an example with other lines."""
    source = example(name).read_text()
    for line, other in changes.items():
        assert source.count(line) == 1, line
        source = source.replace(line, other)
    return source


def programs(nprocs: int, folder: Path) -> dict[str, tuple[str | Path, ...]]:
    """Return all programs for so many ranks by their names, with their arguments."""

    def written(name: str, source: str) -> Path:
        (folder / f"{name}.py").write_text(source)
        return folder / f"{name}.py"

    chosen: dict[str, tuple[str | Path, ...]]
    if nprocs == 2:
        chosen = {name: (example(name),) for name in NEED_GPUS}
        for name, (program, changes) in BROKEN.items():
            path = written(name, changed(program, SHORTER.get(program, {}) | changes))
            chosen[name] = (written(f"{name} is caught", CAUGHT.format(str(path))),)
        return chosen
    original = changed("stock_mpi4py", WITHOUT_MPICOMM)
    assert "mpicomm." not in original
    chosen = {"original": (written("original", original),)}
    names = {1: ON_GRIDS, UNEVEN: ("halo_exchange", *COMPARED), SQUARE: ON_GRIDS}[nprocs]
    chosen |= {name: (example(name),) for name in ("stock_mpi4py", *names)}
    if nprocs == UNEVEN:
        chosen |= {name: (written(name, changed(name, changes)),) for name, changes in SHORTER.items()}
    if nprocs == 1:
        for name in (*COMPARED, *EXTRAS):
            alone = written(f"{name} without packages", WITHOUT_PACKAGES.format(str(example(name))))
            chosen[f"{name} alone"] = (alone, *(["--plot=picture.svg"] if name in COMPARED else []))
    return chosen


Ended = Callable[[int], dict[str, tuple[str, int]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Gives output and exit code of each program for a number of ranks, from one job."""

    @cache
    def run(nprocs: int) -> dict[str, tuple[str, int]]:
        chosen = programs(nprocs, tmp_path_factory.mktemp("examples"))
        found, said = run_named(nprocs, chosen, MPICOMM_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
        assert said == ""
        return found

    return run


def output_of(ended: Ended, nprocs: int, name: str) -> str:
    """Return the output of a program that ends well."""
    output, code = ended(nprocs)[name]
    assert code == 0, output
    return output


def grid(nprocs: int) -> str:
    return " x ".join(map(str, MPI.Compute_dims(nprocs, 2)))


@pytest.mark.parametrize("nprocs", [1, SQUARE, UNEVEN])
def test_stock_program_gives_the_results_of_mpi4py(ended: Ended, nprocs: int) -> None:
    for name in ("stock_mpi4py", "original"):
        assert output_of(ended, nprocs, name).startswith(f"{nprocs} ranks: eigenvalue 1.000000000 after ")


@pytest.mark.parametrize("nprocs", [1, SQUARE, UNEVEN])
def test_halo_exchange_computes_the_results_of_one_rank(ended: Ended, nprocs: int) -> None:
    said = output_of(ended, nprocs, "halo_exchange")
    assert re.fullmatch(rf"an exchange alone takes .+\n{grid(nprocs)} ranks: steps of .+\n?", said), said
    assert said.endswith(" the same heat as one rank computes\n")


@pytest.mark.parametrize("nprocs", [1, SQUARE])
def test_heat_equals_the_heat_of_one_rank_in_every_way(ended: Ended, nprocs: int) -> None:
    first, *rows = output_of(ended, nprocs, "jacobi").splitlines()
    assert first == f"{grid(nprocs)} ranks of 60 x 90 cells: the heat of one rank, bit for bit"
    names = ("Neighbor_alltoallw", "Sendrecv", "slices of peers' memory", "one kernel for all")
    for name, row in zip(names, rows, strict=True):
        assert re.fullmatch(rf"{name} +(\d+\.\d us a step|needs a GPU on every rank)", row)


def test_losses_do_not_depend_on_the_number_of_ranks(ended: Ended) -> None:
    said = [output_of(ended, nprocs, "train_reproducible") for nprocs in (1, SQUARE)]
    assert all("every bit as of one rank" in each for each in said)
    assert len({each.rpartition(" ")[2] for each in said}) == 1, said


@pytest.mark.parametrize("name", COMPARED)
def test_ranks_compute_the_results_of_one_rank(ended: Ended, name: str) -> None:
    output = output_of(ended, UNEVEN, name)
    assert re.match(COMPARED[name], output), output
    assert re.search(r" differ by at most \S+; 1e-\d+ is allowed\n$", output), output


def test_programs_find_wrong_results(ended: Ended) -> None:
    for mistake, (name, _) in BROKEN.items():
        output, code = ended(2)[mistake]
        assert code != 0 and FOUND.get(name, " is allowed\n") in output, (mistake, output)


def test_programs_say_what_is_missing(ended: Ended) -> None:
    for name, needs in NEED_GPUS.items():
        assert re.fullmatch(f"this example needs {needs}\n", output_of(ended, 2, name))
    for name in COMPARED:
        assert ended(1)[f"{name} alone"] == ("--plot needs matplotlib: pip install matplotlib\n", 1)
    for name, extra in EXTRAS.items():
        output, code = ended(1)[f"{name} alone"]
        assert code == 1 and "None in sys.modules" in output and f'pip install -e ".[{extra}]"' in output


def test_the_list_of_examples_names_all_programs() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
