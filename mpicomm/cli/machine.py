"""This machine, its software, and the launcher and command of this process, for reports. Imports no MPI."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np

import mpicomm
from mpicomm.devices.cuda.driver import newest_cuda


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


def run_record(options: argparse.Namespace) -> dict[str, Any]:
    """Return the date, the command and the machine of a run, for the JSON file. Local."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "processor": processor(),
        "versions": versions(),
    }


def format_uuid(device_uuid: bytes) -> str | None:
    """Return a GPU's UUID as nvidia-smi writes it, or None for host memory."""
    return f"GPU-{uuid.UUID(bytes=device_uuid)}" if any(device_uuid) else None


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
