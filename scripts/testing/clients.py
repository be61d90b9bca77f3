"""Run unchanged programs of others on Communicators, and compare with plain mpi4py.

    python scripts/testing/clients.py [--ranks 2,3] [--cupy]

The programs are mpi4py's own tests and demos, the tests of pylops-mpi, mpiarray and Heat, and programs on mpi4py-fft,
FBPIC, pySDC, torch-harmonics and qokit. client_sources.py fetches them, except Heat: put a checkout of its repository
into .clients/heat-VERSION. Heat and torch-harmonics need PyTorch, qokit needs GPUs.
Each program runs twice on the same number of ranks: by `python -m mpi4py` and by `python -m mpicomm`. A program, or a
test in it, that passes on mpi4py must pass on mpicomm, and a demo must print the same numbers. With --cupy the tests on
mpicomm also have CuPy's arrays, and need a GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from client_sources import CLIENTS, VERSIONS, needs_of, source_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 900


@dataclass(frozen=True)
class Program:
    """A program of a source package, one of its modules, or a program of ours that uses it."""

    path: str
    """From the folder of the package on, or from the root."""
    arguments: tuple[str, ...] = ()
    """``{source}`` in them is the folder of the package."""
    module: tuple[str, ...] = ()
    """``-m`` and the module that runs ``path``, with its arguments."""
    stdin: str = ""
    ranks: int | None = None
    """The only number of ranks that it runs on, if there is one."""
    timed: bool = False
    """Whether its numbers are times, which differ from run to run."""
    on_gpu: tuple[str, ...] = ()
    """The arguments for device arrays."""
    variables_on_gpu: tuple[tuple[str, str], ...] = ()
    """The environment for device arrays."""
    package: str = "mpi4py"
    has_needs: bool = False
    """Whether it needs other packages, too."""

    def __str__(self) -> str:
        return " ".join((*self.module, self.path, *self.arguments)).strip()


# MPI.File, and windows of host memory, take no device memory.
_ON_GPU = ("--cupy", "-e", "test_io", "-e", "test_rma")
HEAT = CLIENTS / f"heat-{VERSIONS['heat']}"


def _tests(pattern: str, *options: str) -> Program:
    return Program("test/main.py", ("-q", *options, "-i", pattern), timed=True, on_gpu=_ON_GPU)


PROGRAMS = (
    *(_tests(name) for name in ("cco_buf", "cco_nb", "cco_pr", "cco_vec", "cco_obj", "cco_ngh")),
    *(_tests(name) for name in ("test_p2p", "test_request", "test_win", "test_rma", "test_io", "test_file")),
    Program(
        str(ROOT / "scripts/testing/device_windows.py"),
        ("{source}/test/main.py", "-q", "-i", "test_rma"),
        timed=True,
        on_gpu=("--cupy",),
    ),
    # One of its tests has ranks with neighbours that do not name them. MPI does not check this, mpicomm refuses it.
    _tests("test_comm", "-x", "testDistgraphcommAdjacent"),
    # In one of its tests a C program makes the object of a communicator, and knows only the handle of MPI.
    _tests("test_objmodel", "-x", "testCAPI"),
    *(_tests(name) for name in ("test_pickle", "test_handle", "test_group", "test_status", "test_attributes")),
    *(_tests(name) for name in ("test_errhandler", "test_subclass", "test_util", "test_threads")),
    Program("demo/helloworld.py"),
    Program("demo/compute-pi/cpi-cco.py", stdin="1000\n0\n"),
    Program("demo/compute-pi/cpi-rma.py", stdin="1000\n0\n"),
    Program("demo/reductions/test_reductions.py", ("-q",), timed=True),
    Program("demo/sequential/test_seq.py"),
    Program("demo/threads/sendrecv.py"),
    Program("demo/nxtval/nxtval-threads.py", timed=True),
    Program("demo/nxtval/nxtval-onesided.py", timed=True),
    Program("demo/nxtval/nxtval-mpi3.py", timed=True),
    *(Program(f"demo/osu_{name}.py", ranks=2, timed=True) for name in ("latency", "bw", "bibw", "multi_lat")),
    *(
        Program(f"demo/osu_{name}.py", timed=True)
        for name in ("allgather", "alltoall", "alltoallv", "barrier", "bcast", "gather", "scatter")
    ),
    Program("demo/mandelbrot/mandelbrot.py", timed=True),
    Program("demo/futures/test_futures.py", ("-q",), ("-m", "mpi4py.futures"), timed=True),
    *(
        Program("", (), ("-m", "mpi4py.bench", *command), timed=True)
        for command in (("helloworld",), ("ringtest", "-n", "256", "-l", "8"), ("pingpong", "--max-size", "1048576"))
    ),
    Program(
        str(ROOT / "scripts/testing/pencil_fft.py"),
        ("{source}/mpi4py_fft/pencil.py",),
        on_gpu=("--cupy",),
        package="mpi4py-fft",
    ),
    Program(
        "tests",
        # Its conftest.py changes the names of tests in a way that pytest does not allow. Its FFTs need FFTW.
        ("--with-mpi", "-q", "--noconftest", "--ignore", "{source}/tests/test_ffts.py"),
        ("-m", "pytest"),
        timed=True,
        variables_on_gpu=(("TEST_CUPY_PYLOPS", "1"), ("PYLOPS_MPI_CUDA_AWARE", "1"), ("NCCL_PYLOPS_MPI", "0")),
        package="pylops-mpi",
        has_needs=True,
    ),
    Program(
        "src/mpiarray/tests/unit",
        # These two need astropy and xarray.
        ("-q", *(f"--ignore={{source}}/src/mpiarray/tests/unit/test_{name}.py" for name in ("units", "xarray"))),
        ("-m", "pytest"),
        timed=True,
        on_gpu=("-p", "scripts.testing.cunumpy_on_gpus"),
        variables_on_gpu=(("CUNUMPY_BACKEND", "cupy"),),
        package="mpiarray",
        has_needs=True,
    ),
    *(
        Program(
            f"tests/{folder}",
            # One of its tests exchanges 4 GB byte by byte.
            ("-q", "-W", "ignore", "-k", "not large_count_limit"),
            ("-m", "pytest"),
            ranks=2,
            timed=True,
            variables_on_gpu=(("HEAT_TEST_USE_DEVICE", "gpu"), ("MPIR_CVAR_ENABLE_HCOLL", "1")),
            package="heat",
            has_needs=True,
        )
        for folder in ("core", "cluster", "decomposition", "fft", "graph", "nn", "optim", "preprocessing", "sparse")
        # Its source package has no tests: they take a checkout of its repository.
        if (HEAT / f"tests/{folder}").exists()
    ),
    Program(
        str(ROOT / "scripts/testing/fbpic_wake.py"),
        variables_on_gpu=(("FBPIC_ENABLE_GPUDIRECT", "1"),),
        package="fbpic",
        has_needs=True,
    ),
    Program(str(ROOT / "scripts/testing/sdc_sweeps.py"), on_gpu=("--gpu",), package="pySDC", has_needs=True),
    Program(str(ROOT / "scripts/testing/harmonics.py"), package="torch-harmonics", has_needs=True),
    Program(str(ROOT / "scripts/testing/qaoa.py"), package="qokit", has_needs=True),
    # The examples of MPI's first standard.
    *(
        Program(f"demo/mpi-ref-v1/ex-{chapter}.{number:02}.py")
        for chapter, numbers in ((2, (1, 8, 16, 29, 32, 34, 35)), (3, (*range(1, 10), 11, 12, 13)))
        for number in numbers
    ),
)


def main() -> int:
    """Run all programs; return 1 if one fails only on Communicators."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks, with commas between them")
    parser.add_argument("--cupy", action="store_true", help="test CuPy's arrays on mpicomm, too")
    parser.add_argument("--package", help="only the programs of this package")
    options = parser.parse_args()
    ranks = [int(number) for number in options.ranks.split(",")]
    failed = 0
    for program in [each for each in PROGRAMS if options.package in (None, each.package)]:
        for nprocs in [program.ranks] if program.ranks else ranks:
            plain = _run("mpi4py", program, nprocs)
            ours = _run("mpicomm", program, nprocs, on_gpu=options.cupy)
            agreed_error = _agreed_error(program, plain, ours)
            failed += agreed_error.startswith("FAILED")
            sys.stdout.write(f"{program} on {nprocs} ranks: {agreed_error}\n")
            sys.stdout.flush()
    return 1 if failed else 0


