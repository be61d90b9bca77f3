"""Measure the gain of programs of others.

Run `python scripts/measuring/measure_programs.py --heat DIR --ptypy DIR --pylops-mpi DIR --fbpic DIR`. Each DIR is a
checkout of the program's repository. A benchmark or an example in it runs on ``--ranks`` GPUs: Heat's `benchmarks/cb`,
ptypy's `benchmark/ptypy_moonflower_script_cupy.py` or PyLops-MPI's `tutorials_cupy/poststack_cupy.py`. FBPIC runs
`scripts/testing/fbpic_wake.py`.

The program runs in two ways, in turns. With `python -m mpi4py` it copies its GPU arrays through the host, as it does
for an MPI that knows no GPU. With `python -m mpicomm` a variable tells it that MPI is CUDA-aware. Times are seconds:
the fastest of ``--repeat`` jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "TIMES "
WAYS = ("staged", "mpicomm")
# Variables that make a program take MPI for CUDA-aware, and variables that make it copy through the host.
VARIABLES: dict[str, dict[str, dict[str, str]]] = {
    "heat": {"mpicomm": {"MPIR_CVAR_ENABLE_HCOLL": "1"}, "staged": {}},
    "ptypy": {
        "mpicomm": {"OMPI_MCA_opal_cuda_support": "true", "PTYPY_USE_CUDAMPI": "1"},
        "staged": {"PTYPY_USE_MPI": "1"},
    },
    "pylops_mpi": {"mpicomm": {"PYLOPS_MPI_CUDA_AWARE": "1"}, "staged": {"PYLOPS_MPI_CUDA_AWARE": "0"}},
    "fbpic": {"mpicomm": {"FBPIC_ENABLE_GPUDIRECT": "1"}, "staged": {}},
}
SOURCES = {
    "heat": ("Heat", "benchmarks/cb"),
    "ptypy": ("ptypy", "benchmark/ptypy_moonflower_script_cupy.py"),
    "pylops_mpi": ("PyLops-MPI", "tutorials_cupy/poststack_cupy.py"),
    "fbpic": ("FBPIC", "400 steps of a laser wake"),
}
times: dict[str, float] = {}


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, and add its time on all ranks and GPUs to ``times``."""
    import cupy  # after the program has chosen its GPU
    from mpi4py import MPI

    @wraps(call)
    def run(*arguments: Any, **options: Any) -> Any:
        def now() -> float:
            cupy.cuda.Device().synchronize()
            MPI.Intracomm.barrier(MPI.COMM_WORLD)
            return time.perf_counter()

        began = now()
        result = call(*arguments, **options)
        times[name] = times.get(name, 0.0) + now() - began
        return result

    return run


def run_heat(folder: Path) -> None:
    """Run Heat's benchmarks; a module stands for `perun`, which only times them."""
    perun: Any = ModuleType("perun")
    perun.monitor = lambda: lambda function: timed(function.__name__, timed("all", function))
    sys.modules["perun"] = perun
    sys.path[:0] = [str(folder), str(folder / "benchmarks" / "cb")]
    heat: Any = import_module("heat")
    heat.use_device("gpu")
    heat.random.seed(12345)
    for name, run in (("linalg", "linalg"), ("manipulations", "manipulation"), ("cluster", "cluster")):
        getattr(import_module(name), f"run_{run}_benchmarks")()


def run_ptypy(folder: Path) -> None:
    """Run ptypy's benchmark, and time it and its reductions."""
    sys.path.insert(0, str(folder))
    multi_gpu: Any = import_module("ptypy.accelerate.cuda_cupy.multi_gpu")
    cls: Any
    for cls in (multi_gpu.MultiGpuCommunicatorMpi, multi_gpu.MultiGpuCommunicatorCudaMpi):
        cls.allReduceSum = timed("sums over GPUs", cls.allReduceSum)
    cls = import_module("ptypy.core").Ptycho
    cls.run = timed("all", cls.run)
    sys.argv = ["benchmark", "-n", "800", "-s", "256", "-i", "100"]
    runpy.run_path(str(folder / SOURCES["ptypy"][1]), run_name="__main__")


