"""Facts: the doctor's knowledge of one rank. Checks read nothing else, so tests can make facts by hand."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import mpi4py

from mpicomm import environment
from mpicomm.cli.arguments import JobLaunch, launch_of
from mpicomm.devices.cuda.driver import newest_cuda


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU that a rank sees."""

    uuid: str
    name: str
    unreachable: tuple[str, ...] = ()
    """The UUIDs of visible GPUs with memory that this GPU cannot address, as the driver says."""


@dataclass(frozen=True)
class MemoryFacts:
    """How this rank opens memory of its peers, as a `Communicator` has found."""

    device: str = "cpu"
    uuid: str = ""
    """The UUID of the GPU that the rank uses; "" on the cpu."""
    handle: str = ""
    rejected: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """Why there is no Communicator, or ""."""


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank. Sizes are in bytes."""

    rank: int = 0
    host: str = "host"
    pid: int = 0
    kernel: str = ""
    """The release of Linux."""
    boot_id: str = ""
    namespaces: dict[str, str] = field(default_factory=dict)
    """The namespaces net, ipc, pid and user."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that checks read."""
    shm_device: int = 0
    """The number of the file system /dev/shm."""
    shm_free: int | None = None
    """The free bytes of /dev/shm; None without /dev/shm."""
    locked_limit: int | None = None
    """The memory that this process may lock; None without a limit."""
    infiniband: bool = False
    launch: JobLaunch = field(default_factory=JobLaunch)
    mpiexec: str = ""
    """The path of the first mpiexec on the PATH; "" without one, and for a rank that a launcher has started."""
    mpiexec_family: str = ""
    mpi: str = ""
    """MPI's own description of its library."""
    mpi_error: str = ""
    """Why mpi4py cannot load MPI, or ""."""
    world_size: int | None = None
    """None until MPI has started."""
    threads_multiple: bool = True
    unreadable: tuple[int, ...] = ()
    """Ranks of this machine with memory that process_vm_readv does not read."""
    unreadable_reason: str = ""
    driver: bool = False
    """Whether the kernel has an NVIDIA driver."""
    gpus: tuple[VisibleGpu, ...] = ()
    no_gpu_reason: str = ""
    driver_cuda: int | None = None
    """The major version of CUDA that the driver is for."""
    cupy: tuple[str, ...] = ()
    """The installed distributions of CuPy."""
    shared_service: bool = False
    """Whether NVIDIA's multi-process service (MPS) runs."""
    memory: MemoryFacts = MemoryFacts()

    @property
    def mpi_name(self) -> str:
        """The loaded library in a few words."""
        return " ".join(self.mpi.partition("\n")[0].partition(",")[0].split())

    @property
    def mpi_family(self) -> str:
        """The family of the loaded library. MPIs of one family start each other's programs."""
        return family_of(self.mpi)


def family_of(text: str) -> str:
    """Return the family of an MPI by its description or by the output of its mpiexec, or "" if it is unknown."""
    if "Open MPI" in text or "prterun" in text or "OpenRTE" in text:
        return "Open MPI"
    if any(name in text for name in ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")):
        return "MPICH"
    return ""


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


def facts_before_mpi() -> RankFacts:
    """Return the facts of this process that need no MPI, because MPI may end the process when it starts. Local.

    It loads MPI's library, but does not start MPI.
    """
    launch = launch_of(os.environ)
    mpiexec, family = ("", "") if launch.size else _find_mpiexec()
    mpi, error = _load_mpi()
    shm_device, shm_free, locked_limit = 0, None, None
    with suppress(OSError):
        size = os.statvfs("/dev/shm")
        shm_device, shm_free = os.stat("/dev/shm").st_dev, size.f_bavail * size.f_frsize  # noqa: PTH116
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and not capabilities & _CAN_LOCK_ALL:
        locked_limit = limit
    cupy = []
    for name in ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"):
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            cupy.append(name)
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
        locked_limit=locked_limit,
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        launch=launch,
        mpiexec=mpiexec,
        mpiexec_family=family,
        mpi=mpi,
        mpi_error=error,
        driver=any(Path(name).exists() for name in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")),
        driver_cuda=cuda[0] if cuda else None,
        cupy=tuple(cupy),
        shared_service=environment.multi_process_service(),
    )


def _load_mpi() -> tuple[str, str]:
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