def _run(module: str, program: Program, nprocs: int, *, on_gpu: bool = False) -> subprocess.CompletedProcess[str]:
    sys.path.insert(0, str(ROOT))
    from tests.helpers.jobs.mpiexec import environment, mpiexec_command, sharing_of_cores

    source = ROOT if Path(program.path).is_absolute() and program.has_needs else source_of(program.package)
    path = [str(source / program.path)] if program.path else []
    arguments = [argument.format(source=source) for argument in program.arguments]
    more = program.on_gpu if on_gpu else ()
    command = mpiexec_command(nprocs, "-m", module, *program.module, *path, *arguments, *more)
    variables = dict(program.variables_on_gpu if on_gpu else ())
    if program.has_needs:
        variables["PYTHONPATH"] = f"{ROOT}:{needs_of(program.package)}"
    try:
        return subprocess.run(
            command,
            cwd=(source / program.path).parent,
            env={**sharing_of_cores(nprocs), **environment(**variables)},
            input=program.stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, 124, str(late.stdout or ""), f"it ran longer than {LIMIT_S} s")


def _agreed_error(
    program: Program, plain: subprocess.CompletedProcess[str], ours: subprocess.CompletedProcess[str]
) -> str:
    failed_tests, failed_ours = (set(re.findall(r"FAILED (\S+::\w+)", each.stdout)) for each in (plain, ours))
    if plain.returncode and not failed_tests:
        return f"left out, because it fails on mpi4py, too: exit code {plain.returncode}"
    if failed_ours and failed_ours <= failed_tests:
        return f"passed, but for {len(failed_tests)} tests that fail on mpi4py, too"
    if ours.returncode:
        return f"FAILED: exit code {ours.returncode}\n{ours.stdout[-1000:]}{ours.stderr[-3000:]}"
    numbers = [sorted(re.findall(r"[-+0-9.eE]*[0-9]", each.stdout)) for each in (plain, ours)]
    if not program.timed and numbers[0] != numbers[1]:
        return f"FAILED: other numbers\n{plain.stdout[-500:]}\n{ours.stdout[-500:]}"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