def run_pylops_mpi(folder: Path) -> None:
    """Run PyLops-MPI's tutorial, with the times of its solvers."""
    os.environ["MPLBACKEND"] = "Agg"
    sys.path.insert(0, str(folder))
    pylops_mpi: Any = import_module("pylops_mpi")
    solvers = pylops_mpi.optimization.basic
    for name in ("cg", "cgls"):
        setattr(solvers, name, timed(name, timed("all", getattr(solvers, name))))
    os.chdir(folder / "tutorials_cupy")
    runpy.run_path("poststack_cupy.py", run_name="__main__")


def run_fbpic(folder: Path) -> None:
    """Run FBPIC's laser wake. Its first steps compile, and only the last ones count."""
    sys.path.insert(0, str(folder))
    simulation: Any = import_module("fbpic.main").Simulation
    step = timed("all", simulation.step)

    def stepped(*arguments: Any, **options: Any) -> Any:
        times.clear()
        return step(*arguments, **options)

    simulation.step = stepped
    runpy.run_path(str(Path(__file__).parents[1] / "testing/fbpic_wake.py"), run_name="__main__")


RUNS = {"heat": run_heat, "ptypy": run_ptypy, "pylops_mpi": run_pylops_mpi, "fbpic": run_fbpic}


def job(program: str, way: str, folder: Path, ranks: int) -> dict[str, Any]:
    """Run a program in a new job; return the times and the GPUs that its first rank prints."""
    words = ["mpirun", "-np", str(ranks), sys.executable, "-m", "mpi4py" if way == "staged" else "mpicomm", __file__]
    env = {**os.environ, **VARIABLES[program][way]}
    done = subprocess.run(
        [*words, "--inside", program, str(folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not told:
        sys.exit(f"{program}, {way}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(told[-1].partition(MARK)[2])
    return found


def inside(program: str, folder: Path) -> None:
    """Run a program in a rank; the first rank tells its times and, if it has mpicomm, the GPUs."""
    import cupy
    from mpi4py import MPI

    cupy.cuda.Device(MPI.COMM_WORLD.rank).use()
    RUNS[program](folder)
    comm: Any = MPI.COMM_WORLD
    ranks = None
    if "mpicomm" in sys.modules:
        from mpicomm.cli.options import rank_record

        ranks = comm.gather(rank_record(comm.describe()))
    if comm.rank == 0:
        sys.stdout.write(MARK + json.dumps({"times": times, "ranks": ranks}, default=str) + "\n")


def main() -> None:
    """Measure the programs that are named, and write a table."""
    from result_file import Table, add_tables, hardware

    from mpicomm.cli.arguments import output_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in SOURCES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, metavar="DIR")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    rows: list[list[Any]] = []
    where = ""
    for name, (title, source) in SOURCES.items():
        folder = getattr(options, name)
        if folder is None:
            continue
        best: dict[str, dict[str, float]] = {way: {} for way in WAYS}
        for way in WAYS * options.repeat:
            told = job(name, way, folder.resolve(), options.ranks)
            where = hardware(told["ranks"]) if told["ranks"] else where
            for part, seconds in told["times"].items():
                best[way][part] = min(seconds, best[way].get(part, seconds))
        for part, staged in best["staged"].items():
            ours = best["mpicomm"][part]
            rows.append([title, source, part, round(staged, 3), round(ours, 3), round(staged / ours, 2)])
            sys.stdout.write("\t".join(map(str, rows[-1])) + "\n")
            sys.stdout.flush()
    columns = ["program", "its own", "part", "staged, s", "mpicomm, s", "staged / mpicomm"]
    if options.json is not None:
        title = f"Programs of others, {options.ranks} ranks"
        text = "Staged: the program copies its GPU arrays through the host, as it does for an MPI that knows no GPU."
        named = " ".join(f"--{name.replace('_', '-')} DIR" for name in SOURCES if getattr(options, name))
        command = (
            f"python scripts/measuring/measure_programs.py {named} --ranks {options.ranks} --repeat {options.repeat}"
        )
        add_tables(options.json, [Table("Calls", title, where, columns, rows, text=text, command=command)])


if "--inside" in sys.argv:
    inside(sys.argv[-2], Path(sys.argv[-1]))
else:
    main()
