"""Code of all command lines: a run that ends on all ranks together, options, sizes as text, and facts for a report."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import mpi4py
import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import mpicomm
from mpicomm import environment
from mpicomm.api.communicator import Communicator, RankInfo
from mpicomm.devices.cuda.driver import newest_cuda
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.sizes import format_size, nbytes_of

_TOGETHER_S = 0.5
_FORWARD_S = 0.2  # an MPI launcher that is told to abort drops output that it has not forwarded yet

_device: int | str | None = None  # `_abort` names the device, and has no communicator at hand


def run(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` on every rank and exit with the status it returns.

    An error that all ranks raise together (a wrong argument, memory that cannot be shared) is printed once. A rank that
    raises an error alone prints it with its traceback and ends the whole job, because the other ranks would wait for
    ever.
    """
    private = MPI.COMM_WORLD.Dup()
    try:
        status = main()
    except KeyboardInterrupt:
        # The process dies of the signal, as a program without a handler does: it prints nothing, and the shell and
        # mpiexec see the reason.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except MpicommError as error:
        if not _all_arrive(private):
            _abort()
        if private.rank == 0:
            sys.stderr.write(f"error: {error}\n")
        status = 2 if isinstance(error, InvalidUsageError) else 1
    except Exception:
        _abort()
    sys.exit(status)


def _all_arrive(comm: MPI.Intracomm) -> bool:
    request = comm.Ibarrier()
    deadline = time.monotonic() + _TOGETHER_S
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True


def _abort() -> NoReturn:
    device = "no device yet" if _device is None else f"device {_device}"
    # One write, because lines of ranks that fail at the same time must not mix.
    sys.stderr.write(
        f"mpicomm: rank {MPI.COMM_WORLD.rank} on {socket.gethostname()} ({device}) failed\n{traceback.format_exc()}"
    )
    sys.stderr.flush()
    sys.stdout.flush()
    time.sleep(_FORWARD_S)
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH's MPI_Abort may return before the job has ended


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line on rank 0 for all ranks, so that help and errors are printed once. Collective."""
    outcome: Any = None
    if MPI.COMM_WORLD.rank == 0:
        try:
            outcome = parser.parse_args()
        except SystemExit as stop:
            outcome = stop.code
        sys.stdout.flush()
    outcome = MPI.COMM_WORLD.bcast(outcome)
    if isinstance(outcome, argparse.Namespace):
        return outcome
    sys.exit(outcome)


def add_communicator_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_communicator` takes."""
    parser.add_argument("-D", "--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    parser.add_argument(
        "--handle", choices=environment.HANDLES, default="auto", help="how memory is opened; default: auto"
    )


def open_communicator(device: str, handle: str) -> Communicator:
    """Return a communicator of all ranks. Collective."""
    global _device
    comm = Communicator(MPI.COMM_WORLD, device=device, handle=handle)
    _device = comm.device
    return comm


def show(*lines: str) -> None:
    """Print lines on rank 0 alone."""
    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def add_sweep_arguments(parser: argparse.ArgumentParser, *, smallest: int, factor: int) -> None:
    """Add nccl-tests' options for the sizes to measure and the numbers of iterations."""
    parser.add_argument(
        "-b", "--minbytes", type=parse_size, default=smallest, metavar="SIZE", help=f"default: {format_size(smallest)}"
    )
    parser.add_argument("-e", "--maxbytes", type=parse_size, metavar="SIZE", help="default: 64M on the cpu, 1G on GPUs")
    parser.add_argument(
        "-f", "--stepfactor", type=count_from(2), default=factor, metavar="N", help=f"default: {factor}"
    )
    parser.add_argument(
        "-n", "--iters", type=count_from(1), default=20, metavar="N", help="timed iterations; default: 20"
    )
    parser.add_argument("-w", "--warmup_iters", type=count_from(0), default=5, metavar="N", help="default: 5")


def swept_sizes(options: argparse.Namespace, comm: Communicator) -> list[int]:
    """Return the sizes that the options ask for, the largest included if the steps reach it.

    Sets ``options.maxbytes`` if the user named no largest size. Raises `InvalidUsageError` if there is no size.
    """
    if options.maxbytes is None:
        options.maxbytes = max(options.minbytes, 64 << 20 if comm.device == "cpu" else 1 << 30)
    return required_sizes(options)


