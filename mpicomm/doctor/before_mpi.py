"""Facts of this process that need no MPI. They come before MPI starts, because MPI may end the process then."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import mpi4py

from mpicomm import environment
from mpicomm.cli.launch import launch_of
from mpicomm.devices.cuda.driver import newest_cuda
from mpicomm.doctor.facts import RankFacts, family_of

_MPIEXEC_S = 5
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "MPICOMM_HOSTID",
    "MPIR_CVAR_CH4_CMA_ENABLE",
    "OMPI_MCA_smsc",
)
_CAN_LOCK_ALL = 1 << 14  # CAP_IPC_LOCK


def gather() -> RankFacts:
    """Return the facts of this process. It loads MPI's library, but does not start MPI. Local."""
    launch = launch_of(os.environ)
    mpiexec, family = ("", "") if launch.size else _find_mpiexec()
    mpi, error = _load_mpi()
    shm_device, shm_free = _shm()
    cuda = newest_cuda()
    return RankFacts(
        host=socket.gethostname(),
        pid=os.getpid(),
        kernel=platform.release(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        namespaces={name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("net", "ipc", "pid", "user")},
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        shm_device=shm_device,
        shm_free=shm_free,
        locked_limit=_locked_limit(),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        launch=launch,
        mpiexec=mpiexec,
        mpiexec_family=family,
        mpi=mpi,
        mpi_error=error,
        driver=any(Path(name).exists() for name in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")),
        driver_cuda=cuda[0] if cuda else None,
        cupy=_installed("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
        torch=find_spec("torch") is not None,
        shared_service=environment.multi_process_service(),
    )


def _load_mpi() -> tuple[str, str]:
    """Load MPI's library. Return its description and "", or "" and the error."""
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return "", " ".join(str(error).split())
    return MPI.Get_library_version(), ""


def _find_mpiexec() -> tuple[str, str]:
    """Return the mpiexec that a shell would start, and its family."""
    path = shutil.which("mpiexec") or shutil.which("mpirun")
    if path is None:
        return "", ""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MPIEXEC_S
        )
        return path, family_of(said.stdout)
    return path, ""


def _shm() -> tuple[int, int | None]:
    """Return the number of the file system /dev/shm and its free bytes."""
    try:
        size = os.statvfs("/dev/shm")
        return os.stat("/dev/shm").st_dev, size.f_bavail * size.f_frsize  # noqa: PTH116
    except OSError:
        return 0, None


def _locked_limit() -> int | None:
    status = Path("/proc/self/status").read_text()
    if int(status.partition("CapEff:")[2].split()[0], 16) & _CAN_LOCK_ALL:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _installed(*names: str) -> tuple[str, ...]:
    found = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            found.append(name)
    return tuple(found)
