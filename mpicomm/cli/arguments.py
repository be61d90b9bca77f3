"""Options of command lines and their types, JSON files, and facts of this machine for reports.

Imports no MPI.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import mpi4py
import numpy as np

import mpicomm
from mpicomm import environment
from mpicomm.devices.cuda.driver import newest_cuda
from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import format_size, nbytes_of


@dataclass(frozen=True)
class JobLaunch:
    """The launcher of this process, as its environment variables describe it. Without a launcher ``size`` is 0."""

    family: str = ""
    """"MPICH" (Hydra, Intel MPI), "Open MPI" or "Slurm"."""
    rank: int = 0
    size: int = 0
    local_size: int = 1


def launch_of(variables: Mapping[str, str]) -> JobLaunch:
    """Return the launcher that these environment variables describe."""
    for family, size, rank, local_size in (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPICH", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
        # These are variables of the job step. A batch script, which is one process, also has SLURM_NTASKS.
        ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        ranks = _count(variables.get(size, ""))
        if ranks:
            # Slurm writes "8(x2)" for two nodes with 8 tasks each.
            local = _count(variables.get(local_size, "").partition("(")[0])
            return JobLaunch(family, _count(variables.get(rank, "")) or 0, ranks, local or 1)
    return JobLaunch()


def _count(text: str) -> int | None:
    """Return the number in a variable, which may be of another process and hold anything; None for no such number."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


def processor() -> str:
    """Return the model name of this machine's processor and the number of cores that this process may use. Local."""
    match = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{match[1] if match else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Return the versions of installed software, and of MPI if it is loaded. Local."""
    mpi = sys.modules.get("mpi4py.MPI")
    found: dict[str, str | None] = {
        "mpicomm": mpicomm.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "MPI": " ".join(mpi.Get_library_version().splitlines()[0].split()) if mpi else None,
        "CuPy": distribution_version("cupy-cuda12x", "cupy-cuda13x", "cupy"),
        "cuda-bindings": distribution_version("cuda-bindings"),
        "CUDA driver": ".".join(map(str, newest_cuda() or ())) or None,
        "NVIDIA kernel module": _kernel_module_version(),
        "Linux": platform.release(),
    }
    return {name: version for name, version in found.items() if version is not None}


def distribution_version(*names: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None. Local."""
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


T = TypeVar("T")


def command_parser(
    name: str, description: str, *, json: Literal["file", "output", ""] = "file", peers: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options of a `Communicator`, and with these.

    ``json`` adds an option for a "file" of results, or for JSON in place of all "output", in a file or on standard
    output ("-"). ``peers`` are other libraries to compare with.
    """
    prog = f"python -m mpicomm.{name}"
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument_group("ranks and results").add_argument
    add("-D", "--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    add("--handle", choices=environment.HANDLES, default="auto", help="how memory is opened; default: auto")
    if json == "file":
        add("-J", "--json", type=output_file, metavar="FILE", help="write the results there")
    elif json == "output":
        written = "write one JSON object, by default to standard output"
        add("--json", nargs="?", const="-", type=_file_or_output, metavar="FILE", help=written)
    if peers:
        add("--compare", type=names_from(peers, "peer"), default=[], metavar="PEER,...", help=", ".join(peers))
    return parser


def add_sweep_arguments(
    parser: argparse.ArgumentParser, *, smallest: int, factor: int = 2, largest: int | None = None
) -> None:
    """Add nccl-tests' options for the sizes to measure and the numbers of iterations."""
    least, most = format_size(smallest), "64M on the cpu, 1G on GPUs" if largest is None else format_size(largest)
    add = parser.add_argument
    add("-b", "--minbytes", type=parse_size, default=smallest, metavar="SIZE", help=f"default: {least}")
    add("-e", "--maxbytes", type=parse_size, default=largest, metavar="SIZE", help=f"default: {most}")
    add("-f", "--stepfactor", type=count_from(2), default=factor, metavar="N", help=f"default: {factor}")
    add("-n", "--iters", type=count_from(1), default=20, metavar="N", help="timed iterations; default: 20")
    add("-w", "--warmup_iters", type=count_from(0), default=5, metavar="N", help="default: 5")


def parse_size(text: str) -> int:
    """Read a size in bytes, as `nbytes_of` does. An argparse type."""
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


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return an argparse type that reads a list, as in 2,4,8."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def names_from(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Return an argparse type that reads a list of ``known`` names, each of them once. ``what`` says what they name."""

    def parse_names(text: str) -> list[str]:
        names = list(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}: use {', '.join(known)}")
        return names

    return parse_names


def output_file(text: str) -> Path:
    """Return a path, after a check that a file can be written there, because the run may be long. An argparse type."""
    path = Path(text).absolute()
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} exists and is no file: name another one")
    partial = _partial(path)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        reason = f"{path.parent} is no directory that can be written to ({error.strerror})"
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from None
    return path


def _file_or_output(text: str) -> Path | str:
    return text if text == "-" else output_file(text)


def _partial(path: Path) -> Path:
    """Return the file that becomes ``path`` when it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def write_json(path: Path, document: object) -> None:
    """Write a JSON file. It appears whole or not at all. Raises `InvalidUsageError` if it cannot be written."""
    partial = _partial(path)
    try:
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be written: {error.strerror}: name a file on another disk") from error
    finally:
        with suppress(OSError):
            partial.unlink()