def required_sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes from -b to -e. Raises `InvalidUsageError` if there is none."""
    found = sizes(options.minbytes, options.maxbytes, options.stepfactor)
    if not found:
        raise InvalidUsageError(
            f"no size to measure: -b {format_size(options.minbytes)} is above -e {format_size(options.maxbytes)}: "
            "pass a larger -e"
        )
    return found


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Return the sizes of a sweep, the largest included if the steps reach it."""
    found = []
    while smallest <= largest:
        found.append(smallest)
        smallest *= factor
    return found


def parse_size(text: str) -> int:
    """Read a size in bytes, as `nbytes_of` does; an argparse type."""
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_from(smallest: int) -> Callable[[str], int]:
    """Return an argparse type that reads a whole number not below ``smallest``."""

    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {smallest} up")
        return int(text)

    return parse_count


def output_file(text: str) -> Path:
    """Return a path, after checking that a file can be written there, before a long run; an argparse type."""
    path = Path(text).absolute()
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} exists and is no file: name another one")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {path.parent} is no directory that can be written to")
    return path


def output_file_or_stdout(text: str) -> Path | None:
    """As `output_file`; None for "-", which is standard output."""
    return None if text == "-" else output_file(text)


def write_json(path: Path, document: object) -> None:
    """Write a JSON file. It appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


_LAUNCHERS = ("mpiexec", "mpirun", "mpiexec.hydra", "orterun", "prterun", "srun")


def _launcher_has_terminal() -> bool:
    """Whether the program that started the ranks on this machine has a terminal for stderr. False if not on Linux."""
    pid = os.getppid()
    with suppress(OSError, ValueError):
        while pid > 1:
            process = Path(f"/proc/{pid}")
            if (process / "comm").read_text().strip() in _LAUNCHERS:
                return str((process / "fd/2").readlink()).startswith(("/dev/pts/", "/dev/tty"))
            # The parent is the second field after the name. The name is in parentheses and may contain any character.
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return False


def progress_line(description: str, completed: int, total: int) -> AbstractContextManager[object]:
    """Show a line on the terminal of rank 0 or its launcher, if there is one, while the block runs."""
    if MPI.COMM_WORLD.rank != 0:
        return nullcontext()
    # The stderr of a rank is a pipe to the launcher, which forwards the text. So the launcher's stderr has to be a
    # terminal.
    console = Console(stderr=True, force_terminal=_launcher_has_terminal() or None)
    if not console.is_terminal:
        return nullcontext()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        auto_refresh=False,  # its thread would take time from the rank that is being measured
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.add_task(description, completed=completed, total=total)
    return progress


def format_uuid(device_uuid: bytes) -> str | None:
    """Return a GPU's UUID as nvidia-smi writes it, ``None`` for host memory."""
    return f"GPU-{uuid.UUID(bytes=device_uuid)}" if any(device_uuid) else None


def rank_record(info: RankInfo) -> dict[str, Any]:
    """Return the description of a rank and its links, for a JSON report."""
    return {**dataclasses.asdict(info), "device_uuid": format_uuid(info.device_uuid)}


def processor() -> str:
    """Return the model name of this machine's processor and how many of its cores this process may use. Local."""
    match = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{match[1] if match else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Return the versions of the software in use, without software that is not installed. Local."""
    found: dict[str, str | None] = {
        "mpicomm": mpicomm.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "MPI": " ".join(MPI.Get_library_version().splitlines()[0].split()),
        "CuPy": _distribution_version("cupy-cuda12x", "cupy-cuda13x", "cupy"),
        "cuda-bindings": _distribution_version("cuda-bindings"),
        "CUDA driver": ".".join(map(str, newest_cuda() or ())) or None,
        "NVIDIA kernel module": _kernel_module_version(),
        "Linux": platform.release(),
    }
    return {name: version for name, version in found.items() if version is not None}


def _distribution_version(*names: str) -> str | None:
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _kernel_module_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\d+\.[\d.]+", text)  # "... Open Kernel Module for x86_64  580.65.06  Release Build ..."
    return match[0] if match else None
